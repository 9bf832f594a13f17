"""Holds the clients of a pipeline to what is said of their nodes.

Stages are held by the ceiling of their batches, sources by their produce quota.
"""

from collections import defaultdict
from dataclasses import dataclass

from structlog import get_logger

from metrics.clock import MS_PER_SECOND
from proxy.quota.entities import QuotaKind
from proxy.quota.manager import QuotaManager

from .batch_planner import BatchPlanner
from .bounded_query import QueriesOf
from .graph import StageSettings
from .running_pipeline import RunningPipeline, StageCeiling

SIZE_DECAY = 0.9
"""Weight of what a source sent before in the size of its records, for each request."""

_PRODUCED = QuotaKind.PRODUCER_BYTE_RATE

_log = get_logger(__name__)


@dataclass(slots=True)
class _RecordSize:
    """Bytes for each record of a producer, lately."""

    count: float = 0.0
    records: float = 0.0

    def add(self, count: int, records: int) -> None:
        self.count = self.count * SIZE_DECAY + count
        self.records = self.records * SIZE_DECAY + records

    @property
    def value(self) -> float | None:
        return self.count / self.records if self.records > 0 else None


class Enforcer:
    """Puts rates of nodes and limits of batches in force.

    Args:
        planner: computes how many records a batch may have.
        queries_of: where stages are held.
        quotas: where producers are held.

    """

    def __init__(self, planner: BatchPlanner, queries_of: QueriesOf, quotas: QuotaManager) -> None:
        self._planner = planner
        self._queries_of = queries_of
        self._quotas = quotas
        self._sizes: dict[str, _RecordSize] = defaultdict(_RecordSize)
        """By client id of a source."""
        self._bounded: dict[str, set[str]] = {}
        """Entities of each source whose produce quota is lowered."""

    def sent(self, client_id: str, count: int, records: int) -> None:
        """Record that a source has sent so many bytes for so many records."""
        self._sizes[client_id].add(count, records)

    def hold(self, pipeline: RunningPipeline, now_ms: float) -> None:
        """Hold every node to what is said of it now; clients come and go."""
        for stage in pipeline.stages.values():
            self.hold_stage(pipeline, stage, now_ms)
        for client_id in pipeline.sources:
            self._hold_source(pipeline, client_id, now_ms)

    def hold_stage(self, pipeline: RunningPipeline, stage: StageSettings, now_ms: float) -> None:
        """Hold one stage to what is said of it now.

        While it has a batch under way that is read within the limit that it was planned for.
        """
        clients = pipeline.clients_of(stage)
        for client_id in clients:
            is_new = pipeline.limits.get(client_id) is None
            if is_new or not self._planner.planned(client_id).batches:
                pipeline.limits[client_id] = self._planner.limit(pipeline, stage, client_id, now_ms)
        self._limit(pipeline, stage, clients, now_ms)

    def hold_plan(
        self, pipeline: RunningPipeline, stage: StageSettings, client_id: str, now_ms: float
    ) -> None:
        """Hold a client of a stage to what there is room for now: it plans a batch."""
        pipeline.limits[client_id] = self._planner.limit(pipeline, stage, client_id, now_ms)
        self._limit(pipeline, stage, pipeline.clients_of(stage), now_ms)

    def release(self, pipeline: RunningPipeline, now_ms: float) -> None:
        """Hold no node any more."""
        pipeline.limits.clear()
        pipeline.ceilings.clear()
        for stage in pipeline.stages.values():
            for client_id in pipeline.clients_of(stage):
                for query in self._queries_of(client_id):
                    if query.ceiling is not None:
                        query.set_ceiling(None, f"pipeline {pipeline.name}: ", now_ms)
        for client_id in pipeline.sources:
            self._release_source(client_id, now_ms)

    def _limit(
        self, pipeline: RunningPipeline, stage: StageSettings, clients: set[str], now_ms: float
    ) -> None:
        state = pipeline.flow.state_of(stage.name)
        pipeline.ceilings.pop(stage.name, None)
        is_there = False
        for client_id in clients:
            limit = pipeline.limits.get(client_id)
            for query in self._queries_of(client_id):
                is_there = True
                ceiling, why = (state.rate, state.why) if state is not None else (None, "")
                waits = None
                if limit is not None:
                    # While no interval is known the driver is told the truth whatever is said here.
                    interval_ms = query.batch_interval_ms or MS_PER_SECOND
                    rate = limit.records * MS_PER_SECOND / interval_ms
                    if ceiling is None or rate < ceiling:
                        ceiling, why, waits = rate, limit.why, limit
                if query.ceiling != ceiling:
                    query.set_ceiling(ceiling, f"pipeline {pipeline.name}: {why}", now_ms)
                lowest = pipeline.ceilings.get(stage.name)
                if (
                    ceiling is not None
                    and ceiling < stage.normal_rate
                    and (lowest is None or ceiling < lowest.rate)
                ):
                    pipeline.ceilings[stage.name] = StageCeiling(ceiling, waits)
        is_held = state is not None or any(pipeline.limits.get(each) for each in clients)
        _log_reach(pipeline, stage.name, is_held and not is_there, "a rule with adaptive")

    def _hold_source(self, pipeline: RunningPipeline, client_id: str, now_ms: float) -> None:
        state = pipeline.flow.state_of(client_id)
        size = self._sizes[client_id].value if client_id in self._sizes else None
        if state is None or state.rate is None or size is None:
            self._release_source(client_id, now_ms)
            return
        entities = self._bounded.setdefault(client_id, set())
        for identity in self._quotas.clients():
            if identity.client_id == client_id:
                match = self._quotas.table.match(_PRODUCED, identity)
                if match is not None:
                    entities.add(match.entity)
        _log_reach(pipeline, client_id, not entities, "a producer_byte_rate")
        reason = f"pipeline {pipeline.name}: {state.why}"
        for entity in entities:
            self._quotas.adapt(_PRODUCED, entity, state.rate * size, reason, now_ms)

    def _release_source(self, client_id: str, now_ms: float) -> None:
        for entity in self._bounded.pop(client_id, ()):
            self._quotas.adapt(_PRODUCED, entity, None, None, now_ms)


def _log_reach(pipeline: RunningPipeline, node: str, is_out_of_reach: bool, need: str) -> None:
    """Log once that a node cannot be held, for lack of a rule or because it is not there."""
    if not is_out_of_reach:
        pipeline.out_of_reach.discard(node)
    elif node not in pipeline.out_of_reach:
        pipeline.out_of_reach.add(node)
        _log.warning(
            "cannot be held now",
            pipeline=pipeline.name,
            node=node,
            fix=f"let it connect through this proxy, and give its client id {need}",
        )
