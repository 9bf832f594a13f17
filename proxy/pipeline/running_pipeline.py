"""One pipeline at work: who its clients are, what is reported of them, and how they are held.

Stages are held by the ceiling of their batches, sources by their produce quota. What a stage is
held to is the lowest of these:

| state of a stage | its batches have at most |
|---|---|
| uncontrolled, and there is room for what it writes | what its own rule says |
| reduced, at the request of a stage after it | what it may read in an interval at that rate |
| waiting for a stage that it feeds | what `max_lag` has room for there, 0 when it is full |
| first, and as much is in flight as `max_pending` allows | 0 |
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from operator import attrgetter, itemgetter
from random import SystemRandom

from structlog import get_logger

from metrics.clock import MS_PER_SECOND
from proxy.progress.partition import PartitionProgress
from proxy.progress.query import QueryProgress
from proxy.progress.query_registry import QueryRegistry
from proxy.progress.report import BatchReport
from proxy.progress.report_handler import AcceptedReport
from proxy.quota.entities import QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.state import Json, Record
from proxy.wire.topic_partition import TopicPartition

from .batch_limit import (
    BatchLimit,
    PlannedBatches,
    QueriesOf,
    UpstreamWriter,
    records_that_fit,
)
from .completion import Completion
from .deferred import StageBatch
from .edges import MAX_OFFSET, TopicRange
from .flow_control import PipelineFlow
from .graph import Node, PipelineGraph, SourceSettings, StageSettings, find_endless
from .nodes import Source, Trigger

FULL_BATCH = 0.5
"""Of its interval: a batch that takes less does not say how fast its stage can process."""

UNKNOWN_MS = 15_000.0
"""For so long after a start nothing is planned before a stage whose lag is not known again. The
cluster is asked for the ends of logs at once, and again after 10 s."""

ALL = "as much is in flight as max_pending allows"

SIZE_DECAY = 0.9
"""Weight of what a source sent before in the size of its records, for each request."""

_PRODUCED = QuotaKind.PRODUCER_BYTE_RATE

_log = get_logger(__name__)


class RunningPipeline(PipelineFlow):
    """One pipeline at work."""

    nodes: Mapping[str, "RunningStage | RunningSource"]
    stages: Mapping[str, "RunningStage"]

    def __init__(
        self,
        graph: PipelineGraph,
        registry: QueryRegistry,
        queries_of: QueriesOf,
        quotas: QuotaManager,
        now_ms: float,
        now_s: float,
    ) -> None:
        self.registry, self.queries_of, self.quotas = registry, queries_of, quotas
        self.completion = Completion(graph, random=SystemRandom(), now_ms=now_ms, now_s=now_s)
        self.loaded_ms = -math.inf
        """When this process took up the state; long ago if it did not."""
        self.unread: dict[TopicPartition, tuple[int, int]] = {}
        """Offsets between which stages have written, and nobody who reads there has completed."""
        self._out_of_reach: set[str] = set()
        """Nodes that are to be held and cannot be."""
        super().__init__(graph, now_ms, now_s)
        self._warn_of_endless()

    def reload(self, graph: PipelineGraph, now_ms: float) -> None:
        """Follow changed settings."""
        self.release(now_ms)
        self.update(graph, now_ms)
        self._warn_of_endless()
        self.completion.update(graph, now_ms)
        self.hold(now_ms)

    def take_up(
        self, records: Iterable[Record], now_ms: float, *, is_handed_over: bool = False
    ) -> list[str]:
        """Load the records of an earlier process, or of the member that had it before.

        Return what was not taken up, and why.
        """
        self.loaded_ms = now_ms
        flow, ledger = list[Record](), list[Record]()
        for record in records:
            (flow if record.key.startswith(self.prefix) else ledger).append(record)
        refused = self.completion.load(ledger, now_ms, is_handed_over=is_handed_over)
        refused += self.load(flow, now_ms)
        self.hold(now_ms)  # before a driver asks
        return refused

    @property
    def is_changed(self) -> bool:
        """Whether there are `changes`."""
        return bool(self.journal or self.completion.journal)

    def changes(self, *, hands_over: bool = False) -> tuple[list[Record], list[str]]:
        """Return the records to write and the keys to delete, see `Completion.changes`."""
        records, deletes = super().changes()
        of_ledger, gone = self.completion.changes(hands_over=hands_over)
        return records + of_ledger, deletes + gone

    def advance(self, arrived: Mapping[str, int], now_ms: float) -> None:
        """Do what is due by what is measured, and hold and release accordingly.

        `arrived` is counted by topic, since that became known.
        """
        self.arrived(arrived, now_ms)
        for stage in self.stages.values():
            stage.measure(arrived, now_ms)
        self.completion.tick(now_ms)
        self.tick(now_ms)
        self.hold(now_ms)

    def hold(self, now_ms: float) -> None:
        """Hold every node to what is said of it now; clients come and go."""
        for node in self.nodes.values():
            node.hold(now_ms)

    def release(self, now_ms: float) -> None:
        """Hold no node any more."""
        for node in self.nodes.values():
            node.release(now_ms)

    def is_full(self, now_ms: float) -> bool:
        """Return whether the first stages are to wait, by what is in flight and planned."""
        batches, size_bytes = 0, 0.0
        # A query that is gone makes its batch again when it is back: as the first of a run.
        for name in self.graph.first:
            batches += self.completion.deferred.waiting_of(name)
            for client_id in self.stages[name].living_clients(now_ms):
                planned, records = self.stages[name].planned(client_id)
                batches += planned
                size_bytes += records and records * self.measured(client_id)[2]
        return self.completion.is_full(batches, size_bytes)

    def measured(self, client_id: str) -> tuple[float, int, float]:
        """Return a client's offsets per record, least offsets of a batch, and bytes per record."""
        for bounded in self.queries_of(client_id):
            clamp = bounded.clamp
            return clamp.offsets_per_record, clamp.least_offsets, bounded.bytes_per_record or 0.0
        return 1.0, 1, 0.0

    def partitions(
        self, client_id: str, topics: Iterable[str]
    ) -> Iterator[tuple[TopicPartition, PartitionProgress]]:
        """Yield what a client has read of topics."""
        query = self.registry.query_of(client_id)
        for key, partition in query.partitions.items() if query is not None else ():
            if key[0] in topics:
                yield key, partition

    def document(self, now_ms: float) -> dict[str, Json]:
        """Return it as the API shows it."""
        return {**super().document(now_ms), "completion": self.completion.document(now_ms)}

    def log_reach(self, node: str, is_out_of_reach: bool, need: str) -> None:
        """Log once that a node cannot be held, for lack of a rule or because it is not there."""
        if not is_out_of_reach:
            self._out_of_reach.discard(node)
        elif node not in self._out_of_reach:
            self._out_of_reach.add(node)
            _log.warning(
                "cannot be held now",
                pipeline=self.name,
                node=node,
                fix=f"let it connect through this proxy, and give its client id {need}",
            )

    def _make_node(self, settings: Node, now_ms: float) -> "RunningStage | RunningSource":
        if isinstance(settings, StageSettings):
            return RunningStage(self, settings, now_ms)
        return RunningSource(self, settings)

    def _warn_of_endless(self) -> None:
        for problem in find_endless(self.graph):
            _log.warning("a hold may never end", problem=problem)


