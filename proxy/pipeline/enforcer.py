"""Holds stages by the ceiling of their batches, and sources by their produce quota."""

from functools import partial
from operator import attrgetter

from structlog import get_logger

from metrics.clock import MS_PER_SECOND
from proxy.quota.entities import QuotaKind
from proxy.quota.manager import QuotaManager

from .batch_limit import QueriesOf
from .batch_planner import BatchPlanner
from .graph import StageSettings
from .running_pipeline import RunningPipeline, StageCeiling

SIZE_DECAY = 0.9
"""Weight of what a source sent before in the size of its records, for each request."""

_PRODUCED = QuotaKind.PRODUCER_BYTE_RATE

_log = get_logger(__name__)


class Enforcer:
    """Puts rates and limits in force: of stages by `queries_of`, of producers by `quotas`."""

    def __init__(self, planner: BatchPlanner, queries_of: QueriesOf, quotas: QuotaManager) -> None:
        self._planner = planner
        self._queries_of = queries_of
        self._quotas = quotas
        self._sent: dict[str, tuple[float, float]] = {}
        """Bytes and records that each source has sent, what is long ago with less weight."""
        self._bounded: dict[str, set[str]] = {}
        """Entities of each source whose produce quota is lowered."""

    def sent(self, client_id: str, count: int, records: int) -> None:
        """Record that a source has sent so many bytes for so many records, 1 or more."""
        before = self._sent.get(client_id, (0.0, 0.0))
        self._sent[client_id] = before[0] * SIZE_DECAY + count, before[1] * SIZE_DECAY + records

    def hold(self, pipeline: RunningPipeline, now_ms: float) -> None:
        """Hold every node to what is said of it now; clients come and go."""
        for stage in pipeline.stages.values():
            self.hold_stage(pipeline, stage, now_ms)
        for client_id in pipeline.sources:
            self._hold_source(pipeline, client_id, now_ms)

    def hold_stage(self, pipeline: RunningPipeline, stage: StageSettings, now_ms: float) -> None:
        """Hold one stage; a batch under way is read within the limit that it was planned for."""
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

    def forget(self, pipeline: RunningPipeline, now_ms: float) -> None:
        """Hold no node any more, and forget what clients have planned and sent."""
        self.release(pipeline, now_ms)
        for client_id in pipeline.sources:
            self._sent.pop(client_id, None)
        for stage in pipeline.stages.values():
            for client_id in pipeline.clients_of(stage):
                self._planner.forget(client_id)

    def _limit(
        self, pipeline: RunningPipeline, stage: StageSettings, clients: set[str], now_ms: float
    ) -> None:
        state = pipeline.flow.state_of(stage.name)
        ceilings: list[StageCeiling] = []
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
                if ceiling is not None and ceiling < stage.normal_rate:
                    ceilings.append(StageCeiling(ceiling, waits))
        pipeline.ceilings.pop(stage.name, None)
        if ceilings:
            pipeline.ceilings[stage.name] = min(ceilings, key=attrgetter("rate"))
        is_held = state is not None or any(pipeline.limits.get(each) for each in clients)
        _log_reach(pipeline, stage.name, is_held and not is_there, "a rule with adaptive")

    def _hold_source(self, pipeline: RunningPipeline, client_id: str, now_ms: float) -> None:
        state = pipeline.flow.state_of(client_id)
        if state is None or state.rate is None or client_id not in self._sent:
            self._release_source(client_id, now_ms)
            return
        sent_bytes, records = self._sent[client_id]
        bound = state.rate * (sent_bytes / records)
        entities = self._bounded.setdefault(client_id, set())
        match = partial(self._quotas.table.match, _PRODUCED)
        clients = (each for each in self._quotas.clients() if each.client_id == client_id)
        entities.update(found.entity for found in map(match, clients) if found is not None)
        _log_reach(pipeline, client_id, not entities, "a producer_byte_rate")
        reason = f"pipeline {pipeline.name}: {state.why}"
        for entity in entities:
            self._quotas.adapt(_PRODUCED, entity, bound, reason, now_ms)

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
