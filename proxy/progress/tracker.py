"""Follows one connection of a query's client: what it asks for, and what the query was given.

In an incremental session (KIP-227) a request names only what has changed, and a response leaves out
partitions without news. So each is kept with the offset that it was last asked from. All partitions
of a topic come at once, each a dictionary look-up and a few comparisons while a reader reads on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from proxy.progress.topics import TopicNames
from proxy.wire.fetch import FetchedPartition, FetchRequestContent, TopicKey
from proxy.wire.fetch_response import FetchObserver
from proxy.wire.list_offsets import (
    EARLIEST,
    LATEST,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    LookupRequest,
)
from proxy.wire.topic_partition import TopicPartition

from .offset_ranges import SkipReason
from .partition import PartitionProgress
from .query import FollowedQuery

OFFSET_OUT_OF_RANGE = 1

MAX_CURSORS = 20_000
"""Of one connection, before those are dropped that the query let go of: twice a query's bound."""

MAX_AGE_MS = 200.0
"""What a broker said longer ago is not said again. The age counts from when the Fetch was sent: a
response may have waited for a quota, or for a client that reads slowly."""

_LATEST = {READ_UNCOMMITTED: 1, READ_COMMITTED: 2}
"""Which of the three offsets below a broker answers, by isolation level."""

NOTHING: Mapping[Any, Any] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class FetchedLogOffsets:
    """The logs of the partitions that the latest Fetch response on a connection gave records of.

    Spark's executors look up the earliest and the latest offset after each poll, only to tell lost
    records from invisible ones. The response that the poll got has said both a moment before.
    Those without records do not count: their client has come to the end, where it matters what was
    written a moment ago. Nor do those that a fetch session leaves out, for they have none, nor any
    with an error. Times are monotonic.
    """

    _fetched: list[tuple[str, Sequence[FetchedPartition]]] = field(default_factory=list)
    """What is not yet among the logs: most responses are followed by no look-up."""
    _logs: dict[TopicPartition, tuple[int, int, int]] = field(default_factory=dict)
    """Log start, high watermark and last stable offset; -1 where the response does not say."""
    _asked_ms: float = 0.0

    def begin_response(self, asked_ms: float) -> None:
        """Forget the response before; `asked_ms` is when the request of this one was sent."""
        self._fetched.clear()
        self._logs.clear()
        self._asked_ms = asked_ms

    def record(self, topic: str, fetched: Sequence[FetchedPartition]) -> None:
        """Record what the response says of partitions whose topic has this name."""
        self._fetched.append((topic, fetched))

    def offsets(self, lookup: LookupRequest, now_ms: float) -> dict[TopicPartition, int] | None:
        """Return the answer for each partition of a look-up; None if not all of it is known."""
        if now_ms - self._asked_ms > MAX_AGE_MS or not lookup.timestamps:
            return None
        for topic, fetched in self._fetched:
            for partition, error_code, high, stable, start, records_bytes, _ in fetched:
                if not error_code and records_bytes > 0:
                    self._logs[topic, partition] = start, high, stable
        self._fetched.clear()
        found: dict[TopicPartition, int] = {}
        for key, timestamp in lookup.timestamps.items():
            latest = _LATEST.get(lookup.isolation_level) if timestamp == LATEST else None
            which = 0 if timestamp == EARLIEST else latest
            log = self._logs.get(key)
            if which is None or log is None or log[which] < 0:
                return None
            found[key] = log[which]
        return found


@dataclass(slots=True, eq=False)
class ReadCursor:
    """Where one connection is in one partition."""

    progress: PartitionProgress
    topic_id: bytes | None
    fetch_offset: int
    """Of the last request that named it; -1: not known."""
    delivered_to: int
    """What was delivered from `fetch_offset` to here is recorded already."""
    records_bytes: int = 0
    """Of records that came since that request and whose last offset is not known."""
    out_of_range: bool = False