class RunningStage(Trigger):
    """One stage at work."""

    def __init__(self, pipeline: RunningPipeline, settings: StageSettings, now_ms: float) -> None:
        super().__init__(settings, pipeline.graph.settings.max_lag, now_ms)
        self.pipeline = pipeline
        self.ceiling: tuple[float, BatchLimit | None] | None = None
        """Records/s, 0 lets no batch begin, and what it waits for; None: a request of a stage after
        it. When it is held to less than its normal rate."""
        self._plans: dict[str, PlannedBatches] = defaultdict(PlannedBatches)
        """By client."""

    def clients(self) -> set[str]:
        """Return its client ids, as far as its queries are known."""
        clients, registry = set(self.settings.client_ids), self.pipeline.registry
        for member in self.settings.members:
            for query in (registry.query_of(member), registry.query_named(member)):
                if query is not None:
                    clients.add(query.client_id)
        return clients

    def living_clients(self, now_ms: float) -> Set[str]:
        """Return its client ids while it gives signs of life."""
        return self.clients() if self.is_alive(now_ms) else set()

    def measure(self, arrived: Mapping[str, int], now_ms: float) -> None:
        """Add readings of what is measured, see `RunningPipeline.advance`."""
        consumes = self.settings.consumes
        if all(topic in arrived for topic in consumes):
            self.sample(sum(arrived[topic] for topic in consumes), now_ms)
        lags = [
            lag
            for client_id in self.clients()
            for _, partition in self.pipeline.partitions(client_id, consumes)
            if (lag := partition.lag_records()) is not None
        ]
        if lags:
            self.lag(sum(lags))

    def wrote(self, written: TopicRange, now_ms: float) -> None:
        """Keep what it has written until its batch is reported."""
        key, unread = (written.topic, written.partition), self.pipeline.unread
        start, end = unread.get(key, (written.start, 0))
        if written.start < start:  # the topic was made anew
            start, end = written.start, 0
        unread[key] = start, max(end, written.end)
        self.pipeline.completion.outputs.wrote(self.settings.name, written, now_ms)

    def plans(self, client_id: str, partitions: Set[TopicPartition], now_ms: float) -> None:
        """Hold a client to what there is room for, if its driver plans a batch."""
        if not self.pipeline.graph.settings.bounds_batches:
            return
        offered, _ = self._offered(client_id)
        if self._plans[client_id].look_up(partitions, offered):
            self._plans[client_id].limit = self._limit(client_id, now_ms)
            self._set_ceilings(self.clients(), now_ms)

    def lost_ends(self, started_ms: float) -> set[TopicPartition]:
        """Return the partitions whose log ends say what a batch may have written unseen."""
        outputs = self.pipeline.completion.outputs
        is_lost = outputs.is_recovering(self.settings.name, started_ms)
        return set(self._known_ends()) if is_lost else set()

    def reported(
        self, accepted: AcceptedReport, ends: Mapping[TopicPartition, int], now_ms: float
    ) -> bool:
        """Apply a report; for `ends` see `lost_ends`. Return whether it says more than "alive"."""
        report, query, pipeline = accepted.report, accepted.query, self.pipeline
        name, graph = self.settings.name, pipeline.graph
        self.seen(now_ms)
        is_late = report.run_id != query.run_id  # of an earlier run
        if report.event == "running" or (is_late and report.batch is None):
            return False
        event_ms = now_ms - report.age_ms
        if report.batch is not None:
            self._add_batch(query, report.batch, event_ms, ends, now_ms)
        elif report.event == "idle":
            # What came after that belongs to a batch that is not reported yet.
            if all(each.at_ms <= event_ms for each in pipeline.completion.outputs.ranges[name]):
                pipeline.completion.idle(name, now_ms)
        elif report.event == "terminated":
            self.ended()
        self._plans[query.client_id].reported()
        # What it has completed makes room for those before it, a root that ends for the first.
        for each in {name, *graph.first, *graph.upstream[name]} & graph.stages.keys():
            pipeline.stages[each].hold(now_ms)
        return True

    def hold(self, now_ms: float) -> None:
        """Hold it; a batch under way is read within the limit that it was planned for."""
        clients = self.clients()
        if self.pipeline.graph.settings.bounds_batches:
            for client_id in clients:
                if self._plans[client_id].limit is None or not self.planned(client_id)[0]:
                    self._plans[client_id].limit = self._limit(client_id, now_ms)
        self._set_ceilings(clients, now_ms)

    def release(self, now_ms: float) -> None:
        """Hold it no more."""
        self.ceiling = None
        for plans in self._plans.values():
            plans.limit = None
        for client_id in self.clients():
            for query in self.pipeline.queries_of(client_id):
                if query.ceiling is not None:
                    query.set_ceiling(None, f"pipeline {self.pipeline.name}: ", now_ms)

    def stage_document(self, upstream: Sequence[str], now_ms: float) -> dict[str, Json]:
        """Return it as the API shows it, with what it waits for."""
        _, limit = self.ceiling or (None, None)
        waits: Json = None
        if limit is not None:
            waits = {"for": limit.waits_for, "records": limit.records, "reason": limit.why}
        return super().stage_document(upstream, now_ms) | {"waits": waits}

    def planned(self, client_id: str) -> tuple[int, float]:
        """Return what a client has planned and not reported: batches, and their records."""
        offered, done = self._offered(client_id)
        if not (batches := self._plans[client_id].batches(offered, done)):
            return 0, 0.0
        return batches, (offered - done) / self.pipeline.measured(client_id)[0]

    def waiting(self, topics: Iterable[str], now_ms: float) -> int | None:
        """Return how many records wait for it; None when that is not known again yet."""
        unread = self.pipeline.unread
        lags: dict[TopicPartition, int] = {}
        for client_id in self.clients():
            for key, partition in self.pipeline.partitions(client_id, topics):
                if partition.lag_from is None:  # nothing read yet
                    continue
                lag = partition.lag_records()
                if lag is None:
                    if now_ms - self.pipeline.loaded_ms < UNKNOWN_MS:
                        return None
                    continue
                lags[key] = max(lags.get(key, 0), lag)
                if key in unread:
                    start, end = unread[key]
                    unread[key] = max(start, partition.lag_from), max(end, partition.lag_from)
        for key, (start, end) in unread.items():
            if key[0] in topics and key not in lags:
                lags[key] = end - start
        return sum(lags.values())

    def writer(
        self, client_id: str, reader: str, now_ms: float, *, is_asking: bool = False
    ) -> UpstreamWriter:
        """Return what one of its clients writes for a stage that it feeds."""
        name, pipeline = self.settings.name, self.pipeline
        topics = pipeline.graph.topics_between(name, reader)
        _, planned = self.planned(client_id)
        has_work = is_asking or planned > 0 or self.waiting(self.settings.consumes, now_ms) != 0
        outputs = pipeline.completion.outputs.ranges.get(name, ()) if planned else ()
        ranges = (each.range for each in outputs)
        return UpstreamWriter(
            self.settings.normal_rate if has_work else 0.0,
            self.records_out(topics),
            planned,
            sum(each.end - each.start for each in ranges if each.topic in topics),
        )

    def _limit(self, client_id: str, now_ms: float) -> BatchLimit | None:
        """Return the limit of the next batch of a client, from what is measured; None: no bound."""
        name, pipeline = self.settings.name, self.pipeline
        graph, max_lag = pipeline.graph, pipeline.graph.settings.max_lag
        if name in graph.first and pipeline.is_full(now_ms):
            return BatchLimit(0, pipeline.completion.oldest_waits_at() or name, ALL)
        if max_lag is None:
            return None
        limits = [self._before(each, max_lag, client_id, now_ms) for each in graph.downstream[name]]
        return min(filter(None, limits), key=attrgetter("records"), default=None)

    def _before(self, name: str, max_lag: int, client_id: str, now_ms: float) -> BatchLimit | None:
        """Return what a client may plan for the sake of a stage that it feeds."""
        pipeline, graph = self.pipeline, self.pipeline.graph
        reader = pipeline.stages[name]
        # What sources bring is not kept back here: it takes no room from what stages write.
        consumes = reader.settings.consumes
        topics = [topic for topic in consumes if graph.producer_of[topic] in graph.stages]
        lag = reader.waiting(topics, now_ms)
        if lag is None:
            return BatchLimit(0, name, f"how much waits for {name} is not known yet")
        writers = [
            stage.writer(client, name, now_ms)
            for stage in map(pipeline.stages.get, graph.upstream[name])
            if stage is not None
            for client in stage.living_clients(now_ms) - ({client_id} if stage is self else set())
        ]
        asking = self.writer(client_id, name, now_ms, is_asking=True)
        offsets_per_record, least_offsets, _ = pipeline.measured(client_id)
        partitions = sum(1 for _ in pipeline.partitions(client_id, self.settings.consumes))
        least = max(1, math.ceil(max(partitions, least_offsets) / offsets_per_record))
        records = records_that_fit(max_lag, lag, asking, writers, least)
        if records is None:
            return None
        why = f"{lag:,} records wait for {name}, and max_lag is {max_lag:,}"
        return BatchLimit(records, name, why)

    def _offered(self, client_id: str) -> tuple[int, int]:
        """Return what a client's drivers were told in all, and completed of that, in offsets."""
        query = self.pipeline.registry.query_of(client_id)
        partitions = query.partitions if query is not None else {}
        ends: dict[TopicPartition, tuple[int, int]] = {}
        for bounded in self.pipeline.queries_of(client_id):
            for key, advertised in bounded.clamp.advertised.items():
                end, idle_at = ends.get(key, (0, 0))
                ends[key] = max(end, advertised.offset), max(idle_at, advertised.idle_offset)
        offered = done = 0
        for key, (end, idle_at) in ends.items():
            completed = partitions[key].committed_to if key in partitions else None
            offered += end  # and where nothing is known all was completed
            done += end if completed is None else min(end, max(completed, idle_at))
        return offered, done

    def _set_ceilings(self, clients: Set[str], now_ms: float) -> None:
        pipeline, state = self.pipeline, self.state
        ceilings: list[tuple[float, BatchLimit | None]] = []
        is_there = False
        for client_id in clients:
            limit = self._plans[client_id].limit
            for query in pipeline.queries_of(client_id):
                is_there = True
                ceiling, why, waits = state.rate, state.why, None
                if limit is not None:
                    # While no interval is known the driver is told the truth whatever is said here.
                    interval_ms = query.batch_interval_ms or MS_PER_SECOND
                    rate = limit.records * MS_PER_SECOND / interval_ms
                    if ceiling is None or rate < ceiling:
                        ceiling, why, waits = rate, limit.why, limit
                if query.ceiling != ceiling:
                    query.set_ceiling(ceiling, f"pipeline {pipeline.name}: {why}", now_ms)
                if ceiling is not None and ceiling < self.settings.normal_rate:
                    ceilings.append((ceiling, waits))
        self.ceiling = min(ceilings, key=itemgetter(0), default=None)
        is_held = state.rate is not None or any(self._plans[each].limit for each in clients)
        pipeline.log_reach(self.settings.name, is_held and not is_there, "a rule with adaptive")

    def _add_batch(
        self,
        query: QueryProgress,
        batch: BatchReport,
        ended_ms: float,
        ends: Mapping[TopicPartition, int],
        now_ms: float,
    ) -> None:
        name, pipeline = self.settings.name, self.pipeline
        execution_ms = float(batch.execution_ms or 0)
        bounded, outputs = pipeline.queries_of(query.client_id), pipeline.completion.outputs
        started_ms = ended_ms - execution_ms
        seen = written = outputs.take(name, ended_ms)
        if outputs.is_recovering(name, started_ms):
            written += outputs.recover(self.settings, self._known_ends(), ends)
        size = next((each.bytes_per_record for each in bounded if each.bytes_per_record), 0.0)
        size_bytes, inputs = round(batch.rows * (size or 0.0)), tuple(self._inputs(query, batch))
        done = StageBatch(name, batch.batch_id, inputs, written, started_ms, size_bytes)
        pipeline.completion.stage_batch(done, now_ms)
        if batch.rows > 0 and execution_ms > 0:
            # A short batch had little to do: what it shows is Spark's own time, not the stage's.
            if all(execution_ms >= FULL_BATCH * (each.batch_interval_ms or 0) for each in bounded):
                rate = next((each.processing_rate for each in bounded if each.processing_rate), 0.0)
                self.processed(rate or batch.rows / execution_ms * MS_PER_SECOND, now_ms)
            made = dict.fromkeys(self.settings.produces, 0)
            for each in seen:
                made[each.topic] += each.end - each.start
            self.converted(batch.rows, made)

    def _inputs(self, query: QueryProgress, batch: BatchReport) -> Iterator[TopicRange]:
        """Yield what a batch has completed of the topics of its stage."""
        for (topic, partition), span in batch.ranges.items():
            start = span.start
            if start is None:  # the first batch of a query
                kept = query.partitions.get((topic, partition))
                start = min(span.end, (kept.log.log_start_offset if kept else None) or 0)
            if start < span.end and topic in self.settings.consumes:
                yield TopicRange(topic, partition, start, span.end)

    def _known_ends(self) -> dict[TopicPartition, int]:
        """Return up to where it is known who wrote what of its topics."""
        known: dict[TopicPartition, int] = {}  # at least what readers have completed
        for query in self.pipeline.registry.queries:
            for key, partition in query.partitions.items():
                if partition.committed_to is not None:
                    known[key] = min(known.get(key, MAX_OFFSET), partition.committed_to)
        known |= self.pipeline.completion.edges.known_ends()
        return {key: end for key, end in known.items() if key[0] in self.settings.produces}


