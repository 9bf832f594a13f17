"""One pipeline at work: who its clients are, what is reported of them, and how they are held.

Readings come in, rates of nodes and records of state come out. A stage that is itself held
processes no more than it may, so a hold goes on up the pipeline, one stage in a period, and its
band shrinks with its rate. A stage that has ended, or gives no sign of life for SILENT_MS, asks
nothing more; what was held before a restart stays so for SILENT_MS.

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
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from functools import partial
from operator import attrgetter, itemgetter
from random import SystemRandom

from structlog import get_logger

from metrics.clock import MS_PER_SECOND
from proxy.backpressure.backpressure import Backpressure
from proxy.backpressure.drivers import PartitionOffsets
from proxy.progress.partition import PartitionProgress
from proxy.progress.query import AcceptedReport, FollowedQuery
from proxy.progress.query_registry import QueryRegistry
from proxy.progress.report import BatchReport
from proxy.quota.entities import QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.meter import AdaptedBound
from proxy.state import Json, Record
from proxy.state.state_records import UnwrittenRecords
from proxy.state.store import UnknownSchemaError
from proxy.wire.topic_partition import TopicPartition

from .batch_limit import BatchLimit, UpstreamStage, records_that_fit
from .completion import CompletionTracker, StageBatch
from .graph import Node, PipelineGraph, find_permanent_holds
from .ledger import MAX_OFFSET, TopicRange
from .nodes import (
    FLOW_RECORDS,
    RateChangeDirection,
    RateChangeRequest,
    SourceProducer,
    Stage,
    lowered_rates,
    raised_rates,
)

MAX_EVENTS = 100

FULL_BATCH = 0.5
"""Of its interval: a batch that takes less does not say how fast its stage can process."""

UNKNOWN_MS = 15_000.0
"""For so long after a start nothing is planned before a stage whose lag is not known again. The
cluster is asked for the ends of logs at once, and again after 10 s."""

ALL = "as much is in flight as max_pending allows"

_PRODUCED = QuotaKind.PRODUCER_BYTE_RATE

_log = get_logger(__name__)


class RunningPipeline:
    """One pipeline at work."""

    def __init__(
        self,
        graph: PipelineGraph,
        registry: QueryRegistry,
        backpressure: Backpressure,
        quotas: QuotaManager,
        unwritten: UnwrittenRecords,
        *,
        now_ms: float,
        now_s: float,
    ) -> None:
        self.name = graph.settings.name
        self.unwritten = unwritten
        self.nodes: Mapping[str, Stage | SourceProducer] = {}
        """What can be held, by name."""
        self.stages: Mapping[str, Stage] = {}
        self.sources: Mapping[str, SourceProducer] = {}
        self.events: deque[dict[str, Json]] = deque(maxlen=MAX_EVENTS)
        self._registry, self._queries_of, self._quotas = registry, backpressure.of_client, quotas
        self.completion = CompletionTracker(
            graph, unwritten, random=SystemRandom(), now_ms=now_ms, now_s=now_s
        )
        self._to_s = self.completion.wall.to_s
        self._loaded_ms = -math.inf
        """When this process took up the state; long ago if it did not."""
        self._out_of_reach: set[str] = set()
        """Nodes that are to be held and cannot be."""
        self._follow(graph, now_ms)

    @property
    def prefix(self) -> str:
        """What the keys of its records begin with."""
        return f"{FLOW_RECORDS.key(self.name)}/"

    def reload(self, graph: PipelineGraph, now_ms: float) -> None:
        """Follow changed settings; nodes that remain keep their state."""
        self.release(now_ms)
        self._follow(graph, now_ms)
        self.completion.update(graph, now_ms)
        self._hold(now_ms)

    def assign(
        self, records: Collection[Record], now_ms: float, *, is_handed_over: bool = False
    ) -> list[str]:
        """Load the records of an earlier process, or of the member that had it before.

        Return what was not taken up, and why.
        """
        self._loaded_ms = now_ms
        ledger = [record for record in records if not record.key.startswith(self.prefix)]
        refused = self.completion.load(ledger, now_ms, is_handed_over=is_handed_over)
        refused += self.load(records, now_ms)
        self._hold(now_ms)  # before a driver asks
        return refused

    def load(self, records: Iterable[Record], now_ms: float) -> list[str]:
        """Load those under `prefix`, at any time; return what was not taken, and why.

        Records newer than what is in force count; older and missing ones are written again. Those
        of nodes that are gone and damaged ones are deleted, those of a newer program left alone.
        """
        refused = []
        nodes = {node.key(): node for node in self.nodes.values()}
        changed = {key for key, node in nodes.items() if node.state.rate is not None}
        for record in records:
            if not record.key.startswith(self.prefix):
                continue
            node = nodes.get(record.key)
            try:
                if node is None:
                    raise ValueError("the pipeline has no such node")
                state, before = node.read(record), node.state
            except UnknownSchemaError as error:
                refused.append(f"{record.key}: {error}")
                changed.discard(record.key)
                continue
            except ValueError as error:
                refused.append(f"{record.key}: {error}; deleted")
                self.unwritten.mark_deleted(record.key)
                continue
            is_same = state.revision == before.revision
            if state.revision > before.revision:
                is_same = not node.load(state, self.graph.downstream[node.name])
                if (rate := node.state.rate) != before.rate:
                    about = {"pipeline": self.name, "node": node.name}
                    _log.info("pipeline", **about, rate=rate, reason=state.why)
            (changed.discard if is_same else changed.add)(record.key)
        for key in sorted(changed):
            self.unwritten.mark_changed(nodes[key])
        for message in refused:
            self._changed("", None, message, now_ms, is_logged=False)
        return refused

    def advance(self, arrived: Mapping[str, int], now_ms: float) -> None:
        """Do what is due by what is measured, and hold and release accordingly.

        `arrived` is counted by topic, since that became known.
        """
        for source in self.sources.values():
            source.arrived(arrived, now_ms)
        for stage in self.stages.values():
            consumes = stage.settings.consumes
            if all(topic in arrived for topic in consumes):
                stage.sample(sum(arrived[topic] for topic in consumes), now_ms)
            lags = [
                lag
                for client_id in self._clients(stage)
                for _, partition in self._partitions(client_id, consumes)
                if (lag := partition.lag_records()) is not None
            ]
            if lags:
                stage.lag(sum(lags))
        self.completion.tick(now_ms)
        self.tick(now_ms)
        self._hold(now_ms)

    def tick(self, now_ms: float) -> None:
        """End the periods that are due; call it at least once in the shortest."""
        now_s = self._to_s(now_ms)
        requests: dict[str, RateChangeRequest] = {}
        for name, stage in self.stages.items():
            if now_ms < stage.due_ms:
                continue
            request = stage.close(now_ms, holds=bool(self._held_for(name)))
            if request is not None and stage.was_seen and stage.is_alive(now_ms):
                requests[name] = request
        for name, request in requests.items():  # with all rates as they are measured now
            self._ask(name, request, now_ms)
        for name, node in self.nodes.items():
            before = node.state.rate
            if node.tick(now_ms, now_s, lambda name: self.stages[name].is_alive(now_ms)):
                self.unwritten.mark_changed(node)
                is_logged = node.state.rate != before
                self._changed(name, node.state.rate, node.state.why, now_ms, is_logged=is_logged)

    def release(self, now_ms: float) -> None:
        """Hold no node any more."""
        for stage in self.stages.values():
            for plans in stage.plans.values():
                plans.limit = None
            self._set_ceilings(stage, None, now_ms)
        for source in self.sources.values():
            self._hold_source(source, None, now_ms)

    def wrote(self, stage: Stage, written: TopicRange, now_ms: float) -> None:
        """Keep what a stage has written until its batch is reported."""
        key = (written.topic, written.partition)
        for reader in self.graph.consumers[written.topic]:
            unread = self.stages[reader].unread
            start, end = unread.get(key, (written.start, 0))
            if written.start < start:  # the topic was made anew
                start, end = written.start, 0
            unread[key] = start, max(end, written.end)
        self.completion.wrote(stage.name, written, now_ms)

    def plans(
        self, stage: Stage, client_id: str, partitions: Set[TopicPartition], now_ms: float
    ) -> None:
        """Hold a client of a stage to what there is room for, if its driver plans a batch."""
        if not self.graph.settings.bounds_batches:
            return
        offered, _ = self._offered(client_id)
        if stage.plans[client_id].look_up(partitions, offered):
            stage.plans[client_id].limit = self._limit(stage, client_id, now_ms)
            self._set_ceilings(stage, stage.state.rate, now_ms)

    def reported(
        self, stage: Stage, accepted: AcceptedReport, ends: PartitionOffsets, now_ms: float
    ) -> bool:
        """Apply a report; see `RunningPipelines`. Return whether it says more than "alive"."""
        report, query, name, graph = accepted.report, accepted.query, stage.name, self.graph
        stage.seen(now_ms)
        is_late = report.run_id != query.run_id  # of an earlier run
        if report.event == "running" or (is_late and report.batch is None):
            return False
        event_ms = now_ms - report.age_ms
        if report.batch is not None:
            self._add_batch(stage, query, report.batch, event_ms, ends, now_ms)
        elif report.event == "idle":
            # What came after that belongs to a batch that is not reported yet.
            written = self.completion.reports[name].written
            if all(at_ms <= event_ms for _, at_ms in written):
                self.completion.idle(name, now_ms)
        elif report.event == "terminated":
            stage.ended()
        stage.plans[query.client_id].reported()
        # What it has completed makes room for those before it, a root that ends for the first.
        for each in {name, *graph.first, *graph.upstream[name]} & graph.stages.keys():
            self._hold_stage(self.stages[each], now_ms)
        return True

    def _follow(self, graph: PipelineGraph, now_ms: float) -> None:
        """Have the nodes of a graph; those that were there before keep their state."""
        self.graph, settings, before = graph, graph.settings, self.nodes
        self.stages = {
            name: self.stages.get(name) or Stage(stage, settings.max_lag, now_ms, self.name)
            for name, stage in graph.stages.items()
        }
        # Measured whether they are held or not: a reload may have them held.
        self.sources = {
            each.name: self.sources.get(each.name) or SourceProducer(each, self.name)
            for each in settings.sources
        }
        self.nodes = {**self.stages, **(self.sources if settings.hold_producers else {})}
        for name, node in before.items():
            if self.nodes.get(name) is not node:
                if node.state.rate is not None:
                    self._changed(name, None, "it is no longer held in this pipeline", now_ms)
                node.begin()
                self.unwritten.mark_removed(node)
        every: tuple[Node, ...] = (*settings.stages, *settings.sources)
        for each in every:
            name, node = each.name, self.stages.get(each.name) or self.sources[each.name]
            if before.get(name) is not node:
                node.begin()  # it could not be held so far
            # A stage that nobody consumes from any more may still have to be released.
            consumers = graph.downstream[name] or (name,)
            period_ms = max(graph.stages[consumer].period_ms for consumer in consumers)
            if node.follow(each, graph.downstream[name], period_ms, now_ms):
                self.unwritten.mark_changed(node)
                self._changed(name, node.state.rate, "the pipeline's settings changed", now_ms)
        for name, stage in self.stages.items():
            stage.sample_for(graph.stages[name], settings.max_lag, now_ms)
        for problem in find_permanent_holds(graph):
            _log.warning("a hold may never end", problem=problem)

    def _held_for(self, stage: str) -> list[str]:
        """Return the nodes upstream that are held because a stage asked."""
        nodes, controllers = self.graph.upstream[stage], self.nodes
        return [n for n in nodes if n in controllers and stage in controllers[n].state.holders]

    def _ask(self, name: str, request: RateChangeRequest, now_ms: float) -> None:
        """Make a request to each node upstream that can be held and is to blame."""
        controllers, stage = self.nodes, self.stages[name]
        own_rate = stage.state.rate or math.inf
        processing_rate = stage.processing_rate or stage.settings.band[1] * stage.scale
        upstream = [
            (node, node.records_out(self.graph.topics_between(node.name, name)))
            for node in map(controllers.get, self.graph.upstream[name])
            if node is not None
        ]
        if request.direction is RateChangeDirection.DECREASE:
            more, rates = "less", lowered_rates(upstream, min(own_rate, processing_rate))
            if request.is_of_lag:
                # Stages are not let plan more than there is room for; sources cannot be stopped.
                rates = {node: rates[node] for node in rates if node not in self.stages}
        else:
            more, rates = "more", raised_rates(upstream, own_rate, self._held_for(name))
        if not rates:
            return
        reason = f"{name} asks for {more}: {request.reason}; it processes {processing_rate:,.1f}/s"
        for node, rate in rates.items():
            adjust_ms = stage.settings.t_min_adjust_ms
            controllers[node].ask(name, request.direction, rate, adjust_ms, reason)
        stage.last_request = {
            "at_s": self._to_s(now_ms),
            "direction": request.direction,
            "processing_rate": processing_rate,
            "reason": request.reason,
            "asked": list(rates),
        }

    def _changed(
        self, node: str, rate: float | None, reason: str, now_ms: float, *, is_logged: bool = True
    ) -> None:
        """Show that the rate of a node, or why it has it, is another one now."""
        at_s = self._to_s(now_ms)
        self.events.append({"at_s": at_s, "node": node, "rate": rate, "reason": reason})
        if is_logged:
            _log.info("pipeline", pipeline=self.name, node=node, rate=rate, reason=reason)

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

    def _clients(self, stage: Stage) -> set[str]:
        """Return the client ids of a stage, as far as its queries are known."""
        clients = set(stage.settings.client_ids)
        for member in stage.settings.members:
            for query in (self._registry.query_of(member), self._registry.query_named(member)):
                if query is not None:
                    clients.add(query.client_id)
        return clients

    def _living_clients(self, stage: Stage, now_ms: float) -> Set[str]:
        """Return the client ids of a stage while it gives signs of life."""
        return self._clients(stage) if stage.is_alive(now_ms) else set()

    def _partitions(
        self, client_id: str, topics: Iterable[str]
    ) -> Iterator[tuple[TopicPartition, PartitionProgress]]:
        """Yield what a client has read of topics."""
        query = self._registry.query_of(client_id)
        for key, partition in query.partitions.items() if query is not None else ():
            if key[0] in topics:
                yield key, partition

    def _measured(self, client_id: str) -> tuple[float, int, float]:
        """Return a client's offsets per record, least offsets of a batch, and bytes per record."""
        for bounded in self._queries_of(client_id):
            measured, least_offsets = bounded.measurements, bounded.clamp.least_offsets
            return measured.per_record, least_offsets, measured.bytes_per_record.value or 0.0
        return 1.0, 1, 0.0

    def _hold(self, now_ms: float) -> None:
        """Hold every node to what is said of it now; clients come and go."""
        for stage in self.stages.values():
            self._hold_stage(stage, now_ms)
        for source in self.sources.values():
            self._hold_source(source, source.state.rate, now_ms)

    def _hold_source(self, source: SourceProducer, rate: float | None, now_ms: float) -> None:
        """Hold a source to a rate, by all rules that its clients have; None: not."""
        name, quotas = source.name, self._quotas
        if rate is None or source.record_bytes is None:
            for entity in source.entities:
                quotas.adapt(_PRODUCED, entity, None, now_ms)
            source.entities.clear()
            return
        match = partial(quotas.table.match, _PRODUCED)
        clients = (each for each in quotas.clients() if each.client_id == name)
        source.entities.update(found.entity for found in map(match, clients) if found is not None)
        self._log_reach(name, not source.entities, "a producer_byte_rate")
        why = f"pipeline {self.name}: {source.state.why}"
        adapted = AdaptedBound(rate * source.record_bytes, why)
        for entity in source.entities:
            quotas.adapt(_PRODUCED, entity, adapted, now_ms)

    def _hold_stage(self, stage: Stage, now_ms: float) -> None:
        """Hold a stage; a batch under way is read within the limit that it was planned for."""
        if self.graph.settings.bounds_batches:
            for client_id in self._clients(stage):
                plans = stage.plans[client_id]
                if plans.limit is None or not self._planned(stage, client_id)[0]:
                    plans.limit = self._limit(stage, client_id, now_ms)
        self._set_ceilings(stage, stage.state.rate, now_ms)

    def _set_ceilings(self, stage: Stage, held_to: float | None, now_ms: float) -> None:
        """Hold the queries of a stage to a rate, and to the limits of their batches."""
        clients = self._clients(stage)
        ceilings: list[tuple[float, BatchLimit | None]] = []
        is_there = False
        for client_id in clients:
            limit = stage.plans[client_id].limit
            for query in self._queries_of(client_id):
                is_there = True
                ceiling, why, waits = held_to, stage.state.why, None
                if limit is not None:
                    # While no interval is known the driver is told the truth whatever is said here.
                    interval_ms = query.measurements.interval_ms or MS_PER_SECOND
                    rate = limit.records * MS_PER_SECOND / interval_ms
                    if ceiling is None or rate < ceiling:
                        ceiling, why, waits = rate, limit.reason, limit
                if query.ceiling != ceiling:
                    query.set_ceiling(ceiling, f"pipeline {self.name}: {why}", now_ms)
                if ceiling is not None and ceiling < stage.normal_rate:
                    ceilings.append((ceiling, waits))
        stage.ceiling, stage.waits = min(ceilings, key=itemgetter(0), default=(None, None))
        is_held = held_to is not None or any(stage.plans[each].limit for each in clients)
        self._log_reach(stage.name, is_held and not is_there, "a rule with adaptive")

    def _limit(self, stage: Stage, client_id: str, now_ms: float) -> BatchLimit | None:
        """Return the limit of the next batch of a client, from what is measured; None: no bound."""
        graph, max_lag = self.graph, self.graph.settings.max_lag
        if stage.name in graph.first and self._is_full(now_ms):
            return BatchLimit(0, self.completion.oldest_waits_at() or stage.name, ALL)
        if max_lag is None:
            return None
        limits = [
            self._limit_before(self.stages[name], max_lag, stage, client_id, now_ms)
            for name in graph.downstream[stage.name]
        ]
        return min(filter(None, limits), key=attrgetter("records"), default=None)

    def _is_full(self, now_ms: float) -> bool:
        """Return whether the first stages are to wait, by what is in flight and planned."""
        batches, size_bytes = 0, 0.0
        # A query that is gone makes its batch again when it is back: as the first of a run.
        for name in self.graph.first:
            batches += len(self.completion.reports[name].waiting)
            for client_id in self._living_clients(self.stages[name], now_ms):
                planned, records = self._planned(self.stages[name], client_id)
                batches += planned
                size_bytes += records and records * self._measured(client_id)[2]
        return self.completion.is_full(batches, size_bytes)

    def _limit_before(
        self, reader: Stage, max_lag: int, stage: Stage, client_id: str, now_ms: float
    ) -> BatchLimit | None:
        """Return what a client of a stage may plan for the sake of one that reads of it."""
        graph, name = self.graph, reader.name
        # What sources bring is not kept back here: it takes no room from what stages write.
        topics = [t for t in reader.settings.consumes if graph.producer_of[t] in graph.stages]
        lag = self._waiting(reader, topics, now_ms)
        if lag is None:
            return BatchLimit(0, name, f"how much waits for {name} is not known yet")
        writers = [
            self._writer(each, client, name, now_ms)
            for each in map(self.stages.get, graph.upstream[name])
            if each is not None
            for client in self._living_clients(each, now_ms)
            if (each, client) != (stage, client_id)
        ]
        asking = self._writer(stage, client_id, name, now_ms, is_asking=True)
        offsets_per_record, least_offsets, _ = self._measured(client_id)
        partitions = sum(1 for _ in self._partitions(client_id, stage.settings.consumes))
        least = max(1, math.ceil(max(partitions, least_offsets) / offsets_per_record))
        records = records_that_fit(max_lag, lag, asking, writers, least)
        if records is None:
            return None
        why = f"{lag:,} records wait for {name}, and max_lag is {max_lag:,}"
        return BatchLimit(records, name, why)

    def _waiting(self, stage: Stage, topics: Iterable[str], now_ms: float) -> int | None:
        """Return how many records wait for a stage; None when that is not known again yet."""
        unread = stage.unread
        lags: dict[TopicPartition, int] = {}
        for client_id in self._clients(stage):
            advertised = self._advertised(client_id)
            for key, partition in self._partitions(client_id, topics):
                if partition.lag_from is None:  # nothing read yet
                    continue
                lag = partition.lag_records()
                if lag is None:
                    if now_ms - self._loaded_ms < UNKNOWN_MS:
                        return None
                    continue
                if key in advertised:  # its last report may have been lost
                    lag = max(lag - max(advertised[key][1] - partition.lag_from, 0), 0)
                lags[key] = max(lags.get(key, 0), lag)
                if key in unread:
                    start, end = unread[key]
                    unread[key] = max(start, partition.lag_from), max(end, partition.lag_from)
        for key, (start, end) in unread.items():
            if key[0] in topics and key not in lags:
                lags[key] = end - start
        return sum(lags.values())

    def _writer(
        self, stage: Stage, client_id: str, reader: str, now_ms: float, *, is_asking: bool = False
    ) -> UpstreamStage:
        """Return what a client of a stage writes for one that the stage feeds."""
        topics = self.graph.topics_between(stage.name, reader)
        _, planned = self._planned(stage, client_id)
        has_work = is_asking or planned > 0
        has_work = has_work or self._waiting(stage, stage.settings.consumes, now_ms) != 0
        written = self.completion.reports[stage.name].written if planned else ()
        return UpstreamStage(
            stage.normal_rate if has_work else 0.0,
            stage.records_out(topics),
            planned,
            sum(each.end - each.start for each, _ in written if each.topic in topics),
        )

    def _planned(self, stage: Stage, client_id: str) -> tuple[int, float]:
        """Return what a client has planned and not reported: batches, and their records."""
        offered, done = self._offered(client_id)
        if not (batches := stage.plans[client_id].batches(offered, done)):
            return 0, 0.0
        return batches, (offered - done) / self._measured(client_id)[0]

    def _offered(self, client_id: str) -> tuple[int, int]:
        """Return what a client's drivers were told in all, and completed of that, in offsets."""
        query = self._registry.query_of(client_id)
        partitions = query.partitions if query is not None else {}
        offered = done = 0
        for key, (end, idle_at) in self._advertised(client_id).items():
            completed = partitions[key].committed_to if key in partitions else None
            offered += end  # and where nothing is known all was completed
            done += end if completed is None else min(end, max(completed, idle_at))
        return offered, done

    def _advertised(self, client_id: str) -> dict[TopicPartition, tuple[int, int]]:
        """Return what a client's drivers were told, and up to where they have said to be idle."""
        ends: dict[TopicPartition, tuple[int, int]] = {}
        for bounded in self._queries_of(client_id):
            for key, advertised in bounded.clamp.advertised.items():
                end, idle_at = ends.get(key, (0, 0))
                ends[key] = max(end, advertised.offset), max(idle_at, advertised.idle_offset)
        return ends

    def _add_batch(
        self,
        stage: Stage,
        query: FollowedQuery,
        batch: BatchReport,
        ended_ms: float,
        ends: PartitionOffsets,
        now_ms: float,
    ) -> None:
        name, completion = stage.name, self.completion
        execution_ms = float(batch.execution_ms or 0)
        started_ms = ended_ms - execution_ms
        measured = [each.measurements for each in self._queries_of(query.client_id)]
        seen = written = completion.take_written(name, ended_ms)
        if completion.is_recovering(name, started_ms):
            written += completion.recover(name, self.known_ends(stage), ends)
        size = next(filter(None, (each.bytes_per_record.value for each in measured)), 0.0)
        size_bytes, inputs = round(batch.rows * size), tuple(_inputs(stage, query, batch))
        done = StageBatch(name, batch.batch_id, inputs, written, started_ms, size_bytes)
        completion.stage_batch(done, now_ms)
        if batch.rows > 0 and execution_ms > 0:
            # A short batch had little to do: what it shows is Spark's own time, not the stage's.
            if all(execution_ms >= FULL_BATCH * (each.interval_ms or 0) for each in measured):
                rate = next(filter(None, (each.processing_rate for each in measured)), None)
                stage.processed(rate or batch.rows / execution_ms * MS_PER_SECOND, now_ms)
            made = dict.fromkeys(stage.settings.produces, 0)
            for each in seen:
                made[each.topic] += each.end - each.start
            stage.converted(batch.rows, made)

    def known_ends(self, stage: Stage) -> dict[TopicPartition, int]:
        """Return up to where it is known who wrote what of the topics of a stage."""
        known: dict[TopicPartition, int] = {}  # at least what readers have completed
        for query in self._registry.queries:
            for key, partition in query.partitions.items():
                if partition.committed_to is not None:
                    known[key] = min(known.get(key, MAX_OFFSET), partition.committed_to)
        known |= self.completion.edges.known_ends()
        return {key: end for key, end in known.items() if key[0] in stage.settings.produces}


def _inputs(stage: Stage, query: FollowedQuery, batch: BatchReport) -> Iterator[TopicRange]:
    """Yield what a batch has completed of the topics of its stage."""
    for (topic, partition), span in batch.ranges.items():
        start = span.start
        if start is None:  # the first batch of a query
            kept = query.partitions.get((topic, partition))
            start = min(span.end, (kept.log.log_start_offset if kept else None) or 0)
        if start < span.end and topic in stage.settings.consumes:
            yield TopicRange(topic, partition, start, span.end)
