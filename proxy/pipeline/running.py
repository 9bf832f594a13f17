"""Wires pipelines to what is measured and reported, and what they decide to clients and metrics."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Set
from dataclasses import InitVar, dataclass, field

from structlog import get_logger

from metrics import Instruments
from metrics.clock import MS_PER_SECOND, clock_ms
from metrics.exposition import MetricRows, MetricTable
from proxy.backpressure.backpressure import Backpressure
from proxy.backpressure.drivers import PartitionOffsets
from proxy.progress.query import AcceptedReport
from proxy.progress.query_registry import Ownership, QueryRegistry
from proxy.progress.report import Report
from proxy.quota.manager import QuotaManager
from proxy.state import Record, StateError, Store, UnwrittenRecords
from proxy.state.state_records import key_parts
from proxy.wire.topic_partition import TopicPartition

from .completion import PIPELINE_CHANGED
from .graph import PipelineGraph, PipelineSettings
from .ledger import LEDGER_RECORDS, TopicRange
from .nodes import FLOW_RECORDS, SourceProducer, Stage
from .running_pipeline import RunningPipeline

TICK_S = 0.5
"""Between two looks at what is measured and due."""

REAPPLY_MS = 5_000.0
"""How often the state of the flow is read and applied again."""

OF_PIPELINES = MetricTable(
    ("pipeline",),
    {
        "ledger_pending": (
            "Source batches that are not finished.",
            lambda pipeline, _: pipeline.completion.ledger.pending_batches,
        ),
    },
)

OF_NODES = MetricTable(
    ("pipeline", "stage"),
    {
        "stage_state": (
            "1 while a node of a pipeline is held to a lower rate.",
            lambda node, _: float(bool(node.held)),
        ),
        "stage_rate": (
            "Rate in force of a node of a pipeline, in records per second.",
            lambda node, _: min(node.held, default=node.normal_rate),
        ),
    },
)

_PREFIXES = (FLOW_RECORDS.prefix, LEDGER_RECORDS["root"].prefix)
_NOT_TAKEN_UP = "state of a pipeline not taken up"

_log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class RunningPipelines:
    """The pipelines of this member; stages are held by backpressure, producers by quotas."""

    pipelines: InitVar[Iterable[PipelineSettings]]
    _registry: QueryRegistry
    _backpressure: Backpressure
    _quotas: QuotaManager
    _instruments: Instruments
    on_change: Callable[[], None]
    """Called when there is something to write: see `unwritten`."""
    clock_ms: Callable[[], float] = clock_ms
    clock_s: Callable[[], float] = time.time
    unwritten: UnwrittenRecords = field(default_factory=UnwrittenRecords)
    running: dict[str, RunningPipeline] = field(default_factory=dict)
    """By name; for reading."""
    stages: dict[str, Stage] = field(default_factory=dict)
    """By the queries and client ids that are these stages; for reading."""
    store: Store | None = None
    """Where the state of the flow is read again; None while it is closed."""
    generation: int = 0
    """Changes whenever `follows` may give another answer."""
    _settings: dict[str, PipelineSettings] = field(default_factory=dict)
    """Of all that are configured, whoever owns them."""
    _owns: Ownership | None = None
    """None: nothing is taken up so far."""
    _sources: dict[str, list[SourceProducer]] = field(default_factory=dict)
    """By client id."""
    _ends: dict[TopicPartition, int] = field(default_factory=dict)
    """The log end of each partition that was known at the last tick."""
    _arrived: dict[str, int] = field(default_factory=dict)
    """By topic: what has arrived since it became known."""
    _reapply_ms: float = field(init=False)

    def __post_init__(self, pipelines: Iterable[PipelineSettings]) -> None:
        """Follow these pipelines, of which none is taken up so far."""
        self._reapply_ms = self.clock_ms() + REAPPLY_MS
        self.update(pipelines)

    def update(self, pipelines: Iterable[PipelineSettings]) -> None:
        """Follow the pipelines of another configuration; those that remain go on."""
        self._settings = {settings.name: settings for settings in pipelines}
        for name in self.running.keys() - self._settings.keys():
            self._drop(self.running.pop(name))
        for name, pipeline in self.running.items():
            if pipeline.graph.settings != self._settings[name]:
                pipeline.reload(PipelineGraph(self._settings[name]), self.clock_ms())
        self._make_owned()
        self.on_change()

    def assign(
        self, records: Iterable[Record], owns: Ownership, *, is_handed_over: bool = True
    ) -> None:
        """Begin with the pipelines that have come, from their records, whoever wrote them.

        Where they are not handed over they are what an earlier process left, and those of pipelines
        that are not there any more are deleted.
        """
        self._owns = owns
        found: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            if record.key.startswith(_PREFIXES):
                found[key_parts(record.key)[1]].append(record)
        for name in () if is_handed_over else found.keys() - self._settings.keys():
            for record in found[name]:
                self.unwritten.mark_deleted(record.key)
                problem = f"{record.key}: there is no such pipeline any more; deleted"
                _log.warning(_NOT_TAKEN_UP, problem=problem)
        now_ms = self.clock_ms()
        for pipeline in self._make_owned():
            of_it = found[pipeline.name]
            for problem in pipeline.assign(of_it, now_ms, is_handed_over=is_handed_over):
                _log.warning(_NOT_TAKEN_UP, problem=problem)

    def revoke(self, owns: Ownership) -> None:
        """Hold and follow only the pipelines of these.

        What is due for the others is in the `unwritten`, until `forget_leaving`.
        """
        self._owns = owns
        for name in [name for name in self.running if not owns.pipeline(name)]:
            pipeline = self.running.pop(name)
            pipeline.completion.hand_over()
            self.unwritten.leaving |= {*pipeline.nodes.values(), pipeline.completion}
            self._leave(pipeline)
        self._index()

    def lost_sight(self) -> None:
        """Record that others may have served the clients of pipelines up to now."""
        for pipeline in self.running.values():
            pipeline.completion.lost_sight(self.clock_ms())

    async def reapply(self) -> None:
        """Read the state of the flow again, at a fixed period."""
        if self.clock_ms() < self._reapply_ms or self.store is None or not self.running:
            return
        self._reapply_ms = self.clock_ms() + REAPPLY_MS
        names = list(self.running)  # others may come and go meanwhile
        try:
            records = await asyncio.to_thread(self.store.items, FLOW_RECORDS.prefix)
        except StateError as error:
            _log.error("state of pipelines not read", error=str(error))
            return
        for each in filter(None, map(self.running.get, names)):
            each.load(records, self.clock_ms())

    def follows(self, client_id: str) -> bool:
        """Return whether what a client writes is of interest."""
        return client_id in self._sources or self._stage_of(client_id) is not None

    def appended(
        self, client_id: str, topic: str, partition: int, start: int, end: int, now_ms: float
    ) -> None:
        """Record that a client has written the records from `start` up to `end`."""
        stage = self._stage_of(client_id)
        if stage is not None and topic in stage.settings.produces:
            for reader in self._registry.readers_of(topic, partition):
                reader.record_high_watermark(end, now_ms)
            written = TopicRange(topic, partition, start, end)
            self.running[stage.pipeline].wrote(stage, written, now_ms)

    def plans(self, client_id: str, partitions: Set[TopicPartition], now_ms: float) -> None:
        """Record that a driver is about to be told the ends of partitions."""
        if (stage := self._stage_of(client_id)) is not None:
            self.running[stage.pipeline].plans(stage, client_id, partitions, now_ms)

    def sent(self, client_id: str, count: int, records: int) -> None:
        """Record that a client has sent so many bytes for so many records."""
        for source in self._sources.get(client_id, ()) if records else ():
            source.sent(count, records)

    def lost_ends(self, report: Report) -> set[TopicPartition]:
        """Return partitions whose ends `reported` needs, for a batch begun before this process."""
        stage = self._stage_named(report.client_id, report.name)
        if report.batch is None or stage is None:
            return set()
        pipeline = self.running[stage.pipeline]
        started_ms = self.clock_ms() - report.age_ms - (report.batch.execution_ms or 0)
        is_lost = pipeline.completion.is_recovering(stage.name, started_ms)
        return set(pipeline.known_ends(stage)) if is_lost else set()

    def reported(self, accepted: AcceptedReport, now_ms: float, ends: PartitionOffsets) -> None:
        """Apply a report that the registry has accepted; for `ends` see `lost_ends`."""
        if accepted.new_run:
            self.generation += 1  # the query may have another name now
        stage = self._stage_named(accepted.query.client_id, accepted.query.name)
        if stage and self.running[stage.pipeline].reported(stage, accepted, ends, now_ms):
            self.on_change()

    def shown(self) -> MetricRows:
        """List the rows of OF_PIPELINES."""
        return [((name,), pipeline) for name, pipeline in self.running.items()]

    def shown_nodes(self) -> MetricRows:
        """List the rows of OF_NODES."""
        for name, pipeline in tuple(self.running.items()):
            for node in tuple(pipeline.nodes.values()):
                yield (name, node.name), node

    async def run(self) -> None:
        """Tick, and read the state again, until it is cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.tick(self.clock_ms())
            except Exception as error:  # a defect of ours must not end the proxy
                _log.error("unexpected error", about="pipelines", exc_info=error)
            await self.reapply()
            if self.unwritten:
                self.on_change()

    def tick(self, now_ms: float) -> None:
        """Do what is due by what is measured, and hold and release accordingly."""
        if not self.running:
            return
        self._count_arrived()
        for pipeline in self.running.values():
            pipeline.advance(self._arrived, now_ms)
            self._count_ended(pipeline)

    def _stage_named(self, client_id: str | None, name: str | None) -> Stage | None:
        return self.stages.get(client_id or "") or self.stages.get(name or "")

    def _stage_of(self, client_id: str) -> Stage | None:
        query = self._registry.query_of(client_id)
        return self._stage_named(client_id, query.name if query is not None else None)

    def _index(self) -> None:
        """Find out anew who is in which pipeline."""
        self.generation += 1
        self.stages, self._sources = {}, {}
        for pipeline in self.running.values():
            for stage in pipeline.stages.values():
                self.stages |= dict.fromkeys(stage.settings.members, stage)
            for source in pipeline.sources.values():
                self._sources.setdefault(source.name, []).append(source)

    def _count_arrived(self) -> None:
        """Count what has arrived, by the progress of all queries."""
        ends: dict[TopicPartition, int] = {}
        for query in self._registry.queries:
            for key, partition in query.partitions.items():
                end = partition.log.high_watermark
                if end is not None:
                    ends[key] = max(ends.get(key, 0), end)
        arrived: dict[str, int] = {}
        for key, end in ends.items():
            # What was there when a partition became known has not arrived just now.
            new = max(0, end - self._ends.get(key, end))
            arrived[key[0]] = arrived.get(key[0], self._arrived.get(key[0], 0)) + new
        self._ends, self._arrived = ends, arrived

    def _make_owned(self) -> list[RunningPipeline]:
        """Begin with the pipelines that are this member's and do not run; return them."""
        owns = self._owns
        made = [
            RunningPipeline(
                *(PipelineGraph(settings), self._registry, self._backpressure, self._quotas),
                self.unwritten,
                now_ms=self.clock_ms(),
                now_s=self.clock_s(),
            )
            for name, settings in self._settings.items()
            if name not in self.running and owns is not None and owns.pipeline(name)
        ]
        self.running |= {pipeline.name: pipeline for pipeline in made}
        self._index()
        return made

    def _leave(self, pipeline: RunningPipeline) -> None:
        """Hold nobody for a pipeline that is gone, or another member's."""
        pipeline.release(self.clock_ms())
        self._count_ended(pipeline)

    def _drop(self, pipeline: RunningPipeline) -> None:
        name, completion = pipeline.name, pipeline.completion
        self._leave(pipeline)
        pending = completion.ledger.pending_batches
        _log.warning("pipeline is gone", pipeline=name, pending=pending)
        if pending:
            self._instruments.ledger_failed_total.of(name, PIPELINE_CHANGED).inc(pending)
        # No other may take its records up, also what is just being written.
        completion.clear(self.clock_ms())
        for node in pipeline.nodes.values():
            node.begin()
            self.unwritten.mark_removed(node)

    def _count_ended(self, pipeline: RunningPipeline) -> None:
        name = pipeline.name
        for root in pipeline.completion.ledger.take_ended():
            if not root.reason:
                duration_s = (root.ended_ms - root.started_ms) / MS_PER_SECOND
                self._instruments.ledger_completion_seconds.of(name).observe(duration_s)
                continue
            self._instruments.ledger_failed_total.of(name, root.reason).inc()
            batch = {"stage": root.owner.stage, "batch": root.owner.batch}
            _log.warning("source batch not finished", pipeline=name, **batch, reason=root.reason)
