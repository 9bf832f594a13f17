"""How many records each client of a stage may plan, from what is measured when its driver asks."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace

from proxy.progress.partition import PartitionProgress
from proxy.progress.query_registry import QueryRegistry
from proxy.wire.topic_partition import TopicPartition

from .batch_limit import BatchLimit, QueriesOf, UpstreamWriter, records_that_fit
from .graph import StageSettings
from .running_pipeline import RunningPipeline

UNKNOWN_MS = 15_000.0
"""For so long after a start nothing is planned before a stage whose lag is not known again. The
cluster is asked for the ends of logs at once, and again after 10 s."""

MAX_LATE = 1_000
"""Batches without a report that are told apart; where so many are late nobody reports."""

ALL = "as much is in flight as max_pending allows"


class PlannedBatches:
    """The plans of one query. Totals are offsets, added up over its partitions.

    Structured Streaming works on one batch at a time, up to the ends that its driver was told. So
    each time that the driver asks again the batch before is done, though its report may be late.
    """

    __slots__ = ("_earlier", "_looked_up")

    def __init__(self) -> None:
        self._looked_up: set[TopicPartition] = set()
        """What the driver has looked up, for the plan that it makes or carries out."""
        self._earlier: deque[int] = deque(maxlen=MAX_LATE)
        """What was told in all with each plan before that one; ascending."""

    def look_up(self, partitions: Set[TopicPartition], offered: int) -> bool:
        """Record that the driver, told `offered` in all, asks for ends; return if for another plan.

        It does when it looks up a partition again; for one plan it asks each broker for its own.
        """
        if self._looked_up and self._looked_up.isdisjoint(partitions):
            self._looked_up |= partitions
            return False
        self._looked_up = set(partitions)
        if not self._earlier or offered > self._earlier[-1]:
            self._earlier.append(offered)
        return True

    def reported(self) -> None:
        """Record that a batch was reported: what is looked up next makes another plan."""
        self._looked_up.clear()

    def batches(self, offered: int, done: int) -> int:
        """Return how many are not reported when `done` is completed of `offered` offsets in all."""
        while self._earlier and self._earlier[0] <= done:
            self._earlier.popleft()
        while self._earlier and self._earlier[-1] > offered:
            self._earlier.pop()  # of a run that is over
        # The latest of them is among these when the driver was told nothing new since.
        return sum(total < offered for total in self._earlier) + (offered > done)


@dataclass(frozen=True, slots=True)
class Planned:
    """What a client has planned and not reported."""

    batches: int = 0
    records: float = 0.0
    bytes: float = 0.0


class BatchPlanner:
    """Computes the limit of the next batch of each client, whose drivers `queries_of` knows."""

    def __init__(self, registry: QueryRegistry, queries_of: QueriesOf) -> None:
        self._registry = registry
        self._queries_of = queries_of
        self._batches: dict[str, PlannedBatches] = defaultdict(PlannedBatches)
        """By client id."""

    def look_up(self, client_id: str, partitions: Set[TopicPartition]) -> bool:
        """Record that a driver looks up ends; return whether it makes another plan."""
        offered, _ = self._offered(client_id)
        return self._batches[client_id].look_up(partitions, offered)

    def reported(self, client_id: str) -> None:
        """Record that a batch was reported."""
        if client_id in self._batches:
            self._batches[client_id].reported()

    def forget(self, client_id: str) -> None:
        """Forget what a client has planned: another member knows it from now on."""
        self._batches.pop(client_id, None)

    def planned(self, client_id: str) -> Planned:
        """Return what a client has planned and not reported."""
        offered, done = self._offered(client_id)
        plans = self._batches.get(client_id)
        batches = int(offered > done) if plans is None else plans.batches(offered, done)
        if not batches:
            return Planned()
        offsets_per_record, _, bytes_per_record = self._measured(client_id)
        records = (offered - done) / offsets_per_record
        return Planned(batches, records, records * bytes_per_record)

    def limit(
        self, pipeline: RunningPipeline, stage: StageSettings, client_id: str, now_ms: float
    ) -> BatchLimit | None:
        """Return the limit of the next batch of a client of a stage; None: no bound."""
        if stage.name in pipeline.graph.first and self._is_full(pipeline, now_ms):
            return BatchLimit(0, pipeline.completion.oldest_waits_at() or stage.name, ALL)
        if pipeline.graph.settings.max_lag is None:
            return None
        readers = [pipeline.stages[name] for name in pipeline.graph.downstream_of(stage.name)]
        limits = (self._before(pipeline, each, stage, client_id, now_ms) for each in readers)
        return min(filter(None, limits), key=lambda limit: limit.records, default=None)

    def _is_full(self, pipeline: RunningPipeline, now_ms: float) -> bool:
        batches, size_bytes = 0, 0.0
        # A query that is gone makes its batch again when it is back: as the first of a run.
        for name in pipeline.graph.first:
            batches += pipeline.completion.deferred.waiting_of(name)
            if pipeline.flow.stages[name].is_alive(now_ms):
                for client_id in pipeline.clients_of(pipeline.stages[name]):
                    planned = self.planned(client_id)
                    batches += planned.batches
                    size_bytes += planned.bytes
        return pipeline.completion.is_full(batches, size_bytes)

    def _before(
        self,
        pipeline: RunningPipeline,
        reader: StageSettings,
        stage: StageSettings,
        client_id: str,
        now_ms: float,
    ) -> BatchLimit | None:
        """Return what a client of a stage may plan for the sake of a stage that it feeds."""
        graph, max_lag = pipeline.graph, pipeline.graph.settings.max_lag
        assert max_lag is not None
        # What sources bring is not kept back here: it takes no room from what stages write.
        topics = [topic for topic in reader.consumes if graph.producer_of[topic] in graph.stages]
        lag = self._lag(pipeline, reader, topics, now_ms)
        if lag is None:
            return BatchLimit(0, reader.name, f"how much waits for {reader.name} is not known yet")
        clients = {
            (name, client)
            for name in graph.upstream_of(reader.name)
            if name in graph.stages and pipeline.flow.stages[name].is_alive(now_ms)
            for client in pipeline.clients_of(graph.stages[name])
        }
        writers = [
            self._writer(pipeline, graph.stages[name], client, reader, now_ms)
            for name, client in clients - {(stage.name, client_id)}
        ]
        asking = self._writer(pipeline, stage, client_id, reader, now_ms)
        writers.append(replace(asking, weight=stage.normal_rate))
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
        pipeline: RunningPipeline,
        stage: StageSettings,
        client_id: str,
        reader: StageSettings,
        now_ms: float,
    ) -> UpstreamWriter:
        topics = pipeline.graph.topics_between(stage.name, reader.name)
        planned = self.planned(client_id).records
        has_work = planned > 0 or self._lag(pipeline, stage, stage.consumes, now_ms) != 0
        outputs = pipeline.outputs.get(stage.name, ()) if planned else ()
        ranges = (each.range for each in outputs)
        return UpstreamWriter(
            name=client_id,
            weight=stage.normal_rate if has_work else 0.0,
            records_out=pipeline.flow.stages[stage.name].records_out(topics),
            planned=planned,
            written=sum(each.end - each.start for each in ranges if each.topic in topics),
        )

    def _lag(
        self, pipeline: RunningPipeline, stage: StageSettings, topics: Iterable[str], now_ms: float
    ) -> int | None:
        """Return how many records wait for a stage; None when that is not known again yet."""
        lags: dict[TopicPartition, int] = {}
        for client_id in pipeline.clients_of(stage):
            for key, partition in self._partitions(client_id, topics):
                if partition.lag_from is None:  # nothing read yet
                    continue
                lag = partition.lag_records()
                if lag is None:
                    if now_ms - pipeline.loaded_ms < UNKNOWN_MS:
                        return None
                    continue
                lags[key] = max(lags.get(key, 0), lag)
                pipeline.completed(key, partition.lag_from)
        for key, (start, end) in pipeline.unread.items():
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
