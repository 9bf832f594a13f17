"""How many records each client of a stage may plan now, from what is measured.

Read when its driver asks how far to read: right before the answer, so that what is known then
counts.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

from proxy.backpressure.backpressure import Backpressure
from proxy.backpressure.query_backpressure import QueryBackpressure
from proxy.pipeline.graph import StageSettings
from proxy.pipeline.planned import Planned
from proxy.pipeline.room import Room, Writer, fitting
from proxy.progress.query_registry import QueryRegistry
from proxy.wire.topic_partition import TopicPartition

from .line import Line
from .members import Members

UNKNOWN_MS = 15_000.0
"""For so long after a start nothing is planned before a stage whose lag is not known again. The
cluster is asked for the ends of logs at once, and again after 10 s."""

ALL = "as much is in flight as max_pending allows"


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a client has planned and not reported."""

    batches: int = 0
    records: float = 0.0
    bytes: float = 0.0


class Rooms:
    """Finds the room for the next batch of each client.

    Args:
        members: who belongs to a stage.
        registry: knows what clients have completed, and log ends.
        backpressure: knows what drivers were told.

    """

    def __init__(
        self, members: Members, registry: QueryRegistry, backpressure: Backpressure
    ) -> None:
        self._members = members
        self._registry = registry
        self._backpressure = backpressure
        self._planned: dict[str, Planned] = defaultdict(Planned)
        """By client id."""

    def is_bounded(self, line: Line) -> bool:
        """Say whether there is anything that a batch may have no room for."""
        settings = line.graph.settings
        bounds = (settings.max_lag, settings.max_pending_batches, settings.max_pending_bytes)
        return any(bound is not None for bound in bounds)

    def asks(self, client_id: str, partitions: Set[TopicPartition]) -> bool:
        """Take note that a driver asks for ends; return whether it makes another plan."""
        told, _ = self._told(client_id)
        return self._planned[client_id].asks(partitions, told)

    def reported(self, client_id: str) -> None:
        """Take note of a report on a batch."""
        if client_id in self._planned:
            self._planned[client_id].reported()

    def ahead(self, client_id: str) -> Ahead:
        """Return what a client has planned and not reported."""
        told, done = self._told(client_id)
        batches = (
            self._planned[client_id].batches(told, done)
            if client_id in self._planned
            else (int(told > done))
        )
        if not batches:
            return Ahead()
        pressed = next(iter(self._backpressure.of_client(client_id)), None)
        records = (told - done) / _offsets_per_record(pressed)
        size = pressed.bytes_per_record if pressed is not None else None
        return Ahead(batches, records, records * (size or 0.0))

    def room(self, line: Line, stage: StageSettings, client_id: str, now_ms: float) -> Room | None:
        """Return the room for the next batch of a client of a stage; None: no bound."""
        if stage.name in line.graph.first and self._is_full(line, now_ms):
            return Room(0, line.completion.holder() or stage.name, ALL)
        max_lag = line.graph.settings.max_lag
        if max_lag is None:
            return None
        rooms = [
            room
            for name in line.graph.downstream_of(stage.name)
            if (room := self._before(line, line.stages[name], max_lag, stage, client_id, now_ms))
        ]
        return min(rooms, key=lambda room: room.records, default=None)

    def _is_full(self, line: Line, now_ms: float) -> bool:
        pending = line.completion.max_pending
        if pending.max_batches is None and pending.max_bytes is None:
            return False
        batches, size_bytes = 0, 0.0
        # A query that is gone makes its batch again when it is back: as the first of a run.
        for name in line.graph.first:
            batches += line.completion.waiting(name)
            if line.flow.is_alive(name, now_ms):
                for client_id in self._members.clients_of(line.stages[name]):
                    ahead = self.ahead(client_id)
                    batches += ahead.batches
                    size_bytes += ahead.bytes
        return pending.full(batches, size_bytes)

    def _before(
        self,
        line: Line,
        stage: StageSettings,
        max_lag: int,
        writing: StageSettings,
        client_id: str,
        now_ms: float,
    ) -> Room | None:
        """Return what a client of the stage `writing` may plan for the sake of one it feeds."""
        # What sources bring is not kept back here: it takes no room from what stages write.
        topics = [topic for topic in stage.consumes if line.graph.producer_of[topic] in line.stages]
        lag = self._lag(line, stage, topics, now_ms)
        if lag is None:
            return Room(0, stage.name, f"how much waits for {stage.name} is not known yet")
        clients = {
            (name, client)
            for name in line.graph.upstream_of(stage.name)
            if name in line.stages and line.flow.is_alive(name, now_ms)
            for client in self._members.clients_of(line.stages[name])
        }
        writers = [
            self._writer(line, line.stages[name], client, stage, now_ms)
            for name, client in clients - {(writing.name, client_id)}
        ]
        asking = self._writer(line, writing, client_id, stage, now_ms)
        writers.append(replace(asking, weight=writing.normal_rate))
        pressed = next(iter(self._backpressure.of_client(client_id)), None)
        partitions = sum(1 for _ in self._partitions(client_id, writing.consumes))
        offered = pressed.clamp.least_offsets if pressed is not None else 1
        least = max(1, math.ceil(max(partitions, offered) / _offsets_per_record(pressed)))
        records = fitting(max_lag, lag, writers, client_id, least)
        if records is None:
            return None
        why = f"{lag:,} records wait for {stage.name}, and max_lag is {max_lag:,}"
        return Room(records, stage.name, why)

    def _writer(
        self, line: Line, stage: StageSettings, client_id: str, reader: StageSettings, now_ms: float
    ) -> Writer:
        topics = line.graph.topics_between(stage.name, reader.name)
        planned = self.ahead(client_id).records
        has_work = planned > 0 or self._lag(line, stage, stage.consumes, now_ms) != 0
        return Writer(
            name=client_id,
            weight=stage.normal_rate if has_work else 0.0,
            records_out=line.flow.records_out(stage.name, topics),
            planned=planned,
            written=sum(
                each.range.end - each.range.start
                for each in line.outputs.get(stage.name, ())
                if each.range.topic in topics
            )
            if planned
            else 0,
        )

    def _lag(
        self, line: Line, stage: StageSettings, topics: Iterable[str], now_ms: float
    ) -> int | None:
        """Return how many records wait for a stage; None when that is not known again yet.

        Before it has read anything, what was written since this process began.
        """
        lags: dict[TopicPartition, int] = {}
        for client_id in self._members.clients_of(stage):
            for key in self._partitions(client_id, topics):
                query = self._registry.query_of(client_id)
                assert query is not None
                partition = query.partitions[key]
                if partition.lag_from is None:
                    continue
                lag = partition.lag_records()
                if lag is None:
                    if now_ms - line.loaded_ms < UNKNOWN_MS:
                        return None
                    continue
                lags[key] = max(lags.get(key, 0), lag)
                line.completed(key, partition.lag_from)
        for key, (start, end) in line.written.items():
            if key[0] in topics and key not in lags:
                lags[key] = end - start
        return sum(lags.values())

    def _partitions(self, client_id: str, topics: Iterable[str]) -> Iterable[TopicPartition]:
        query = self._registry.query_of(client_id)
        return () if query is None else (key for key in query.partitions if key[0] in topics)

    def _told(self, client_id: str) -> tuple[int, int]:
        """Return what the drivers of a client were told in all, and completed of that, in offsets.

        Where it is not known what was completed, all was.
        """
        query = self._registry.query_of(client_id)
        ends: dict[TopicPartition, tuple[int, int]] = {}
        for pressed in self._backpressure.of_client(client_id):
            for key, told in pressed.clamp.advertised.items():
                end, idle_at = ends.get(key, (0, 0))
                ends[key] = max(end, told.offset), max(idle_at, told.idle_offset)
        whole = done = 0
        for key, (end, idle_at) in ends.items():
            partition = query.partitions.get(key) if query is not None else None
            completed = partition.committed_to if partition is not None else None
            whole += end
            done += end if completed is None else min(end, max(completed, idle_at))
        return whole, done


def _offsets_per_record(pressed: QueryBackpressure | None) -> float:
    return pressed.clamp.offsets_per_record if pressed is not None else 1.0
