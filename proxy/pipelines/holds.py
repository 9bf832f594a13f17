"""Holds the clients of a pipeline to what is said of their nodes.

Stages are held by the ceiling of their batches, sources by their produce quota.
"""

from collections import defaultdict
from dataclasses import dataclass

from structlog import get_logger

from metrics.clock import MS_PER_SECOND
from proxy.backpressure.backpressure import Backpressure
from proxy.pipeline.graph import StageSettings
from proxy.quota.entities import QuotaKind
from proxy.quota.manager import QuotaManager

from .line import Ceiling, Line
from .members import Members
from .rooms import Rooms

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
        rooms: say how many records a batch may have.

    """

    def __init__(
        self, members: Members, backpressure: Backpressure, quotas: QuotaManager, rooms: Rooms
    ) -> None:
        self._members = members
        self._rooms = rooms
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
        """Hold one stage to what is said of it now.

        While it has a batch under way that is read within the room that it was planned for.
        """
        clients = self._members.clients_of(stage)
        for client_id in clients:
            is_new = line.rooms.get(client_id) is None
            if is_new or not self._rooms.ahead(client_id).batches:
                line.rooms[client_id] = self._rooms.room(line, stage, client_id, now_ms)
        self._limit(line, stage, clients, now_ms)

    def press_plan(self, line: Line, stage: StageSettings, client_id: str, now_ms: float) -> None:
        """Hold a client of a stage to what there is room for now: it plans a batch."""
        line.rooms[client_id] = self._rooms.room(line, stage, client_id, now_ms)
        self._limit(line, stage, self._members.clients_of(stage), now_ms)

    def _limit(self, line: Line, stage: StageSettings, clients: set[str], now_ms: float) -> None:
        change = line.held.get(stage.name)
        line.ceilings.pop(stage.name, None)
        is_there = False
        for client_id in clients:
            room = line.rooms.get(client_id)
            for pressed in self._backpressure.of_client(client_id):
                is_there = True
                ceiling = change.rate if change is not None else None
                why, waits = change.reason if change is not None else "", None
                if room is not None:
                    # While no interval is known the driver is told the truth whatever is said here.
                    interval_ms = pressed.batch_interval_ms or MS_PER_SECOND
                    by_room = room.records * MS_PER_SECOND / interval_ms
                    if ceiling is None or by_room < ceiling:
                        ceiling, why, waits = by_room, room.why, room
                if pressed.ceiling != ceiling:
                    pressed.set_ceiling(ceiling, f"pipeline {line.name}: {why}", now_ms)
                lowest = line.ceilings.get(stage.name)
                if (
                    ceiling is not None
                    and ceiling < stage.normal_rate
                    and (lowest is None or ceiling < lowest.rate)
                ):
                    line.ceilings[stage.name] = Ceiling(ceiling, waits)
        is_held = change is not None or any(line.rooms.get(each) for each in clients)
        _say_loose(line, stage.name, is_held and not is_there, "a rule with adaptive")

    def release(self, line: Line, now_ms: float) -> None:
        """Hold no node any more."""
        line.held.clear()
        line.rooms.clear()
        for stage in line.stages.values():
            self._limit(line, stage, self._members.clients_of(stage), now_ms)
        for client_id in line.sources:
            self._press_source(line, client_id, now_ms)

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