@dataclass(slots=True, eq=False)
class QueryReader:
    """One connection of a query, as it reads partitions, all of them in one fetch session at most.

    What was delivered is known from the end of an answer, where that could be read, and otherwise
    from the next position: a client that asked from A, got records and then asks from X was given
    all between. One that got none has only moved.
    """

    _query: FollowedQuery
    _node_id: int | None = None
    """The broker's; None when not known."""
    _cursors: dict[str, dict[int, ReadCursor]] = field(default_factory=dict)
    fetched_logs: FetchedLogOffsets = field(default_factory=FetchedLogOffsets)
    size: int = 0
    """How many partitions are known."""

    def fetch_asked(
        self,
        topic: str,
        topic_id: bytes | None,
        positions: Iterable[tuple[int, int]],
        now_ms: float,
    ) -> None:
        """Record a topic's partitions and offsets in a request; no `topic_id` before version 13."""
        cursors = self._cursors.get(topic, NOTHING)
        for partition, offset in positions:
            cursor = cursors.get(partition)
            if cursor is None or cursor.progress.is_dropped or cursor.topic_id != topic_id:
                self._begin(topic, partition, topic_id, offset, now_ms)
                cursors = self._cursors.get(topic, NOTHING)
                continue
            progress = cursor.progress
            progress.read_ms = now_ms
            if offset != cursor.delivered_to:
                if offset < 0:
                    continue
                if cursor.out_of_range:
                    _pass_over(cursor, offset, now_ms)
                elif cursor.records_bytes and topic_id in (None, progress.log.topic_id):
                    log_end = progress.log.high_watermark
                    if log_end is not None:
                        log_end = _log_end(log_end, cursor.records_bytes, offset)
                        progress.record_high_watermark(log_end, now_ms)
                    progress.deliver(cursor.delivered_to, offset, now_ms)
                    progress.open_ended = None
                progress.record_fetch_offset(offset, now_ms)
            cursor.fetch_offset = cursor.delivered_to = offset
            cursor.records_bytes = 0

    def fetch_answered(
        self,
        topic: str,
        topic_id: bytes | None,
        asked: Mapping[int, int],
        answers: Iterable[FetchedPartition],
        now_ms: float,
    ) -> None:
        """Record a topic's partitions in a response; `asked`: from where, by its own request.

        Of those that the request did not name the session has the offset of an earlier one.
        """
        cursors, node_id = self._cursors.get(topic, NOTHING), self._node_id
        for partition, error_code, high_watermark, _, log_start, records_bytes, end in answers:
            cursor = cursors.get(partition)
            if cursor is None or cursor.progress.is_dropped or cursor.topic_id != topic_id:
                cursor = self._begin(topic, partition, topic_id, asked.get(partition), now_ms)
                cursors = self._cursors.get(topic, NOTHING)
                if cursor is None:
                    continue
            progress = cursor.progress
            asked_offset = asked.get(partition, cursor.fetch_offset)
            if error_code:
                if error_code == OFFSET_OUT_OF_RANGE and asked_offset >= 0:
                    cursor.out_of_range = asked_offset == cursor.fetch_offset
                    progress.out_of_range_at = asked_offset
                continue
            if (
                topic_id is not None
                and topic_id != progress.log.topic_id
                and not progress.accepts_topic_id(topic_id, now_ms)
            ):
                continue
            if asked_offset >= 0 and (
                progress.out_of_range_at is not None or progress.fetched_from is None
            ):
                _go_on(cursor, asked_offset, log_start, now_ms)
            if node_id is not None:
                progress.leader = node_id
            progress.record_high_watermark(_log_end(high_watermark, records_bytes, end), now_ms)
            if records_bytes > 0 and asked_offset >= 0:
                if asked_offset != cursor.fetch_offset:  # the client has gone on meanwhile
                    if end is not None:
                        progress.deliver(asked_offset, end, now_ms)
                elif end is None:
                    cursor.records_bytes = records_bytes
                    progress.open_ended = (cursor.delivered_to, high_watermark)
                elif end > cursor.delivered_to:
                    progress.deliver(cursor.delivered_to, end, now_ms)
                    cursor.delivered_to = end
            log = progress.log
            if log_start != log.log_start_offset:
                log.record_start(log_start)

    def asked_last(self, topic: str, partition: int, offset: int) -> None:
        """Record the latest offset of a run of requests that was recorded by its first."""
        cursor = self._cursors.get(topic, NOTHING).get(partition)
        if cursor is not None:
            cursor.fetch_offset = offset

    def _begin(
        self, topic: str, partition: int, topic_id: bytes | None, offset: int | None, now_ms: float
    ) -> ReadCursor | None:
        """Return the cursor of a partition that this connection did not read before.

        Or of one that the query has let go of meanwhile, and that its session still has.
        """
        former = self._cursors.get(topic, NOTHING).get(partition)
        if offset is None and former is not None and former.topic_id == topic_id:
            offset = former.fetch_offset
        progress = self._query.open(topic, partition, now_ms)
        if progress is None:
            self.size -= self._cursors.get(topic, {}).pop(partition, None) is not None
            return None
        if offset is None or offset < 0:
            # Following began amid a session: the position comes with the next request.
            return ReadCursor(progress, topic_id, -1, -1)
        progress.read_ms = now_ms
        progress.record_fetch_offset(offset, now_ms)
        if self.size >= MAX_CURSORS:
            self._cursors = {
                topic: kept
                for topic, cursors in self._cursors.items()
                if (kept := {key: at for key, at in cursors.items() if not at.progress.is_dropped})
            }
            self.size = sum(map(len, self._cursors.values()))
        cursors = self._cursors.setdefault(topic, {})
        self.size += partition not in cursors
        cursor = cursors[partition] = ReadCursor(progress, topic_id, offset, offset)
        return cursor


