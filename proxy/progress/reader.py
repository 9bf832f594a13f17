"""Turns what one connection asks for and is answered into what the query was given.

On the path of each Fetch: for each partition a dictionary look-up and a few comparisons while a
reader reads on. All partitions of a topic come at once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from proxy.wire.fetch import FetchedPartition

from .offset_ranges import SkipReason
from .partition import PartitionProgress
from .query import QueryProgress

OFFSET_OUT_OF_RANGE = 1

MAX_CURSORS = 20_000
"""Of one connection, before those are dropped that the query let go of: twice a query's bound."""

_NO_CURSORS: Mapping[int, "ReadCursor"] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class ReadCursor:
    """Where one connection is in one partition."""

    progress: PartitionProgress
    topic_id: bytes | None
    fetch_offset: int
    """Of the last request."""
    delivered_to: int
    """What was delivered from `fetch_offset` to here is recorded already."""
    has_records: bool = False
    """Whether records came since that request whose last offset is not known."""
    out_of_range: bool = False


class Reader:
    """One connection of a query, as it reads partitions.

    What was delivered is known from the end of an answer, where that could be read, and otherwise
    from the next position: a client that asked from A, got records and then asks from X was given
    all between. One that got none has only moved. `node_id` is the broker's; None when not
    known.
    """

    __slots__ = ("_cursors", "_node_id", "_query", "size")

    def __init__(self, query: QueryProgress, node_id: int | None = None) -> None:
        self._query = query
        self._node_id = node_id
        self._cursors: dict[str, dict[int, ReadCursor]] = {}
        self.size = 0
        """How many partitions are known."""

    def fetch_asked(
        self,
        topic: str,
        topic_id: bytes | None,
        positions: Iterable[tuple[int, int]],
        now_ms: float,
    ) -> None:
        """Record a topic's partitions and offsets in a request; no `topic_id` before version 13."""
        cursors = self._cursors.get(topic, _NO_CURSORS)
        for partition, offset in positions:
            cursor = cursors.get(partition)
            if cursor is None or cursor.progress.is_dropped or cursor.topic_id != topic_id:
                self._begin(topic, partition, topic_id, offset, now_ms)
                cursors = self._cursors.get(topic, _NO_CURSORS)
                continue
            progress = cursor.progress
            progress.read_ms = now_ms
            if offset != cursor.delivered_to:
                if offset < 0:
                    continue
                if cursor.out_of_range:
                    _pass_over(cursor, offset, now_ms)
                elif cursor.has_records and topic_id in (None, progress.log.topic_id):
                    progress.deliver(cursor.delivered_to, offset, now_ms)
                    progress.open_ended = None
                progress.record_fetch_offset(offset, now_ms)
            cursor.fetch_offset = cursor.delivered_to = offset
            cursor.has_records = False

    def fetch_answered(
        self,
        topic: str,
        topic_id: bytes | None,
        asked: Mapping[int, int | None],
        answers: Iterable[FetchedPartition],
        now_ms: float,
    ) -> None:
        """Record a topic's partitions in a response; `asked`: from where they were, as is known."""
        cursors, node_id = self._cursors.get(topic, _NO_CURSORS), self._node_id
        for partition, error_code, high_watermark, _, log_start, records_bytes, end in answers:
            cursor, asked_offset = cursors.get(partition), asked.get(partition)
            if cursor is None or cursor.progress.is_dropped or cursor.topic_id != topic_id:
                cursor = self._begin(topic, partition, topic_id, asked_offset, now_ms)
                cursors = self._cursors.get(topic, _NO_CURSORS)
                if cursor is None:
                    continue
            progress = cursor.progress
            if error_code:
                if error_code == OFFSET_OUT_OF_RANGE and asked_offset is not None:
                    cursor.out_of_range = asked_offset == cursor.fetch_offset
                    progress.out_of_range_at = asked_offset
                continue
            log = progress.log
            if (
                topic_id is not None
                and topic_id != log.topic_id
                and not progress.accepts_topic_id(topic_id, now_ms)
            ):
                continue
            if asked_offset is not None and (
                progress.out_of_range_at is not None or progress.fetched_from is None
            ):
                _go_on(cursor, asked_offset, log_start, now_ms)
            if node_id is not None:
                progress.leader = node_id
            progress.record_high_watermark(high_watermark, now_ms)
            if records_bytes > 0 and asked_offset is not None and asked_offset >= 0:
                if asked_offset != cursor.fetch_offset:  # the client has gone on meanwhile
                    if end is not None:
                        progress.deliver(asked_offset, end, now_ms)
                elif end is None:
                    cursor.has_records = True
                    progress.open_ended = (cursor.delivered_to, high_watermark)
                elif end > cursor.delivered_to:
                    progress.deliver(cursor.delivered_to, end, now_ms)
                    cursor.delivered_to = end
            if log_start != log.log_start_offset:
                log.record_start(log_start)

    def _begin(
        self, topic: str, partition: int, topic_id: bytes | None, offset: int | None, now_ms: float
    ) -> ReadCursor | None:
        """Return the cursor of a partition that this connection did not read before."""
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
