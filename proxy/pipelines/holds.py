"""Holds the clients of a pipeline to what is said of their nodes.

Stages are held by the ceiling of their batches, sources by their produce quota.
"""

from collections import defaultdict
from dataclasses import dataclass

from structlog import get_logger

from proxy.backpressure.control import Backpressure, QueryPressure
from proxy.pipeline.graph import MIN_RATE, StageSettings
from proxy.quota.entities import QuotaKind
from proxy.quota.manager import QuotaManager

from .line import Line
from .members import Members

SIZE_DECAY = 0.9
"""Weight of what a source sent before in the size of its records, for each request."""

_log = get_logger(__name__)


@dataclass(slots=True)
class _Size:
    """Bytes for each record of a producer, lately."""

    count: float = 0.0
    records: float = 0.0

    def add(self, count: int, records: int) -> None:
        self.count = self.count * SIZE_DECAY + count
        self.records = self.records * SIZE_DECAY + records

    @property
    def value(self) -> float | None:
        return self.count / self.records if self.records > 0 else None


class Holds:
    """Puts rates of nodes in force.

    Args:
        members: who belongs to a stage.
        backpressure: where stages are held.
        quotas: where producers are held.

    """

    def __init__(self, members: Members, backpressure: Backpressure, quotas: QuotaManager) -> None:
        self._members = members
        self._backpressure = backpressure
        self._quotas = quotas
        self._sizes: dict[str, _Size] = defaultdict(_Size)
        self._sources_held: dict[str, set[str]] = {}
        """Entities of each source whose produce quota is lowered."""

    def sent(self, client_id: str, count: int, records: int) -> None:
        """Take note that a source has sent so many bytes for so many records."""
        self._sizes[client_id].add(count, records)

    def press(self, line: Line, now_ms: float) -> None:
        """Hold every node to what is said of it now; clients come and go."""
        for stage in line.stages.values():
            self.press_stage(line, stage, now_ms)
        for client_id in line.sources:
            self._press_source(line, client_id, now_ms)

    def press_stage(self, line: Line, stage: StageSettings, now_ms: float) -> None:
        """Hold one stage to what is said of it now."""
        change = line.held.get(stage.name)
        ceiling = change.rate if change is not None else None
        why = change.reason if change is not None else ""
        if stage.name in line.graph.first and line.completion.full():
            ceiling, why = MIN_RATE, "as much is in flight as max_pending allows"
        pressures = self._pressures(stage)
        for pressed in pressures:
            if pressed.ceiling != ceiling:
                pressed.limit(ceiling, f"pipeline {line.name}: {why}", now_ms)
        is_loose = ceiling is not None and not pressures
        _say_loose(line, stage.name, is_loose, "a rule with adaptive")

    def release(self, line: Line, now_ms: float) -> None:
        """Hold no node any more."""
        line.held.clear()
        for stage in line.stages.values():
            for pressed in self._pressures(stage):
                pressed.limit(None, "", now_ms)
        for client_id in line.sources:
            self._press_source(line, client_id, now_ms)

    def _pressures(self, stage: StageSettings) -> list[QueryPressure]:
        return [
            pressed
            for client_id in self._members.clients_of(stage)
            for pressed in self._backpressure.of_client(client_id)
        ]

    def _press_source(self, line: Line, client_id: str, now_ms: float) -> None:
        change = line.held.get(client_id)
        size = self._sizes[client_id].value if client_id in self._sizes else None
        if change is None or change.rate is None or size is None:
            for entity in self._sources_held.pop(client_id, ()):
                self._quotas.adapt(QuotaKind.PRODUCER_BYTE_RATE, entity, None, None, now_ms)
            return
        bound = change.rate * size
        reason = f"pipeline {line.name}: {change.reason}"
        entities = self._sources_held.setdefault(client_id, set())
        for identity in self._quotas.clients():
            if identity.client_id == client_id:
                match = self._quotas.table.match(QuotaKind.PRODUCER_BYTE_RATE, identity)
                if match is not None:
                    entities.add(match.entity)
        _say_loose(line, client_id, not entities, "a producer_byte_rate")
        for entity in entities:
            self._quotas.adapt(QuotaKind.PRODUCER_BYTE_RATE, entity, bound, reason, now_ms)


def _say_loose(line: Line, node: str, is_loose: bool, need: str) -> None:
    """Log once that a node cannot be held, for lack of a rule or because it is not there."""
    if not is_loose:
        line.loose.discard(node)
    elif node not in line.loose:
        line.loose.add(node)
        _log.warning(
            "cannot be held now",
            pipeline=line.name,
            node=node,
            fix=f"let it connect through this proxy, and give its client id {need}",
        )
