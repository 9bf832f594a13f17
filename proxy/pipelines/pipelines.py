"""Wires pipelines to what is measured and reported, and what they decide to clients and metrics."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from random import SystemRandom
from types import MappingProxyType

from structlog import get_logger

from metrics import Instruments
from metrics.clock import MS_PER_SECOND, clock_ms
from proxy.backpressure.backpressure import Backpressure
from proxy.config import Config, PipelineSection
from proxy.pipeline.completion import Completion
from proxy.pipeline.early import StageBatch
from proxy.pipeline.flow import PipelineFlow
from proxy.pipeline.graph import PipelineGraph, StageSettings
from proxy.pipeline.inflight import MaxPending
from proxy.pipeline.lane import MAX_OFFSET, TopicRange
from proxy.pipeline.ledger import PIPELINE_CHANGED, Ended, Outcome
from proxy.progress.query import QueryProgress
from proxy.progress.query_registry import QueryRegistry
from proxy.progress.report import BatchReport, Report
from proxy.progress.report_handler import AcceptedReport
from proxy.quota.manager import QuotaManager
from proxy.state import Store
from proxy.wire.topic_partition import TopicPartition

from .advice import find_endless
from .holds import Holds
from .keeping import Keeping
from .line import Line, Output
from .measuring import Measuring
from .members import Members
from .rooms import Rooms

TICK_S = 0.5
"""Between two looks at what is measured and due."""

FULL_BATCH = 0.5
"""Of its interval: a batch that takes less does not say how fast its stage can process."""

_log = get_logger(__name__)


class Pipelines:
    """All pipelines of the configuration.

    Args:
        config: its `pipelines` are read.
        registry: knows log ends and lag, and which client a query reads with.
        backpressure: where stages are held.
        quotas: where producers are held.
        instruments: show state, rates and the ledger.
        clock_ms: monotonic.
        clock_s: the wall clock.

    """

    def __init__(
        self,
        config: Config,
        registry: QueryRegistry,
        backpressure: Backpressure,
        quotas: QuotaManager,
        instruments: Instruments,
        *,
        clock_ms: Callable[[], float] = clock_ms,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._clock_ms = clock_ms
        self._clock_s = clock_s
        self._registry = registry
        self._backpressure = backpressure
        self._instruments = instruments
        self._lines: dict[str, Line] = {}
        self._members = Members(registry)
        self._rooms = Rooms(self._members, registry, backpressure)
        self._holds = Holds(self._members, backpressure, quotas, self._rooms)
        self._measuring = Measuring(registry)
        self._keeping = Keeping()
        self._wake = asyncio.Event()
        self.generation = 0
        """Changes whenever `follows` may give another answer."""
        self.update(config)

    # Life

    def update(self, config: Config) -> None:
        """Follow the pipelines of another configuration; those that remain go on."""
        self.generation += 1
        now_ms = self._clock_ms()
        wanted = {pipeline.name: pipeline for pipeline in config.pipelines}
        for name in self._lines.keys() - wanted.keys():
            self._drop(self._lines.pop(name), now_ms)
        for name, pipeline in wanted.items():
            line = self._lines.get(name)
            if line is None:
                self._lines[name] = self._begin(pipeline, now_ms)
            elif line.settings != pipeline:
                self._change(line, pipeline, now_ms)
        self._wake.set()

    def load(self, store: Store) -> None:
        """Take up what an earlier process kept there; write there from now on."""
        now_ms = self._clock_ms()
        self._keeping.load(store, self._lines, now_ms)
        for line in self._lines.values():
            line.loaded_ms = now_ms
            self._holds.press(line, now_ms)  # before a driver asks

    def works(self) -> Iterator[Callable[[], Coroutine[None, None, None]]]:
        """Yield what is to run until it is cancelled."""
        yield self._run_pipelines

    async def close(self) -> None:
        """Keep what is due, and keep nothing more: the store may be closed then."""
        await self.keep()
        await self._keeping.close()

    async def keep(self) -> None:
        """Write what has changed; what can't be written is tried again."""
        await self._keeping.keep(self._lines.values())

    # What the relay tells

    def follows(self, client_id: str | None) -> bool:
        """Say whether what a client writes is of interest."""
        return client_id is not None and any(
            self._members.stage_of(line, client_id) is not None or client_id in line.sources
            for line in self._lines.values()
        )

    def appended(
        self, client_id: str, topic: str, partition: int, start: int, end: int, now_ms: float
    ) -> None:
        """Take note that a client has written the records from `start` up to `end`."""
        for line in self._lines.values():
            stage = self._members.stage_of(line, client_id)
            if stage is None or topic not in stage.produces:
                continue
            self._registry.appended(topic, partition, end, now_ms)
            line.wrote(stage.name, Output(TopicRange(topic, partition, start, end), now_ms))

    def plans(self, client_id: str, partitions: Set[TopicPartition], now_ms: float) -> None:
        """Take note that a driver is about to be told the ends of partitions."""
        for line in self._lines.values():
            stage = self._members.stage_of(line, client_id)
            if stage is None or not self._rooms.is_bounded(line):
                continue
            if self._rooms.asks(client_id, partitions):
                self._holds.press_plan(line, stage, client_id, now_ms)

    def sent(self, client_id: str, count: int, records: int) -> None:
        """Take note that a client has sent so many bytes for so many records."""
        if records and any(client_id in line.sources for line in self._lines.values()):
            self._holds.sent(client_id, count, records)

    # What reports tell

    def unsure(self, report: Report, now_ms: float) -> set[TopicPartition]:
        """Return the partitions whose log ends should be passed to `reported`.

        Not none when a stage reports a batch that began before this process did.
        """
        if report.batch is None:
            return set()
        started_ms = now_ms - report.age_ms - (report.batch.execution_ms or 0)
        keys: set[TopicPartition] = set()
        for line in self._lines.values():
            stage = line.members.get(report.client_id or "") or line.members.get(report.name or "")
            if stage is not None and line.recovery.concerns(stage, started_ms):
                keys |= self._starts(line, stage).keys()
        return keys

    def _starts(self, line: Line, stage: StageSettings) -> dict[TopicPartition, int]:
        """Return up to where it is known who wrote what of a stage's topics.

        Where nothing was written yet it is what the readers have completed, if there are any.
        """
        starts: dict[TopicPartition, int] = {}
        for query in self._registry.queries:
            for key, partition in query.partitions.items():
                if partition.committed_to is not None:
                    starts[key] = min(starts.get(key, MAX_OFFSET), partition.committed_to)
        starts |= line.completion.known_ends()
        return {key: start for key, start in starts.items() if key[0] in stage.produces}

    def reported(
        self,
        accepted: AcceptedReport,
        now_ms: float,
        ends: Mapping[TopicPartition, int] = MappingProxyType({}),
    ) -> None:
        """Take in a report that the registry has accepted; for `ends` see `unsure`."""
        report, query = accepted.report, accepted.query
        if accepted.new_run:
            self.generation += 1  # the query may have another name now
        for line in self._lines.values():
            stage = self._members.stage_of(line, query.client_id)
            if stage is None:
                continue
            line.flow.alive(stage.name, now_ms)
            is_late = report.run_id != query.run_id  # of an earlier run
            if report.event == "running" or (is_late and report.batch is None):
                continue
            if report.batch is not None:
                self._add_batch(line, stage, accepted, ends, now_ms)
            elif report.event == "idle":
                # What came after that belongs to a batch that is not reported yet.
                idle_ms = now_ms - report.age_ms
                if all(each.at_ms <= idle_ms for each in line.outputs[stage.name]):
                    line.completion.idle(stage.name, now_ms)
            elif report.event == "terminated":
                line.flow.ended(stage.name)
            self._rooms.reported(query.client_id)
            # What it has completed makes room for those before it, a root that ends for the first.
            before = line.graph.upstream_of(stage.name)
            for name in {stage.name, *line.graph.first, *before} & line.stages.keys():
                self._holds.press_stage(line, line.stages[name], now_ms)
            self._wake.set()

    def _add_batch(
        self,
        line: Line,
        stage: StageSettings,
        accepted: AcceptedReport,
        ends: Mapping[TopicPartition, int],
        now_ms: float,
    ) -> None:
        report, query = accepted.report, accepted.query
        batch = report.batch
        assert batch is not None
        ended_ms = now_ms - report.age_ms
        execution_ms = float(batch.execution_ms or 0)
        started_ms = ended_ms - execution_ms
        outputs = line.take_outputs(stage.name, ended_ms)
        unseen = self._unseen(line, stage, started_ms, ends)
        pressed = self._backpressure.of_client(query.client_id)
        size = next((each.bytes_per_record for each in pressed if each.bytes_per_record), 0.0)
        line.completion.stage_batch(
            StageBatch(
                stage=stage.name,
                batch=batch.batch_id,
                inputs=tuple(_inputs(stage, query, batch)),
                outputs=(*outputs, *unseen),
                started_ms=started_ms,
                size_bytes=round(batch.rows * (size or 0.0)),
            ),
            now_ms,
        )
        if batch.rows > 0 and execution_ms > 0:
            rate = next((each.processing_rate for each in pressed if each.processing_rate), None)
            # A short batch had little to do: what it shows is Spark's own time, not the stage's.
            if not any(
                execution_ms < FULL_BATCH * (each.batch_interval_ms or 0) for each in pressed
            ):
                line.flow.processing_rate(
                    stage.name, rate or batch.rows / execution_ms * MS_PER_SECOND, now_ms
                )
            made: dict[str, int] = dict.fromkeys(stage.produces, 0)
            for each in outputs:
                made[each.topic] += each.end - each.start
            line.flow.converted(stage.name, batch.rows, made)

    def _unseen(
        self,
        line: Line,
        stage: StageSettings,
        started_ms: float,
        ends: Mapping[TopicPartition, int],
    ) -> tuple[TopicRange, ...]:
        """Return what only an earlier process can have seen a batch write."""
        if not line.recovery.concerns(stage, started_ms):
            return ()
        later = [each.range for each in line.outputs[stage.name]]
        unseen = line.recovery.recover(stage, self._starts(line, stage), ends, later)
        if unseen:
            records = sum(each.end - each.start for each in unseen)
            _log.info("counted what an earlier process saw", stage=stage.name, records=records)
        return unseen

    # What the admin server asks

    def documents(self) -> Sequence[Mapping[str, object]]:
        """Return what there is to show of each pipeline."""
        now_ms = self._clock_ms()
        return [
            {
                **line.describe(line.flow.documents(now_ms)),
                "completion": line.completion.document(now_ms),
            }
            for line in self._lines.values()
        ]

    # The loop

    async def _run_pipelines(self) -> None:
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
            await self._keeping.reapply(self._lines.values(), self._clock_ms)

    def tick(self, now_ms: float) -> None:
        """Look at what is measured and due, and hold and release accordingly."""
        if not self._lines:
            return
        arrived, lags = self._measuring.look()
        for line in self._lines.values():
            for source in line.graph.settings.sources:
                for topic in source.produces:
                    if topic in arrived:
                        line.flow.arrived(topic, arrived[topic], now_ms)
            for stage in line.stages.values():
                if all(topic in arrived for topic in stage.consumes):
                    received = sum(arrived[topic] for topic in stage.consumes)
                    line.flow.sample(stage.name, received, now_ms)
                clients = self._members.clients_of(stage)
                known = [
                    lags[client, topic]
                    for client in clients
                    for topic in stage.consumes
                    if (client, topic) in lags
                ]
                if known:
                    line.flow.lag(stage.name, sum(known))
            line.completion.tick(now_ms)
            self._tell_ended(line, line.completion.take_ended())
            line.apply(line.flow.tick(now_ms))
            self._holds.press(line, now_ms)
            self._show(line)

    # Making, changing, dropping

    def _begin(self, pipeline: PipelineSection, now_ms: float) -> Line:
        settings = pipeline.settings
        graph = PipelineGraph(settings)
        now_s = self._clock_s()
        completion = Completion(
            pipeline.name,
            [graph.stages[name] for name in graph.order],
            timeout_ms=pipeline.timeout_ms,
            random=SystemRandom(),
            now_ms=now_ms,
            now_s=now_s,
            max_pending=MaxPending(settings.max_pending_batches, settings.max_pending_bytes),
        )
        _warn(pipeline)
        return Line(pipeline, graph, PipelineFlow(settings, now_ms, now_s), completion)

    def _change(self, line: Line, pipeline: PipelineSection, now_ms: float) -> None:
        _warn(pipeline)
        self._holds.release(line, now_ms)
        settings = pipeline.settings
        line.follow(pipeline, PipelineGraph(settings))
        line.apply(line.flow.update(settings, now_ms))
        line.apply(line.flow.reapply(now_ms))
        stages = [line.graph.stages[name] for name in line.graph.order]
        line.completion.update(stages, pipeline.timeout_ms, now_ms)
        line.completion.max_pending.limit(settings.max_pending_batches, settings.max_pending_bytes)
        self._forget_nodes(pipeline.name)
        self._holds.press(line, now_ms)

    def _drop(self, line: Line, now_ms: float) -> None:
        self._holds.release(line, now_ms)
        self._tell_ended(line, line.completion.take_ended())
        name, pending = line.name, line.completion.max_pending.batches
        _log.warning("pipeline is gone", pipeline=name, pending=pending)
        if pending:
            self._instruments.ledger_failed_total.of(name, PIPELINE_CHANGED).inc(pending)
        self._forget_nodes(name)
        self._instruments.ledger_pending.forget(pipeline=name)
        self._keeping.forget(line)

    def _forget_nodes(self, pipeline: str) -> None:
        for metric in (self._instruments.stage_state, self._instruments.stage_rate):
            metric.forget(pipeline=pipeline)

    # Metrics

    def _tell_ended(self, line: Line, ended: Iterable[Ended]) -> None:
        name = line.name
        for root in ended:
            if root.outcome is Outcome.COMPLETED:
                duration_s = (root.ended_ms - root.started_ms) / MS_PER_SECOND
                self._instruments.ledger_completion_seconds.of(name).observe(duration_s)
                continue
            reason = root.reason or str(root.outcome)
            self._instruments.ledger_failed_total.of(name, reason).inc()
            _log.warning(
                "source batch not finished",
                pipeline=name,
                stage=root.owner.stage,
                batch=root.owner.batch,
                reason=reason,
            )

    def _show(self, line: Line) -> None:
        name = line.name
        instruments = self._instruments
        instruments.ledger_pending.of(name).set(line.completion.max_pending.batches)
        nodes = {node.name: node.normal_rate for node in line.graph.nodes.values()}
        for node, normal_rate in nodes.items():
            change, ceiling = line.held.get(node), line.ceilings.get(node)
            is_held = change is not None or ceiling is not None
            rate = change.rate if change is not None and change.rate is not None else normal_rate
            if ceiling is not None:
                rate = min(rate, ceiling.rate)
            instruments.stage_state.of(name, node).set(float(is_held))
            instruments.stage_rate.of(name, node).set(rate)


def _inputs(stage: StageSettings, query: QueryProgress, batch: BatchReport) -> Iterator[TopicRange]:
    """Yield what a batch has completed of the topics of its stage."""
    for (topic, partition), span in batch.ranges.items():
        if topic not in stage.consumes:
            continue
        start = span.start
        if start is None:  # the first batch of a query
            kept = query.partitions.get((topic, partition))
            start = min(span.end, (kept.log.log_start_offset if kept else None) or 0)
        if start < span.end:
            yield TopicRange(topic, partition, start, span.end)


def _warn(pipeline: PipelineSection) -> None:
    for problem in find_endless(pipeline):
        _log.warning("a hold may never end", problem=problem)