class RunningSource(Source):
    """One source that can be held: what bounds it, whichever rules it has."""

    def __init__(self, pipeline: RunningPipeline, settings: SourceSettings) -> None:
        super().__init__(settings)
        self._pipeline = pipeline
        self._bytes = self._records = 0.0
        """What it has sent, what is long ago with less weight."""
        self._entities: set[str] = set()
        """Those whose produce quota is lowered."""

    def sent(self, count: int, records: int) -> None:
        """Record that it has sent so many bytes for so many records, 1 or more."""
        self._bytes = self._bytes * SIZE_DECAY + count
        self._records = self._records * SIZE_DECAY + records

    def hold(self, now_ms: float) -> None:
        """Hold it to what is said of it now."""
        state, name = self.state, self.settings.name
        pipeline, quotas = self._pipeline, self._pipeline.quotas
        if state.rate is None or not self._records:
            self.release(now_ms)
            return
        match = partial(quotas.table.match, _PRODUCED)
        clients = (each for each in quotas.clients() if each.client_id == name)
        self._entities.update(found.entity for found in map(match, clients) if found is not None)
        pipeline.log_reach(name, not self._entities, "a producer_byte_rate")
        bound, reason = state.rate * self._bytes / self._records, f"pipeline {pipeline.name}: "
        for entity in self._entities:
            quotas.adapt(_PRODUCED, entity, bound, reason + state.why, now_ms)

    def release(self, now_ms: float) -> None:
        """Hold it no more."""
        for entity in self._entities:
            self._pipeline.quotas.adapt(_PRODUCED, entity, None, None, now_ms)
        self._entities.clear()