def _log_end(high_watermark: int, records_bytes: int, end: int | None) -> int:
    """Return where a log ends: a broker may look that up a moment before it reads the records."""
    return end if end is not None and 0 < end - high_watermark < records_bytes else high_watermark


def _pass_over(cursor: ReadCursor, offset: int, now_ms: float) -> None:
    """Record that a reader goes on at `offset`, after its position was out of range."""
    progress, lost_from = cursor.progress, cursor.fetch_offset
    cursor.out_of_range = False
    if progress.out_of_range_at is None:
        return  # another reader has gone on, and was given more since
    log_start = progress.log.log_start_offset
    there_from = offset if log_start is None or log_start <= lost_from else min(offset, log_start)
    progress.pass_over(lost_from, there_from, SkipReason.OUT_OF_RANGE, now_ms)
    if progress.out_of_range_at == lost_from:
        progress.out_of_range_at = None


def _go_on(cursor: ReadCursor, asked_offset: int, log_start: int, now_ms: float) -> None:
    """Record a position that was answered after one out of range, or first in a run or log."""
    progress = cursor.progress
    lost_from = progress.out_of_range_at
    if lost_from is not None and asked_offset >= lost_from:
        progress.out_of_range_at = None
        if asked_offset == lost_from:  # it is there after all
            cursor.out_of_range = False
        else:
            there_from = asked_offset if log_start < 0 else min(asked_offset, log_start)
            progress.pass_over(lost_from, there_from, SkipReason.OUT_OF_RANGE, now_ms)
    if progress.fetched_from is None:
        progress.record_fetch_offset(asked_offset, now_ms)


@dataclass(slots=True, eq=False)
class FetchExchange(FetchObserver):
    """A Fetch request and its response, as its reader gets them: by the names of topics.

    The reader gets them in the order in which they are shown here. Requests may be pipelined, and
    further ones may be read while a response passes. Times are monotonic.
    """

    reader: QueryReader
    names: TopicNames
    ask: FetchRequestContent
    answered_ms: float = 0.0
    """When the response began."""
    _offsets: dict[TopicKey, dict[int, int]] = field(default_factory=dict)
    """The offsets that the request names, by topic and partition."""

    def offsets(self) -> Mapping[TopicKey, Mapping[int, int]]:
        """Return the offsets that the request names, by topic and partition."""
        if not self._offsets:
            for topic, index, offset in self.ask.positions:
                self._offsets.setdefault(topic, {})[index] = offset
        return self._offsets

    def asked(self, now_ms: float) -> None:
        """Record the request, which was sent on to the broker."""
        asked, names = self.reader.fetch_asked, self.names
        for topic, offsets in self.offsets().items():
            if isinstance(topic, str):
                asked(topic, None, offsets.items(), now_ms)
            elif (name := names.known.get(topic)) is not None:
                asked(name, topic, offsets.items(), now_ms)
            else:
                for each in offsets.items():  # one by one: TopicNames bounds how many wait
                    names.when_known(topic, asked, topic, (each,), now_ms)

    def partitions(self, topic: TopicKey, fetched: Sequence[FetchedPartition]) -> None:
        """See FetchObserver."""
        reader, names = self.reader, self.names
        offsets = self._offsets.get(topic, NOTHING)
        topic_id = None if isinstance(topic, str) else topic
        if (name := names.name_of(topic)) is not None:
            reader.fetch_answered(name, topic_id, offsets, fetched, self.answered_ms)
        elif topic_id is not None:
            for each in fetched:  # one by one: TopicNames bounds how many wait
                index = each[0]
                asked = {index: offsets[index]} if index in offsets else NOTHING
                rest = topic_id, asked, (each,), self.answered_ms
                names.when_known(topic_id, reader.fetch_answered, *rest)

    def ended(self) -> None:
        """See FetchObserver. A client does not name again from where it asked last."""
        for topic, index, offset in self.ask.latest:
            self.names.when_known(topic, self.reader.asked_last, index, offset)
