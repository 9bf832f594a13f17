"""Turns what one connection asks for and is answered into what the query was given.

On the path of each Fetch: a dictionary look-up and a few comparisons while a reader reads on.
"""

from collections.abc import Callable
from dataclasses import dataclass

from proxy.wire.fetch import FetchedPartition
from proxy.wire.topic_partition import TopicPartition

from .partition import PartitionProgress
from .skipped_ranges import SkipReason

OFFSET_OUT_OF_RANGE = 1

MAX_CURSORS = 20_000
"""Of one connection, before those are dropped that the query let go of: twice a query's bound."""

OpenPartition = Callable[[str, int, float], PartitionProgress | None]
"""Returns what is kept of a topic's partition, at this time; None when there are too many."""


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
    all between. One that got none has only moved. `node_id` is the broker's; None when not known.
    """

    __slots__ = ("_node_id", "_open", "cursors")

    def __init__(self, open_partition: OpenPartition, node_id: int | None = None) -> None:
        self._open = open_partition
        self._node_id = node_id
        self.cursors: dict[TopicPartition, ReadCursor] = {}

    def fetch_asked(
        self, topic: str, partition: int, topic_id: bytes | None, offset: int, now_ms: float
    ) -> None:
        """Record a position in a Fetch request; `topic_id` is None before version 13."""
        cursor = self.cursors.get((topic, partition))
        if cursor is None or cursor.progress.is_dropped or cursor.topic_id != topic_id:
            self._begin(topic, partition, topic_id, offset, now_ms)
            return
        progress = cursor.progress
        progress.read_ms = now_ms
        if offset != cursor.delivered_to:
            if offset < 0:
                return
            if cursor.out_of_range:
                progress.skip(cursor.fetch_offset, offset, SkipReason.OUT_OF_RANGE, now_ms)
                cursor.out_of_range = False
                progress.out_of_range_at = None
            elif cursor.has_records and topic_id in (None, progress.log.topic_id):
                progress.deliver(cursor.delivered_to, offset, now_ms)
            progress.record_fetch_offset(offset, now_ms)
        cursor.fetch_offset = cursor.delivered_to = offset
        cursor.has_records = False

    def fetch_answered(
        self,
        topic: str,
        partition: int,
        topic_id: bytes | None,
        asked_offset: int | None,
        answer: FetchedPartition,
        now_ms: float,
    ) -> None:
        """Record a partition in a Fetch response; `asked_offset` is None when it is not known."""
        cursor = self.cursors.get((topic, partition))
        if cursor is None or cursor.progress.is_dropped or cursor.topic_id != topic_id:
            cursor = self._begin(topic, partition, topic_id, asked_offset, now_ms)
            if cursor is None:
                return
        progress = cursor.progress
        if answer.error_code:
            _record_error(cursor, asked_offset, answer.error_code)
            return
        log = progress.log
        if (
            topic_id is not None
            and topic_id != log.topic_id
            and not progress.accepts_topic_id(topic_id, now_ms)
        ):
            return
        if asked_offset is not None:
            if progress.out_of_range_at is not None:
                _end_out_of_range(cursor, asked_offset, answer.log_start_offset, now_ms)
            if progress.fetched_from is None:  # a new run, or a new topic, began meanwhile
                progress.record_fetch_offset(asked_offset, now_ms)
        if self._node_id is not None:
            progress.leader = self._node_id
        progress.record_high_watermark(answer.high_watermark, now_ms)
        if answer.records_bytes > 0 and asked_offset is not None and asked_offset >= 0:
            end = answer.end_offset
            if asked_offset != cursor.fetch_offset:  # the client has gone on meanwhile
                if end is not None:
                    progress.deliver(asked_offset, end, now_ms)
            elif end is None:
                cursor.has_records = True
            elif end > cursor.delivered_to:
                progress.deliver(cursor.delivered_to, end, now_ms)
                cursor.delivered_to = end
        # Only after what was delivered: the rest below it is lost.
        if answer.log_start_offset != log.log_start_offset:
            progress.record_log_start(answer.log_start_offset, now_ms)

    def _begin(
        self, topic: str, partition: int, topic_id: bytes | None, offset: int | None, now_ms: float
    ) -> ReadCursor | None:
        """Return the cursor of a partition that this connection did not read before."""
        key = (topic, partition)
        progress = self._open(topic, partition, now_ms)
        if progress is None:
            self.cursors.pop(key, None)
            return None
        if offset is None or offset < 0:
            # Following began amid a session: the position comes with the next request.
            return ReadCursor(progress, topic_id, -1, -1)
        progress.read_ms = now_ms
        progress.record_fetch_offset(offset, now_ms)
        if len(self.cursors) >= MAX_CURSORS:
            kept = {each: at for each, at in self.cursors.items() if not at.progress.is_dropped}
            self.cursors = kept
        cursor = self.cursors[key] = ReadCursor(progress, topic_id, offset, offset)
        return cursor


def _record_error(cursor: ReadCursor, asked_offset: int | None, error_code: int) -> None:
    if error_code == OFFSET_OUT_OF_RANGE and asked_offset is not None:
        cursor.out_of_range = asked_offset == cursor.fetch_offset
        cursor.progress.out_of_range_at = asked_offset


def _end_out_of_range(cursor: ReadCursor, asked_offset: int, log_start: int, now_ms: float) -> None:
    """Record what became of a position that was out of range, maybe on another connection."""
    progress = cursor.progress
    lost_from = progress.out_of_range_at
    if lost_from is None or asked_offset < lost_from:
        return
    progress.out_of_range_at = None
    if asked_offset == lost_from:  # it is there after all
        cursor.out_of_range = False
        return
    there_from = asked_offset if log_start < 0 else min(asked_offset, log_start)
    progress.skip(lost_from, there_from, SkipReason.OUT_OF_RANGE, now_ms)
