"""How many records each client of a stage may plan now, from what is measured.

Read when its driver asks how far to read: right before the answer, so that what is known then
counts.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace

from proxy.progress.partition import PartitionProgress
from proxy.progress.query_registry import QueryRegistry
from proxy.wire.topic_partition import TopicPartition

from .batch_limit import BatchLimit, UpstreamWriter, records_that_fit
from .bounded_query import BoundedQuery, QueriesOf
from .graph import StageSettings
from .planned_batches import PlannedBatches
from .running_pipeline import RunningPipeline

UNKNOWN_MS = 15_000.0
"""For so long after a start nothing is planned before a stage whose lag is not known again. The
cluster is asked for the ends of logs at once, and again after 10 s."""

ALL = "as much is in flight as max_pending allows"


@dataclass(frozen=True, slots=True)
class Planned:
    """What a client has planned and not reported."""

    batches: int = 0
    records: float = 0.0
    bytes: float = 0.0


class BatchPlanner:
    """Computes the limit of the next batch of each client.

    Args:
        registry: knows what clients have completed, and log ends.
        queries_of: knows what drivers were told.

    """

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

    def planned(self, client_id: str) -> Planned:
        """Return what a client has planned and not reported."""
        offered, done = self._offered(client_id)
        plans = self._batches.get(client_id)
        batches = int(offered > done) if plans is None else plans.batches(offered, done)
        if not batches:
            return Planned()
        bounded = self._bounded(client_id)
        records = (offered - done) / _offsets_per_record(bounded)
        size = bounded.bytes_per_record if bounded is not None else None
        return Planned(batches, records, records * (size or 0.0))

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
        bounded = self._bounded(client_id)
        partitions = sum(1 for _ in self._partitions(client_id, stage.consumes))
        offsets = bounded.clamp.least_offsets if bounded is not None else 1
        least = max(1, math.ceil(max(partitions, offsets) / _offsets_per_record(bounded)))
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
        return UpstreamWriter(
            name=client_id,
            weight=stage.normal_rate if has_work else 0.0,
            records_out=pipeline.flow.stages[stage.name].records_out(topics),
            planned=planned,
            written=sum(
                each.range.end - each.range.start
                for each in pipeline.outputs.get(stage.name, ())
                if each.range.topic in topics
            )
            if planned
            else 0,
        )

    def _lag(
        self, pipeline: RunningPipeline, stage: StageSettings, topics: Iterable[str], now_ms: float
    ) -> int | None:
        """Return how many records wait for a stage; None when that is not known again yet.

        Before it has read anything, what was written since this process began.
        """
        lags: dict[TopicPartition, int] = {}
        for client_id in pipeline.clients_of(stage):
            for key, partition in self._partitions(client_id, topics):
                if partition.lag_from is None:
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

    def _bounded(self, client_id: str) -> BoundedQuery | None:
        return next(iter(self._queries_of(client_id)), None)

    def _offered(self, client_id: str) -> tuple[int, int]:
        """Return what the drivers of a client were told in all, and completed of that, in offsets.

        Where it is not known what was completed, all was.
        """
        query = self._registry.query_of(client_id)
        ends: dict[TopicPartition, tuple[int, int]] = {}
        for bounded in self._queries_of(client_id):
            for key, advertised in bounded.clamp.advertised.items():
                end, idle_at = ends.get(key, (0, 0))
                ends[key] = max(end, advertised.offset), max(idle_at, advertised.idle_offset)
        offered = done = 0
        for key, (end, idle_at) in ends.items():
            partition = query.partitions.get(key) if query is not None else None
            completed = partition.committed_to if partition is not None else None
            offered += end
            done += end if completed is None else min(end, max(completed, idle_at))
        return offered, done


def _offsets_per_record(bounded: BoundedQuery | None) -> float:
    return bounded.clamp.offsets_per_record if bounded is not None else 1.0
