"""Wires pipelines to what is measured, and what they decide to clients, state and metrics."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import SystemRandom

from structlog import get_logger

from metrics import Instruments
from proxy.backpressure.control import Backpressure
from proxy.config import Config, Pipeline
from proxy.pipeline.completion import Completion
from proxy.pipeline.controller import record_key
from proxy.pipeline.early import StageBatch
from proxy.pipeline.flow import PipelineFlow, RateChange, find_strays
from proxy.pipeline.graph import MIN_RATE, PipelineGraph, StageSettings
from proxy.pipeline.inflight import MaxPending
from proxy.pipeline.lane import TopicRange
from proxy.pipeline.ledger import PIPELINE_CHANGED, Ended, Outcome
from proxy.progress.book import Accepted, ProgressBook
from proxy.progress.spans import PartitionKey, spans_of
from proxy.quota.entities import QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.relay.services import MS_PER_SECOND, clock_ms
from proxy.state import Record, StateError, StateWriter, Store

TICK_S = 0.5
"""Between two looks at what is measured and due."""

FLOW_RECORDS = "flow/"
LEDGER_RECORDS = "ledger/"

MAX_OUTPUTS = 10_000
"""Ranges that a stage has written since its last report; of more the oldest belong to no batch."""

SIZE_DECAY = 0.9
"""Weight of what a source sent before in the size of its records, for each request."""

FULL_BATCH = 0.5
"""Of its interval: a batch that takes less does not say how fast its stage can process."""

EXECUTION = "triggerExecution"

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Output:
    """A range that a client of a stage has written, and when."""

    range: TopicRange
    at_ms: float


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


@dataclass(slots=True)
class _Line:
    """One pipeline at work."""

    settings: Pipeline
    graph: PipelineGraph
    flow: PipelineFlow
    completion: Completion
    outputs: dict[str, list[_Output]] = field(default_factory=lambda: defaultdict(list))
    """By stage, since its last report."""
    loose: set[str] = field(default_factory=set)
    """Nodes that are to be held and cannot be."""
    crowded: set[str] = field(default_factory=set)
    """Stages that have written more since their last report than is kept."""
    held: dict[str, RateChange] = field(default_factory=dict)
    """By node: what the flow last said of it, where that is a rate."""

    members: dict[str, StageSettings] = field(default_factory=dict)
    """By query name and client id."""

    def __post_init__(self) -> None:
        self.follow(self.settings, self.graph)

    def follow(self, settings: Pipeline, graph: PipelineGraph) -> None:
        """Go on as the configuration says now."""
        self.settings, self.graph = settings, graph
        self.members = {
            member: stage for stage in graph.stages.values() for member in stage.members
        }

    @property
    def stages(self) -> Mapping[str, StageSettings]:
        return self.graph.stages


class Pipelines:
    """All pipelines of the configuration.

    Args:
        config: its `pipelines` are read.
        book: knows log ends and lag, and which client a query reads with.
        backpressure: where stages are held.
        quotas: where producers are held.
        instruments: show state, rates and the ledger.
        clock_ms: monotonic.
        clock_s: the wall clock.

    """

    def __init__(
        self,
        config: Config,
        book: ProgressBook,
        backpressure: Backpressure,
        quotas: QuotaManager,
        instruments: Instruments,
        *,
        clock_ms: Callable[[], float] = clock_ms,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._clock_ms = clock_ms
        self._clock_s = clock_s
        self._book = book
        self._backpressure = backpressure
        self._quotas = quotas
        self._instruments = instruments
        self._lines: dict[str, _Line] = {}
        self._sizes: dict[str, _Size] = defaultdict(_Size)
        self._sources_held: dict[str, set[str]] = {}
        """Entities of each source whose produce quota is lowered."""
        self._named: dict[str, str] = {}
        """Client ids of queries by name."""
        self._ends: dict[PartitionKey, int] = {}
        """The log end of each partition that was known at the last look."""
        self._arrived: dict[str, int] = {}
        """By topic, how many records have arrived since its partitions became known."""
        self._store: Store | None = None
        self._writer: StateWriter | None = None
        self._unwritten: dict[str, Record | None] = {}
        """By key; None: to be deleted."""
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
        self._store, self._writer = store, StateWriter(store)
        now_ms = self._clock_ms()
        flow, ledger = store.items(FLOW_RECORDS), store.items(LEDGER_RECORDS)
        strays = find_strays(flow, self._lines)
        prefixes = tuple(line.completion.prefix for line in self._lines.values())
        for record in ledger:
            if not record.key.startswith(prefixes):
                strays[record.key] = f"{record.key}: there is no such pipeline any more; deleted"
        for message in strays.values():
            _log.warning("state of a pipeline not taken up", problem=message)
        store.put_many((), delete=strays)
        for line in self._lines.values():
            problems = line.completion.load(_under(ledger, line.completion.prefix), now_ms)
            problems += line.flow.load(_under(flow, line.flow.prefix), now_ms)
            for problem in problems:
                _log.warning("state of a pipeline not taken up", problem=problem)
            self._apply(line, line.flow.reapply(now_ms))

    def works(self) -> Iterator[Callable[[], Coroutine[None, None, None]]]:
        """Yield what is to run until it is cancelled."""
        yield self._run_pipelines

    async def close(self) -> None:
        """Keep what is due, and keep nothing more: the store may be closed then."""
        await self.keep()
        writer, self._writer, self._store = self._writer, None, None
        if writer is not None:
            await writer.close()

    # What the relay tells

    def follows(self, client_id: str | None) -> bool:
        """Say whether what a client writes is of interest."""
        return client_id is not None and any(
            self._stage_of(line, client_id) is not None or _is_source(line, client_id)
            for line in self._lines.values()
        )

    def appended(
        self, client_id: str, topic: str, partition: int, start: int, end: int, now_ms: float
    ) -> None:
        """Take note that a client has written the records from `start` up to `end`."""
        for line in self._lines.values():
            stage = self._stage_of(line, client_id)
            if stage is None or topic not in stage.produces:
                continue
            outputs = line.outputs[stage.name]
            outputs.append(_Output(TopicRange(topic, partition, start, end), now_ms))
            if len(outputs) > MAX_OUTPUTS:
                del outputs[0]
                if stage.name not in line.crowded:  # once, not for each
                    line.crowded.add(stage.name)
                    _log.warning("more is written than can be kept", stage=stage.name)

    def sent(self, client_id: str, count: int, records: int) -> None:
        """Take note that a client has sent so many bytes for so many records."""
        if records and any(_is_source(line, client_id) for line in self._lines.values()):
            self._sizes[client_id].add(count, records)

    # What reports tell

    def reported(self, accepted: Accepted, now_ms: float) -> None:
        """Take in a report that the book has accepted."""
        report, query = accepted.report, accepted.query
        if accepted.new_run:
            self.generation += 1  # the query may have another name now
        self._named[query.name] = query.client_id
        for line in self._lines.values():
            stage = self._stage_of(line, query.client_id)
            if stage is None:
                continue
            line.flow.alive(stage.name, now_ms)
            if report.batch is not None:
                self._add_batch(line, stage, accepted, now_ms)
            elif report.event == "idle":
                # What came after that belongs to a batch that is not reported yet.
                idle_ms = now_ms - report.age_ms
                if all(each.at_ms <= idle_ms for each in line.outputs[stage.name]):
                    line.completion.idle(stage.name, now_ms)
            elif report.event == "terminated":
                line.flow.ended(stage.name)
            # Now its driver may ask how far to read, and is not told less later on.
            self._press_stage(line, stage, now_ms)
            self._wake.set()

    def _add_batch(
        self, line: _Line, stage: StageSettings, accepted: Accepted, now_ms: float
    ) -> None:
        report, query = accepted.report, accepted.query
        batch = report.batch
        assert batch is not None
        ended_ms = now_ms - report.age_ms
        execution_ms = float(batch.durations_ms.get(EXECUTION, 0))
        inputs = []
        for (topic, partition), span in spans_of(batch.sources).items():
            if topic not in stage.consumes:
                continue
            start = span.start
            if start is None:  # the first batch of a query
                kept = query.partitions.get((topic, partition))
                start = min(span.end, (kept.log_start if kept else None) or 0)
            if start < span.end:
                inputs.append(TopicRange(topic, partition, start, span.end))
        written = line.outputs.pop(stage.name, [])
        line.crowded.discard(stage.name)
        outputs = [each.range for each in written if each.at_ms <= ended_ms]
        line.outputs[stage.name] = [each for each in written if each.at_ms > ended_ms]
        pressed = self._backpressure.of_client(query.client_id)
        size = next((each.bytes_per_record for each in pressed if each.bytes_per_record), 0.0)
        line.completion.stage_batch(
            StageBatch(
                stage=stage.name,
                batch=batch.batch_id,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                started_ms=ended_ms - execution_ms,
                size_bytes=round(batch.rows * (size or 0.0)),
            ),
            now_ms,
        )
        if batch.rows > 0 and execution_ms > 0:
            rate = next((each.processing_rate for each in pressed if each.processing_rate), None)
            # A short batch had little to do: what it shows is Spark's own time, not the stage's.
            if not any(execution_ms < FULL_BATCH * each.batch_interval_ms for each in pressed):
                line.flow.processing_rate(
                    stage.name, rate or batch.rows / execution_ms * MS_PER_SECOND, now_ms
                )
            made: dict[str, int] = dict.fromkeys(stage.produces, 0)
            for each in outputs:
                made[each.topic] += each.end - each.start
            line.flow.converted(stage.name, batch.rows, made)

    # What the admin server asks

    def documents(self) -> Sequence[Mapping[str, object]]:
        """Return what there is to show of each pipeline."""
        now_ms = self._clock_ms()
        return [
            {**line.flow.documents(now_ms), "completion": line.completion.document(now_ms)}
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
            await self._reapply()

    def tick(self, now_ms: float) -> None:
        """Look at what is measured and due, and hold and release accordingly."""
        if not self._lines:
            return
        arrived, lags = self._measure()
        for line in self._lines.values():
            for source in line.graph.settings.sources:
                for topic in source.produces:
                    if topic in arrived:
                        line.flow.arrived(topic, arrived[topic], now_ms)
            for stage in line.stages.values():
                if all(topic in arrived for topic in stage.consumes):
                    received = sum(arrived[topic] for topic in stage.consumes)
                    line.flow.sample(stage.name, received, now_ms)
                clients = self._clients_of(stage)
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
            self._apply(line, line.flow.tick(now_ms))
            self._press(line, now_ms)
            self._show(line)

    def _measure(self) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
        """Return how much has arrived by topic, and the lag by client and topic."""
        partitions: dict[PartitionKey, int] = {}
        lags: dict[tuple[str, str], int] = defaultdict(int)
        self._named = {query.name: query.client_id for query in self._book.queries}
        for query in self._book.queries:
            for key, partition in query.partitions.items():
                end = partition.high_watermark
                if end is not None:
                    partitions[key] = max(partitions.get(key, 0), end)
                lag = partition.lag_records()
                if lag is not None:
                    lags[query.client_id, key[0]] += lag
        arrived: dict[str, int] = {}
        for key, end in partitions.items():
            # What was there when a partition became known has not arrived just now.
            new = max(0, end - self._ends.get(key, end))
            total = arrived.get(key[0], self._arrived.get(key[0], 0))
            arrived[key[0]] = total + new
        self._ends, self._arrived = partitions, arrived
        return arrived, lags

    def _apply(self, line: _Line, changes: Iterable[RateChange]) -> None:
        for change in changes:
            before = line.held.get(change.node)
            if (before.rate if before else None) != change.rate:
                _log.info(
                    "pipeline",
                    pipeline=line.settings.name,
                    node=change.node,
                    rate=change.rate,
                    reason=change.reason,
                )
            if change.rate is None:
                line.held.pop(change.node, None)
            else:
                line.held[change.node] = change

    def _press(self, line: _Line, now_ms: float) -> None:
        """Hold every node to what is said of it now; clients come and go."""
        for stage in line.stages.values():
            self._press_stage(line, stage, now_ms)
        for source in line.graph.settings.sources:
            self._press_source(line, source.client_id, now_ms)

    def _press_stage(self, line: _Line, stage: StageSettings, now_ms: float) -> None:
        change = line.held.get(stage.name)
        ceiling = change.rate if change is not None else None
        why = change.reason if change is not None else ""
        if stage.name in line.graph.first and line.completion.full():
            ceiling, why = MIN_RATE, "as much is in flight as max_pending allows"
        pressures = [
            pressed
            for client_id in self._clients_of(stage)
            for pressed in self._backpressure.of_client(client_id)
        ]
        for pressed in pressures:
            if pressed.ceiling != ceiling:
                pressed.limit(ceiling, f"pipeline {line.settings.name}: {why}", now_ms)
        self._say_loose(
            line, stage.name, ceiling is not None and not pressures, "a rule with adaptive"
        )

    def _say_loose(self, line: _Line, node: str, loose: bool, need: str) -> None:
        """Log once that a node cannot be held, for lack of a rule or because it is not there."""
        if not loose:
            line.loose.discard(node)
        elif node not in line.loose:
            line.loose.add(node)
            _log.warning(
                "cannot be held now",
                pipeline=line.settings.name,
                node=node,
                fix=f"let it connect through this proxy, and give its client id {need}",
            )

    def _press_source(self, line: _Line, client_id: str, now_ms: float) -> None:
        change = line.held.get(client_id)
        size = self._sizes[client_id].value if client_id in self._sizes else None
        if change is None or change.rate is None or size is None:
            for entity in self._sources_held.pop(client_id, ()):
                self._quotas.adapt(QuotaKind.PRODUCER_BYTE_RATE, entity, None, None, now_ms)
            return
        bound = change.rate * size
        reason = f"pipeline {line.settings.name}: {change.reason}"
        entities = self._sources_held.setdefault(client_id, set())
        for identity in self._quotas.clients():
            if identity.client_id == client_id:
                match = self._quotas.table.match(QuotaKind.PRODUCER_BYTE_RATE, identity)
                if match is not None:
                    entities.add(match.entity)
        self._say_loose(line, client_id, not entities, "a producer_byte_rate")
        for entity in entities:
            self._quotas.adapt(QuotaKind.PRODUCER_BYTE_RATE, entity, bound, reason, now_ms)

    def _release(self, line: _Line, now_ms: float) -> None:
        line.held.clear()
        for stage in line.stages.values():
            for client_id in self._clients_of(stage):
                for pressed in self._backpressure.of_client(client_id):
                    pressed.limit(None, "", now_ms)
        for source in line.graph.settings.sources:
            self._press_source(line, source.client_id, now_ms)

    # Names

    def _stage_of(self, line: _Line, client_id: str) -> StageSettings | None:
        stage = line.members.get(client_id)
        if stage is None:
            query = self._book.query_of(client_id)
            stage = line.members.get(query.name) if query is not None else None
        return stage

    def _clients_of(self, stage: StageSettings) -> set[str]:
        """Return the client ids of a stage, as far as its queries are known."""
        clients = set(stage.client_ids)
        for member in stage.members:
            if self._book.query_of(member) is not None:
                clients.add(member)
            if member in self._named:
                clients.add(self._named[member])
        return clients

    # Making, changing, dropping

    def _begin(self, pipeline: Pipeline, now_ms: float) -> _Line:
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
        return _Line(pipeline, graph, PipelineFlow(settings, now_ms, now_s), completion)

    def _change(self, line: _Line, pipeline: Pipeline, now_ms: float) -> None:
        self._release(line, now_ms)
        settings = pipeline.settings
        line.follow(pipeline, PipelineGraph(settings))
        self._apply(line, line.flow.update(settings, now_ms))
        self._apply(line, line.flow.reapply(now_ms))
        stages = [line.graph.stages[name] for name in line.graph.order]
        line.completion.update(stages, pipeline.timeout_ms, now_ms)
        line.completion.max_pending.limit(settings.max_pending_batches, settings.max_pending_bytes)
        for name, outputs in list(line.outputs.items()):
            produces = line.stages[name].produces if name in line.stages else ()
            line.outputs[name] = [each for each in outputs if each.range.topic in produces]
        self._forget_nodes(pipeline.name)
        self._press(line, now_ms)

    def _drop(self, line: _Line, now_ms: float) -> None:
        self._release(line, now_ms)
        self._tell_ended(line, line.completion.take_ended())
        name, pending = line.settings.name, line.completion.max_pending.batches
        _log.warning("pipeline is gone", pipeline=name, pending=pending)
        if pending:
            self._instruments.ledger_failed_total.of(name, PIPELINE_CHANGED).inc(pending)
        self._forget_nodes(name)
        self._instruments.ledger_pending.forget(pipeline=name)
        # Another pipeline of that name must not take it up.
        _, gone = line.completion.changes()
        gone += [record.key for record in line.completion.snapshot()]
        gone += [record_key(name, node) for node in line.graph.nodes]
        prefixes = (line.flow.prefix, line.completion.prefix)
        gone += [key for key in self._unwritten if key.startswith(prefixes)]
        self._unwritten.update(dict.fromkeys(gone))

    def _forget_nodes(self, pipeline: str) -> None:
        for metric in (self._instruments.stage_state, self._instruments.stage_rate):
            metric.forget(pipeline=pipeline)

    # State and metrics

    async def keep(self) -> None:
        """Write what has changed; what can't be written is tried again."""
        for line in self._lines.values():
            for records, deleted in (line.flow.changes(), line.completion.changes()):
                self._unwritten.update(dict.fromkeys(deleted))
                self._unwritten.update({record.key: record for record in records})
        if self._writer is None or not self._unwritten:
            return
        writing, self._unwritten = self._unwritten, {}
        try:
            await self._writer.put_many(
                [record for record in writing.values() if record is not None],
                delete=[key for key, record in writing.items() if record is None],
            )
        except StateError as error:
            self._unwritten = writing | self._unwritten
            _log.error("state of pipelines not kept, trying again", error=str(error))

    async def _reapply(self) -> None:
        """Read the state of the flow again and apply it, at a fixed period."""
        now_ms = self._clock_ms()
        due = [line for line in self._lines.values() if line.flow.reapply_due(now_ms)]
        if not due or self._store is None:
            return
        try:
            records = await asyncio.to_thread(self._store.items, FLOW_RECORDS)
        except StateError as error:
            _log.error("state of pipelines not read", error=str(error))
            records = None
        for line in due:
            if records is not None:
                line.flow.load(_under(records, line.flow.prefix), self._clock_ms())
            self._apply(line, line.flow.reapply(self._clock_ms()))

    def _tell_ended(self, line: _Line, ended: Iterable[Ended]) -> None:
        name = line.settings.name
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

    def _show(self, line: _Line) -> None:
        name = line.settings.name
        instruments = self._instruments
        instruments.ledger_pending.of(name).set(line.completion.max_pending.batches)
        nodes = {node.name: node.normal_rate for node in line.graph.nodes.values()}
        for node, normal_rate in nodes.items():
            change = line.held.get(node)
            instruments.stage_state.of(name, node).set(float(change is not None))
            rate = change.rate if change is not None and change.rate is not None else normal_rate
            instruments.stage_rate.of(name, node).set(rate)


def _under(records: Iterable[Record], prefix: str) -> list[Record]:
    return [record for record in records if record.key.startswith(prefix)]


def _is_source(line: _Line, client_id: str) -> bool:
    return any(source.client_id == client_id for source in line.graph.settings.sources)
