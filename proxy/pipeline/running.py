"""Wires pipelines to what is measured and reported, and what they decide to clients and metrics."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from itertools import chain
from types import MappingProxyType

from structlog import get_logger

from metrics import Instruments
from metrics.clock import MS_PER_SECOND, clock_ms
from proxy.progress.owns import OwnedSince, Owns, owns_all
from proxy.progress.query_registry import QueryRegistry
from proxy.progress.report import Report
from proxy.progress.report_handler import AcceptedReport
from proxy.quota.manager import QuotaManager
from proxy.state import Record, StateError, StateWriter, Store
from proxy.wire.topic_partition import TopicPartition

from .arrivals import Arrivals
from .batch_limit import QueriesOf
from .batch_planner import BatchPlanner
from .completion import PIPELINE_CHANGED
from .completion_records import LEDGER_RECORDS
from .controller import FLOW_RECORDS
from .edges import TopicRange
from .enforcer import Enforcer
from .graph import PipelineSettings
from .ledger import EndedRoot, RootOutcome
from .pipeline_keys import pipeline_of, prefixes_of, records_under
from .running_pipeline import RunningPipeline
from .wall_time import WallTime
from .written_records import is_written_record, resume_written, written_records

TICK_S = 0.5
"""Between two looks at what is measured and due."""

REAPPLY_MS = 5_000.0
"""How often the state of the flow is read and applied again."""

_NOT_TAKEN_UP = "state of a pipeline not taken up"

_log = get_logger(__name__)


class RunningPipelines:
    """The pipelines of this member; stages are held by `queries_of`, producers by `quotas`."""

    def __init__(
        self,
        pipelines: Iterable[PipelineSettings],
        registry: QueryRegistry,
        queries_of: QueriesOf,
        quotas: QuotaManager,
        instruments: Instruments,
        *,
        clock_ms: Callable[[], float] = clock_ms,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._clock_ms = clock_ms
        self._clock_s = clock_s
        self._registry = registry
        self._queries_of = queries_of
        self._instruments = instruments
        self._settings: dict[str, PipelineSettings] = {}
        """Of all that are configured, whoever owns them."""
        self._owns = owns_all
        self._pipelines: dict[str, RunningPipeline] = {}
        self._planner = BatchPlanner(registry, queries_of)
        self._enforcer = Enforcer(self._planner, queries_of, quotas)
        self._arrivals = Arrivals(registry)
        self._store: Store | None = None
        self._writer: StateWriter | None = None
        self._reapply_ms = clock_ms() + REAPPLY_MS
        self._unwritten: dict[str, Record | None] = {}
        """By key; None: to be deleted."""
        self._leaving: list[str] = []
        """What the keys of pipelines begin with that are let go, and not yet written to the end."""
        self._keeping = asyncio.Lock()
        self._wake = asyncio.Event()
        self.generation = 0
        """Changes whenever `follows` may give another answer."""
        self.update(pipelines)

    def update(self, pipelines: Iterable[PipelineSettings]) -> None:
        """Follow the pipelines of another configuration; those that remain go on."""
        self.generation += 1
        now_ms = self._clock_ms()
        self._settings = {settings.name: settings for settings in pipelines}
        wanted = {name: each for name, each in self._settings.items() if self._owns.pipeline(name)}
        for name in self._pipelines.keys() - wanted.keys():
            self._drop(self._pipelines.pop(name), now_ms)
        for name, settings in wanted.items():
            pipeline = self._pipelines.get(name)
            if pipeline is None:
                self._make(settings)
            elif pipeline.graph.settings != settings:
                self._enforcer.release(pipeline, now_ms)
                pipeline.update(settings, now_ms)
                self._forget_nodes(name)
                self._enforcer.hold(pipeline, now_ms)
        self._wake.set()

    def load(self, store: Store, owns: Owns = owns_all) -> None:
        """Load what an earlier process kept there of these; write there from now on."""
        self._store, self._writer = store, StateWriter(store)
        for name in [name for name in self._pipelines if not owns.pipeline(name)]:
            self._forget(self._pipelines.pop(name))
        flow, ledger = store.items(FLOW_RECORDS.prefix), store.items(LEDGER_RECORDS["root"].prefix)
        self._owns = owns
        kept = tuple(chain.from_iterable(map(prefixes_of, self._settings)))
        strays = [
            record.key
            for record in (*flow, *ledger)
            if not record.key.startswith(kept) and owns.pipeline(pipeline_of(record.key))
        ]
        store.put_many((), delete=strays)
        for key in strays:
            problem = f"{key}: there is no such pipeline any more; deleted"
            _log.warning(_NOT_TAKEN_UP, problem=problem)
        for pipeline in self._pipelines.values():
            self._load(pipeline, flow, ledger)

    def take_up(self, records: Iterable[Record], owns: Owns) -> None:
        """Begin with the pipelines that have come, from their records."""
        came, self._owns = OwnedSince(self._owns, owns), owns
        records = list(records)
        for name, settings in self._settings.items():
            if came.pipeline(name) and name not in self._pipelines:
                self._load(self._make(settings), records, records, is_handed_over=True)
        self.generation += 1

    def let_go(self, owns: Owns) -> None:
        """Hold and follow only the pipelines of these.

        What is due for the others is written with `keep`, until `forget_leaving`.
        """
        self._owns = owns
        for name in [name for name in self._pipelines if not owns.pipeline(name)]:
            pipeline = self._pipelines.pop(name)
            self._collect(pipeline)
            written = written_records(pipeline, self._wall())
            self._unwritten.update({record.key: record for record in written})
            self._forget(pipeline)
            self._leaving += prefixes_of(name)
        self.generation += 1

    def forget_leaving(self) -> bool:
        """Write nothing more of what was let go; return whether all of it was written."""
        prefixes, self._leaving = tuple(self._leaving), []
        left = [key for key in self._unwritten if key.startswith(prefixes)] if prefixes else []
        for key in left:
            del self._unwritten[key]
        return not left

    def resume(self, store: Store) -> None:
        """Write to a store again after `close`, beginning with what has changed meanwhile."""
        self._store, self._writer = store, StateWriter(store)

    async def close(self) -> None:
        """Keep what is due, and keep nothing more: the store may be closed then."""
        await self.keep()
        writer, self._writer, self._store = self._writer, None, None
        if writer is not None:
            await writer.close()

    async def keep(self) -> bool:
        """Write what has changed; what can't be written is tried again. Return whether it was."""
        async with self._keeping:
            for each in self._pipelines.values():
                self._collect(each)
            if self._writer is None or not self._unwritten:
                return not self._unwritten
            writing, self._unwritten = self._unwritten, {}
            try:
                await self._writer.put_many(
                    [record for record in writing.values() if record is not None],
                    delete=[key for key, record in writing.items() if record is None],
                )
            except StateError as error:
                self._unwritten = writing | self._unwritten
                _log.error("state of pipelines not kept, trying again", error=str(error))
                return False
            return True

    async def reapply(self) -> None:
        """Read the state of the flow again, at a fixed period."""
        if self._clock_ms() < self._reapply_ms or self._store is None or not self._pipelines:
            return
        self._reapply_ms = self._clock_ms() + REAPPLY_MS
        running = list(self._pipelines.values())  # others may come and go meanwhile
        try:
            records = await asyncio.to_thread(self._store.items, FLOW_RECORDS.prefix)
        except StateError as error:
            _log.error("state of pipelines not read", error=str(error))
            return
        for each in running:
            each.load_flow(records_under(records, each.flow.prefix), self._clock_ms())

    def follows(self, client_id: str | None) -> bool:
        """Return whether what a client writes is of interest."""
        return client_id is not None and any(
            pipeline.stage_of(client_id) is not None or client_id in pipeline.sources
            for pipeline in self._pipelines.values()
        )

    def appended(
        self, client_id: str, topic: str, partition: int, start: int, end: int, now_ms: float
    ) -> None:
        """Record that a client has written the records from `start` up to `end`."""
        for pipeline in self._pipelines.values():
            stage = pipeline.stage_of(client_id)
            if stage is not None and topic in stage.produces:
                self._registry.appended(topic, partition, end, now_ms)
                pipeline.wrote(stage.name, TopicRange(topic, partition, start, end), now_ms)

    def plans(self, client_id: str, partitions: Set[TopicPartition], now_ms: float) -> None:
        """Record that a driver is about to be told the ends of partitions."""
        for pipeline in self._pipelines.values():
            stage = pipeline.stage_of(client_id)
            if stage is None or not pipeline.graph.settings.bounds_batches:
                continue
            if self._planner.look_up(client_id, partitions):
                self._enforcer.hold_plan(pipeline, stage, client_id, now_ms)

    def sent(self, client_id: str, count: int, records: int) -> None:
        """Record that a client has sent so many bytes for so many records."""
        if records and any(client_id in each.sources for each in self._pipelines.values()):
            self._enforcer.sent(client_id, count, records)

    def lost_ends(self, report: Report, now_ms: float) -> set[TopicPartition]:
        """Return partitions whose ends `reported` needs, for a batch begun before this process."""
        if report.batch is None:
            return set()
        started_ms = now_ms - report.age_ms - (report.batch.execution_ms or 0)
        members = (report.client_id or "", report.name or "")
        found = (each.lost_ends(members, started_ms) for each in self._pipelines.values())
        return set[TopicPartition]().union(*found)

    def reported(
        self,
        accepted: AcceptedReport,
        now_ms: float,
        ends: Mapping[TopicPartition, int] = MappingProxyType({}),
    ) -> None:
        """Apply a report that the registry has accepted; for `ends` see `lost_ends`."""
        report, query = accepted.report, accepted.query
        if accepted.new_run:
            self.generation += 1  # the query may have another name now
        for pipeline in self._pipelines.values():
            stage = pipeline.stage_of(query.client_id)
            if stage is None:
                continue
            trigger = pipeline.flow.stages[stage.name]
            trigger.seen(now_ms)
            is_late = report.run_id != query.run_id  # of an earlier run
            if report.event == "running" or (is_late and report.batch is None):
                continue
            if report.batch is not None:
                pipeline.add_batch(stage, accepted, self._queries_of(query.client_id), ends, now_ms)
            elif report.event == "idle":
                pipeline.idle(stage, now_ms - report.age_ms, now_ms)
            elif report.event == "terminated":
                trigger.ended()
            self._planner.reported(query.client_id)
            # What it has completed makes room for those before it, a root that ends for the first.
            graph = pipeline.graph
            before = {stage.name, *graph.first, *graph.upstream_of(stage.name)}
            for name in before & graph.stages.keys():
                self._enforcer.hold_stage(pipeline, graph.stages[name], now_ms)
            self._wake.set()

    def documents(self) -> Sequence[Mapping[str, object]]:
        """Return what there is to show of each pipeline."""
        now_ms = self._clock_ms()
        return [pipeline.document(now_ms) for pipeline in self._pipelines.values()]

    async def run(self) -> None:
        """Tick, write and read the state again, until it is cancelled."""
        due_ms = self._clock_ms()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(due_ms - self._clock_ms(), 0.0) / MS_PER_SECOND):
                    await self._wake.wait()
            now_ms = self._clock_ms()
            if now_ms >= due_ms:  # reports may wake this more often than that
                due_ms = now_ms + TICK_S * MS_PER_SECOND
                try:
                    self.tick(now_ms)
                except Exception as error:  # a defect of ours must not end the proxy
                    _log.error("unexpected error", about="pipelines", exc_info=error)
            self._wake.clear()
            await self.keep()
            await self.reapply()

    def tick(self, now_ms: float) -> None:
        """Do what is due by what is measured, and hold and release accordingly."""
        if not self._pipelines:
            return
        arrived, lags = self._arrivals.measure()
        for pipeline in self._pipelines.values():
            pipeline.measure(arrived, lags, now_ms)
            pipeline.completion.tick(now_ms)
            self._count_ended(pipeline.name, pipeline.completion.take_ended())
            pipeline.log(pipeline.flow.tick(now_ms))
            self._enforcer.hold(pipeline, now_ms)
            self._show(pipeline)

    def _make(self, settings: PipelineSettings) -> RunningPipeline:
        now_ms, now_s = self._clock_ms(), self._clock_s()
        made = RunningPipeline(settings, self._registry, now_ms, now_s)
        self._pipelines[settings.name] = made
        return made

    def _load(
        self,
        pipeline: RunningPipeline,
        flow: Iterable[Record],
        ledger: Iterable[Record],
        *,
        is_handed_over: bool = False,
    ) -> None:
        of_flow, of_ledger = map(records_under, (flow, ledger), prefixes_of(pipeline.name))
        written = [each for each in of_ledger if is_written_record(each, pipeline.name)]
        kept = [each for each in of_ledger if not is_written_record(each, pipeline.name)]
        problems = pipeline.load(of_flow, kept, self._clock_ms(), is_handed_over=is_handed_over)
        problems += resume_written(pipeline, written, self._wall())
        self._unwritten.update(dict.fromkeys(each.key for each in written))
        for problem in problems:
            _log.warning(_NOT_TAKEN_UP, problem=problem)
        self._enforcer.hold(pipeline, self._clock_ms())  # before a driver asks

    def _wall(self) -> WallTime:
        return WallTime.at(self._clock_ms(), self._clock_s())

    def _collect(self, pipeline: RunningPipeline) -> None:
        """Add what has changed in a pipeline to what is to be written."""
        for records, deleted in (pipeline.flow.changes(), pipeline.completion.changes()):
            self._unwritten.update(dict.fromkeys(deleted))
            self._unwritten.update({record.key: record for record in records})

    def _forget(self, pipeline: RunningPipeline) -> None:
        """Hold nobody for a pipeline that another member has, and show nothing of it."""
        self._enforcer.forget(pipeline, self._clock_ms())
        self._count_ended(pipeline.name, pipeline.completion.take_ended())
        self._forget_nodes(pipeline.name)
        self._instruments.ledger_pending.forget(pipeline=pipeline.name)

    def _drop(self, pipeline: RunningPipeline, now_ms: float) -> None:
        self._enforcer.release(pipeline, now_ms)
        name, pending = pipeline.name, pipeline.completion.ledger.pending_batches
        self._count_ended(name, pipeline.completion.take_ended())
        _log.warning("pipeline is gone", pipeline=name, pending=pending)
        if pending:
            self._instruments.ledger_failed_total.of(name, PIPELINE_CHANGED).inc(pending)
        self._forget_nodes(name)
        self._instruments.ledger_pending.forget(pipeline=name)
        # No other may take its records up; they are deleted with the next `keep`.
        _, gone = pipeline.completion.changes()
        gone += map(pipeline.completion.records.key, pipeline.completion.records.items())
        gone += [FLOW_RECORDS.key(name, node) for node in pipeline.graph.nodes]
        gone += [key for key in self._unwritten if key.startswith(prefixes_of(name))]
        self._unwritten.update(dict.fromkeys(gone))

    def _forget_nodes(self, pipeline: str) -> None:
        for metric in (self._instruments.stage_state, self._instruments.stage_rate):
            metric.forget(pipeline=pipeline)

    def _count_ended(self, name: str, ended: Iterable[EndedRoot]) -> None:
        for root in ended:
            if root.outcome is RootOutcome.COMPLETED:
                duration_s = (root.ended_ms - root.started_ms) / MS_PER_SECOND
                self._instruments.ledger_completion_seconds.of(name).observe(duration_s)
                continue
            reason = root.reason or str(root.outcome)
            self._instruments.ledger_failed_total.of(name, reason).inc()
            batch = {"stage": root.owner.stage, "batch": root.owner.batch}
            _log.warning("source batch not finished", pipeline=name, **batch, reason=reason)

    def _show(self, pipeline: RunningPipeline) -> None:
        name, instruments = pipeline.name, self._instruments
        instruments.ledger_pending.of(name).set(pipeline.completion.ledger.pending_batches)
        for node in pipeline.graph.nodes.values():
            state, ceiling = pipeline.flow.state_of(node.name), pipeline.ceilings.get(node.name)
            held = [each.rate for each in (state, ceiling) if each and each.rate is not None]
            instruments.stage_state.of(name, node.name).set(float(bool(held)))
            instruments.stage_rate.of(name, node.name).set(min(held, default=node.normal_rate))
