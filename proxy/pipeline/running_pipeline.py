"""One pipeline at work: who its clients are, what is reported of them, and how they are held.

Stages are held by the ceiling of their batches, sources by their produce quota.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import product
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

from .batch_limit import BatchLimit, PlannedBatches, QueriesOf, UpstreamWriter, records_that_fit
from .completion import Completion
from .deferred import StageBatch
from .edges import MAX_OFFSET, TopicRange
from .flow_control import PipelineFlow, RateChange
from .graph import PipelineGraph, PipelineSettings, StageSettings, find_endless

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


class RunningPipeline:
    """One pipeline at work. Raises ValueError when its settings are not sound."""

    def __init__(
        self,
        settings: PipelineSettings,
        registry: QueryRegistry,
        queries_of: QueriesOf,
        quotas: QuotaManager,
        now_ms: float,
        now_s: float,
    ) -> None:
        self._registry, self._queries_of, self._quotas = registry, queries_of, quotas
        self.name = settings.name
        self.graph = PipelineGraph(settings)
        self.flow = PipelineFlow(self.graph, now_ms, now_s)
        self.completion = Completion(self.graph, random=SystemRandom(), now_ms=now_ms, now_s=now_s)
        self._loaded_ms = -math.inf
        """When this process took up the state; long ago if it did not."""
        self._unread: dict[TopicPartition, tuple[int, int]] = {}
        """Offsets between which stages have written, and nobody who reads there has completed."""
        self._plans: dict[str, PlannedBatches] = defaultdict(PlannedBatches)
        """By client of a stage."""
        self._limits: dict[str, BatchLimit | None] = {}
        """By client of a stage: the limit of its latest plan."""
        self.ceilings: dict[str, tuple[float, BatchLimit | None]] = {}
        """By stage that is held to less than its normal rate: records/s, 0 lets no batch begin, and
        what it waits for; None: a request of a stage after it."""
        self._sent: dict[str, tuple[float, float]] = {}
        """Bytes and records that each source has sent, what is long ago with less weight."""
        self._bounded: dict[str, set[str]] = defaultdict(set)
        """Entities of each source whose produce quota is lowered."""
        self._out_of_reach: set[str] = set()
        """Nodes that are to be held and cannot be."""
        self._follow(settings)

    def update(self, settings: PipelineSettings, now_ms: float) -> None:
        """Follow a reload. Raises ValueError when it is not sound; then nothing changed."""
        graph = PipelineGraph(settings)
        self.release(now_ms)
        self.graph = graph
        self._follow(settings)
        self._log_changes(self.flow.update(graph, now_ms))
        self.completion.update(graph, now_ms)
        self.hold(now_ms)

    def load(
        self, records: Iterable[Record], now_ms: float, *, is_handed_over: bool = False
    ) -> list[str]:
        """Load the records of an earlier process, or of the member that had it before.

        Return what was not taken up, and why.
        """
        self._loaded_ms = now_ms
        flow, ledger = list[Record](), list[Record]()
        for record in records:
            (flow if record.key.startswith(self.flow.prefix) else ledger).append(record)
        refused = self.completion.load(ledger, now_ms, is_handed_over=is_handed_over)
        refused += self.load_flow(flow, now_ms)
        self.hold(now_ms)  # before a driver asks
        return refused

    def load_flow(self, records: Iterable[Record], now_ms: float) -> list[str]:
        """Load the records of the flow, at any time; return what was not taken up, and why."""
        before = {node: self.flow.state_of(node) for node in self.graph.nodes}
        refused = self.flow.load(records, now_ms)
        for node, old in before.items():
            state = self.flow.state_of(node)
            if state is not None and (old is None or old.rate != state.rate):
                self._log_changes([RateChange(node, state.rate, state.why)])
        return refused

    def clients_of(self, stage: StageSettings) -> set[str]:
        """Return the client ids of a stage, as far as its queries are known."""
        clients, registry = set(stage.client_ids), self._registry
        for member in stage.members:
            for query in (registry.query_of(member), registry.query_named(member)):
                if query is not None:
                    clients.add(query.client_id)
        return clients

    def wrote(self, stage: StageSettings, written: TopicRange, now_ms: float) -> None:
        """Keep what a stage has written until its batch is reported."""
        key = (written.topic, written.partition)
        start, end = self._unread.get(key, (written.start, 0))
        if written.start < start:  # the topic was made anew
            start, end = written.start, 0
        self._unread[key] = start, max(end, written.end)
        self.completion.outputs.wrote(stage.name, written, now_ms)

    def sent(self, client_id: str, count: int, records: int) -> None:
        """Record that a source has sent so many bytes for so many records, 1 or more."""
        before = self._sent.get(client_id, (0.0, 0.0))
        self._sent[client_id] = before[0] * SIZE_DECAY + count, before[1] * SIZE_DECAY + records

    def plans(
        self,
        stage: StageSettings,
        client_id: str,
        partitions: Collection[TopicPartition],
        now_ms: float,
    ) -> None:
        """Hold a client of a stage to what there is room for, if its driver plans a batch."""
        if not self.graph.settings.bounds_batches:
            return
        offered, _ = self._offered(client_id)
        if self._plans[client_id].look_up(set(partitions), offered):
            self._limits[client_id] = self._limit(stage, client_id, now_ms)
            self._set_ceilings(stage, self.clients_of(stage), now_ms)

    def lost_ends(self, stage: StageSettings, started_ms: float) -> set[TopicPartition]:
        """Return the partitions whose log ends say what a batch may have written unseen."""
        if not self.completion.outputs.is_recovering(stage.name, started_ms):
            return set()
        return set(self._known_ends(stage))

    def reported(
        self,
        stage: StageSettings,
        accepted: AcceptedReport,
        ends: Mapping[TopicPartition, int],
        now_ms: float,
    ) -> bool:
        """Apply a report; for `ends` see `lost_ends`. Return whether it says more than "alive"."""
        report, query, graph = accepted.report, accepted.query, self.graph
        trigger = self.flow.stages[stage.name]
        trigger.seen(now_ms)
        is_late = report.run_id != query.run_id  # of an earlier run
        if report.event == "running" or (is_late and report.batch is None):
            return False
        if report.batch is not None:
            self._add_batch(stage, query, report.batch, now_ms - report.age_ms, ends, now_ms)
        elif report.event == "idle":
            # What came after that belongs to a batch that is not reported yet.
            idle_ms, outputs = now_ms - report.age_ms, self.completion.outputs.ranges[stage.name]
            if all(each.at_ms <= idle_ms for each in outputs):
                self.completion.idle(stage.name, now_ms)
        elif report.event == "terminated":
            trigger.ended()
        if query.client_id in self._plans:
            self._plans[query.client_id].reported()
        # What it has completed makes room for those before it, a root that ends for the first.
        before = {stage.name, *graph.first, *graph.upstream[stage.name]}
        for name in before & graph.stages.keys():
            self._hold_stage(graph.stages[name], now_ms)
        return True

    def tick(
        self, arrived: Mapping[str, int], lags: Mapping[tuple[str, str], int], now_ms: float
    ) -> None:
        """Do what is due by what is measured, and hold and release accordingly.

        `arrived` is counted by topic, since that became known, `lags` by client and topic.
        """
        for source in self.graph.settings.sources:
            for topic in source.produces:
                if topic in arrived:
                    self.flow.arrived(topic, arrived[topic], now_ms)
        for stage in self.graph.stages.values():
            trigger = self.flow.stages[stage.name]
            if all(topic in arrived for topic in stage.consumes):
                trigger.sample(sum(arrived[topic] for topic in stage.consumes), now_ms)
            waiting = lags.keys() & product(self.clients_of(stage), stage.consumes)
            if waiting:
                trigger.lag(sum(lags[key] for key in waiting))
        self.completion.tick(now_ms)
        self._log_changes(self.flow.tick(now_ms))
        self.hold(now_ms)

    def hold(self, now_ms: float) -> None:
        """Hold every node to what is said of it now; clients come and go."""
        for stage in self.graph.stages.values():
            self._hold_stage(stage, now_ms)
        for client_id in self.sources:
            self._hold_source(client_id, now_ms)

    def release(self, now_ms: float) -> None:
        """Hold no node any more."""
        self._limits.clear()
        self.ceilings.clear()
        for stage in self.graph.stages.values():
            for client_id in self.clients_of(stage):
                for query in self._queries_of(client_id):
                    if query.ceiling is not None:
                        query.set_ceiling(None, f"pipeline {self.name}: ", now_ms)
        for client_id in self.sources:
            self._release_source(client_id, now_ms)

    def document(self, now_ms: float) -> dict[str, Json]:
        """Return it as the API shows it."""
        document = self.flow.document(now_ms)
        stages = document["stages"]
        assert isinstance(stages, list)
        for stage in stages:
            _, limit = self.ceilings.get(stage["name"], (None, None))
            stage["waits"] = limit and {
                "for": limit.waits_for,
                "records": limit.records,
                "reason": limit.why,
            }
        return {**document, "completion": self.completion.document(now_ms)}

    def _follow(self, settings: PipelineSettings) -> None:
        for problem in find_endless(settings):
            _log.warning("a hold may never end", problem=problem)
        self.sources = frozenset(source.client_id for source in settings.sources)

    def _log_changes(self, changes: Iterable[RateChange]) -> None:
        for each in changes:
            _log.info("pipeline", pipeline=self.name, **asdict(each))

    # Batches

    def _add_batch(
        self,
        stage: StageSettings,
        query: QueryProgress,
        batch: BatchReport,
        ended_ms: float,
        ends: Mapping[TopicPartition, int],
        now_ms: float,
    ) -> None:
        bounded, execution_ms = self._queries_of(query.client_id), float(batch.execution_ms or 0)
        started_ms, outputs = ended_ms - execution_ms, self.completion.outputs
        written = lost = outputs.take(stage.name, ended_ms)
        if outputs.is_recovering(stage.name, started_ms):
            lost = (*written, *outputs.recover(stage, self._known_ends(stage), ends))
        size = next((each.bytes_per_record for each in bounded if each.bytes_per_record), 0.0)
        inputs, size_bytes = tuple(_inputs(stage, query, batch)), round(batch.rows * (size or 0.0))
        done = StageBatch(stage.name, batch.batch_id, inputs, lost, started_ms, size_bytes)
        self.completion.stage_batch(done, now_ms)
        if batch.rows > 0 and execution_ms > 0:
            trigger = self.flow.stages[stage.name]
            # A short batch had little to do: what it shows is Spark's own time, not the stage's.
            if all(execution_ms >= FULL_BATCH * (each.batch_interval_ms or 0) for each in bounded):
                rate = next((each.processing_rate for each in bounded if each.processing_rate), 0.0)
                trigger.processed(rate or batch.rows / execution_ms * MS_PER_SECOND, now_ms)
            made = dict.fromkeys(stage.produces, 0)
            for each in written:
                made[each.topic] += each.end - each.start
            trigger.converted(batch.rows, made)

    def _known_ends(self, stage: StageSettings) -> dict[TopicPartition, int]:
        """Return up to where it is known who wrote what of a stage's topics."""
        known: dict[TopicPartition, int] = {}  # at least what readers have completed
        for query in self._registry.queries:
            for key, partition in query.partitions.items():
                if partition.committed_to is not None:
                    known[key] = min(known.get(key, MAX_OFFSET), partition.committed_to)
        known |= self.completion.edges.known_ends()
        return {key: end for key, end in known.items() if key[0] in stage.produces}

    # How much clients of stages may plan, from what is measured when their drivers ask

    def _limit(self, stage: StageSettings, client_id: str, now_ms: float) -> BatchLimit | None:
        """Return the limit of the next batch of a client of a stage; None: no bound."""
        graph = self.graph
        if stage.name in graph.first and self._is_full(now_ms):
            return BatchLimit(0, self.completion.oldest_waits_at() or stage.name, ALL)
        if (max_lag := graph.settings.max_lag) is None:
            return None
        readers = (graph.stages[name] for name in graph.downstream[stage.name])
        limits = [self._before(each, max_lag, stage, client_id, now_ms) for each in readers]
        return min(filter(None, limits), key=attrgetter("records"), default=None)

    def _is_full(self, now_ms: float) -> bool:
        batches, size_bytes = 0, 0.0
        # A query that is gone makes its batch again when it is back: as the first of a run.
        for name in self.graph.first:
            batches += self.completion.deferred.waiting_of(name)
            for client_id in self._living_clients(name, now_ms):
                planned, records = self._planned(client_id)
                batches += planned
                size_bytes += records * self._measured(client_id)[2]
        return self.completion.is_full(batches, size_bytes)

    def _living_clients(self, name: str, now_ms: float) -> Collection[str]:
        is_alive = self.flow.stages[name].is_alive(now_ms)
        return self.clients_of(self.graph.stages[name]) if is_alive else ()

    def _before(
        self,
        reader: StageSettings,
        max_lag: int,
        stage: StageSettings,
        client_id: str,
        now_ms: float,
    ) -> BatchLimit | None:
        """Return what a client of a stage may plan for the sake of a stage that it feeds."""
        graph = self.graph
        # What sources bring is not kept back here: it takes no room from what stages write.
        topics = [topic for topic in reader.consumes if graph.producer_of[topic] in graph.stages]
        lag = self._lag(reader, topics, now_ms)
        if lag is None:
            return BatchLimit(0, reader.name, f"how much waits for {reader.name} is not known yet")
        clients = {
            (name, client)
            for name in graph.upstream[reader.name]
            if name in graph.stages
            for client in self._living_clients(name, now_ms)
        } - {(stage.name, client_id)}
        writers = [
            self._writer(graph.stages[name], client, reader, now_ms) for name, client in clients
        ]
        writers.append(self._writer(stage, client_id, reader, now_ms, is_asking=True))
        offsets_per_record, least_offsets, _ = self._measured(client_id)
        partitions = sum(1 for _ in self._partitions(client_id, stage.consumes))
        least = max(1, math.ceil(max(partitions, least_offsets) / offsets_per_record))
        records = records_that_fit(max_lag, lag, writers, client_id, least)
        if records is None:
            return None
        why = f"{lag:,} records wait for {reader.name}, and max_lag is {max_lag:,}"
        return BatchLimit(records, reader.name, why)

    def _writer(
        self,
        stage: StageSettings,
        client_id: str,
        reader: StageSettings,
        now_ms: float,
        *,
        is_asking: bool = False,
    ) -> UpstreamWriter:
        topics = self.graph.topics_between(stage.name, reader.name)
        _, planned = self._planned(client_id)
        has_work = is_asking or planned > 0 or self._lag(stage, stage.consumes, now_ms) != 0
        outputs = self.completion.outputs.ranges.get(stage.name, ()) if planned else ()
        ranges = (each.range for each in outputs)
        return UpstreamWriter(
            name=client_id,
            weight=stage.normal_rate if has_work else 0.0,
            records_out=self.flow.stages[stage.name].records_out(topics),
            planned=planned,
            written=sum(each.end - each.start for each in ranges if each.topic in topics),
        )

    def _lag(self, stage: StageSettings, topics: Iterable[str], now_ms: float) -> int | None:
        """Return how many records wait for a stage; None when that is not known again yet."""
        lags: dict[TopicPartition, int] = {}
        for client_id in self.clients_of(stage):
            for key, partition in self._partitions(client_id, topics):
                if partition.lag_from is None:  # nothing read yet
                    continue
                lag = partition.lag_records()
                if lag is None:
                    if now_ms - self._loaded_ms < UNKNOWN_MS:
                        return None
                    continue
                lags[key] = max(lags.get(key, 0), lag)
                if key in self._unread:
                    start, end = self._unread[key]
                    done = partition.lag_from
                    self._unread[key] = max(start, done), max(end, done)
        for key, (start, end) in self._unread.items():
            if key[0] in topics and key not in lags:
                lags[key] = end - start
        return sum(lags.values())

    def _partitions(
        self, client_id: str, topics: Iterable[str]
    ) -> Iterator[tuple[TopicPartition, PartitionProgress]]:
        query = self._registry.query_of(client_id)
        for key, partition in query.partitions.items() if query is not None else ():
            if key[0] in topics:
                yield key, partition

    def _measured(self, client_id: str) -> tuple[float, int, float]:
        """Return a client's offsets per record, least offsets of a batch, and bytes per record."""
        for bounded in self._queries_of(client_id):
            clamp = bounded.clamp
            return clamp.offsets_per_record, clamp.least_offsets, bounded.bytes_per_record or 0.0
        return 1.0, 1, 0.0

    def _planned(self, client_id: str) -> tuple[int, float]:
        """Return what a client has planned and not reported: batches, and their records."""
        offered, done = self._offered(client_id)
        plans = self._plans.get(client_id)
        batches = int(offered > done) if plans is None else plans.batches(offered, done)
        return batches, (offered - done) / self._measured(client_id)[0] if batches else 0.0

    def _offered(self, client_id: str) -> tuple[int, int]:
        """Return what a client's drivers were told in all, and completed of that, in offsets."""
        query = self._registry.query_of(client_id)
        partitions = query.partitions if query is not None else {}
        ends: dict[TopicPartition, tuple[int, int]] = {}
        for bounded in self._queries_of(client_id):
            for key, advertised in bounded.clamp.advertised.items():
                end, idle_at = ends.get(key, (0, 0))
                ends[key] = max(end, advertised.offset), max(idle_at, advertised.idle_offset)
        offered = done = 0
        for key, (end, idle_at) in ends.items():
            completed = partitions[key].committed_to if key in partitions else None
            offered += end  # and where nothing is known all was completed
            done += end if completed is None else min(end, max(completed, idle_at))
        return offered, done

    # How nodes are held

    def _hold_stage(self, stage: StageSettings, now_ms: float) -> None:
        """Hold one stage; a batch under way is read within the limit that it was planned for."""
        clients = self.clients_of(stage)
        if self.graph.settings.bounds_batches:
            for client_id in clients:
                is_new = self._limits.get(client_id) is None
                if is_new or not self._planned(client_id)[0]:
                    self._limits[client_id] = self._limit(stage, client_id, now_ms)
        self._set_ceilings(stage, clients, now_ms)

    def _set_ceilings(self, stage: StageSettings, clients: set[str], now_ms: float) -> None:
        state = self.flow.state_of(stage.name)
        ceilings: list[tuple[float, BatchLimit | None]] = []
        is_there = False
        for client_id in clients:
            limit = self._limits.get(client_id)
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
                    query.set_ceiling(ceiling, f"pipeline {self.name}: {why}", now_ms)
                if ceiling is not None and ceiling < stage.normal_rate:
                    ceilings.append((ceiling, waits))
        self.ceilings.pop(stage.name, None)
        if ceilings:
            self.ceilings[stage.name] = min(ceilings, key=itemgetter(0))
        is_held = state is not None or any(self._limits.get(each) for each in clients)
        self._log_reach(stage.name, is_held and not is_there, "a rule with adaptive")

    def _hold_source(self, client_id: str, now_ms: float) -> None:
        state = self.flow.state_of(client_id)
        if state is None or state.rate is None or client_id not in self._sent:
            self._release_source(client_id, now_ms)
            return
        sent_bytes, records = self._sent[client_id]
        entities = self._bounded[client_id]
        match = partial(self._quotas.table.match, _PRODUCED)
        clients = (each for each in self._quotas.clients() if each.client_id == client_id)
        entities.update(found.entity for found in map(match, clients) if found is not None)
        self._log_reach(client_id, not entities, "a producer_byte_rate")
        bound, reason = state.rate * (sent_bytes / records), f"pipeline {self.name}: {state.why}"
        for entity in entities:
            self._quotas.adapt(_PRODUCED, entity, bound, reason, now_ms)

    def _release_source(self, client_id: str, now_ms: float) -> None:
        for entity in self._bounded.pop(client_id, ()):
            self._quotas.adapt(_PRODUCED, entity, None, None, now_ms)

    def _log_reach(self, node: str, is_out_of_reach: bool, need: str) -> None:
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
