"""Turns what one connection asks for and is answered into what the query was given.

On the path of each Fetch: a dictionary look-up and a few comparisons while a reader reads on.
"""

from collections.abc import Callable

from proxy.wire.fetch import FetchedPartition

from .events import SkipReason
from .partition import PartitionProgress

OFFSET_OUT_OF_RANGE = 1
"""Kafka's error code for a position that is not in the log."""

MAX_FLOWS = 20_000
"""So many partitions of one connection are kept before those are dropped that the query let go of.
Twice as many as a query may have at a time."""

OpenPartition = Callable[[str, int, float], PartitionProgress | None]
"""Returns what is kept of a topic's partition, at this time; None when there are too many."""


class _Flow:
    """One partition as one connection reads it."""

    __slots__ = ("asked", "given_to", "has_bytes", "lost", "partition", "topic_id")

    def __init__(self, partition: PartitionProgress, topic_id: bytes | None, offset: int) -> None:
        self.partition = partition
        self.topic_id = topic_id
        self.asked = offset
        self.given_to = offset
        """What was given from `asked` to here is noted already."""
        self.has_bytes = False
        """Whether records came since it was asked whose last offset is not known."""
        self.lost = False
        """Whether `asked` was out of range."""


class Reader:
    """A FetchFollower for one connection of a query.

    What was delivered is known from the end of an answer, where that could be read, and otherwise
    from the next position: a client that asked from A, got records and then asks from X was given
    all between. One that got none has only moved.

    Args:
        open_partition: gives the partition to tell.
        node_id: the broker at the other end; None when not known.

    """

    __slots__ = ("_flows", "_node_id", "_open")

    def __init__(self, open_partition: OpenPartition, node_id: int | None = None) -> None:
        self._open = open_partition
        self._node_id = node_id
        self._flows: dict[tuple[str, int], _Flow] = {}

    def fetch_asked(
        self, topic: str, partition: int, topic_id: bytes | None, offset: int, now_ms: float
    ) -> None:
        """Take note of a position in a Fetch request."""
        flow = self._flows.get((topic, partition))
        if flow is None or flow.partition.is_dropped or flow.topic_id != topic_id:
            self._begin(topic, partition, topic_id, offset, now_ms)
            return
        flow.partition.read_ms = now_ms
        if offset != flow.given_to:
            if offset < 0:
                return
            self._move(flow, offset, now_ms)
        flow.asked = flow.given_to = offset
        flow.has_bytes = False

    def fetch_answered(
        self,
        topic: str,
        partition: int,
        topic_id: bytes | None,
        asked_offset: int | None,
        answer: FetchedPartition,
        now_ms: float,
    ) -> None:
        """Take note of a partition in a Fetch response, and of the offset that was asked for."""
        flow = self._flows.get((topic, partition))
        if flow is None or flow.partition.is_dropped or flow.topic_id != topic_id:
            flow = self._begin(topic, partition, topic_id, asked_offset, now_ms)
            if flow is None:
                return
        kept = flow.partition
        if answer.error_code:
            if answer.error_code == OFFSET_OUT_OF_RANGE and asked_offset is not None:
                flow.lost = asked_offset == flow.asked
                kept.out_of_range_at = asked_offset
            return
        if topic_id is not None and not kept.accepts_topic_id(topic_id, now_ms):
            return
        if asked_offset is not None:
            if kept.out_of_range_at is not None:
                self._find_lost(flow, asked_offset, answer.log_start_offset, now_ms)
            if kept.fetched_from is None:  # a new run began, or the topic was made anew, meanwhile
                kept.asked(asked_offset, now_ms)
        if self._node_id is not None:
            kept.leader = self._node_id
        kept.record_high_watermark(answer.high_watermark, now_ms)
        if answer.records_bytes > 0 and asked_offset is not None and asked_offset >= 0:
            self._given(flow, asked_offset, answer.end_offset, now_ms)
        # Only after what was delivered: the rest below it is lost.
        kept.record_log_start(answer.log_start_offset, now_ms)

    def _begin(
        self,
        topic: str,
        partition: int,
        topic_id: bytes | None,
        offset: int | None,
        now_ms: float,
    ) -> _Flow | None:
        """Follow a partition that this connection did not read before."""
        key = (topic, partition)
        kept = self._open(topic, partition, now_ms)
        if kept is None:
            self._flows.pop(key, None)
            return None
        if offset is None or offset < 0:
            # Following began amid a session: the position comes with the next request.
            return _Flow(kept, topic_id, -1)
        kept.read_ms = now_ms
        kept.asked(offset, now_ms)
        if len(self._flows) >= MAX_FLOWS:
            self._flows = {
                each: flow for each, flow in self._flows.items() if not flow.partition.is_dropped
            }
        flow = self._flows[key] = _Flow(kept, topic_id, offset)
        return flow

    def _move(self, flow: _Flow, offset: int, now_ms: float) -> None:
        kept = flow.partition
        if flow.lost:
            kept.skip(flow.asked, offset, SkipReason.OUT_OF_RANGE, now_ms)
            flow.lost = False
            kept.out_of_range_at = None
        elif flow.has_bytes and flow.topic_id in (None, kept.topic_id):
            kept.deliver(flow.given_to, offset, now_ms)
        kept.asked(offset, now_ms)

    def _find_lost(self, flow: _Flow, asked: int, log_start: int, now_ms: float) -> None:
        """Learn from an answer what became of a position that was out of range.

        The reader that was told so may have a successor on another connection.
        """
        kept = flow.partition
        out_of_range_at = kept.out_of_range_at
        if out_of_range_at is None or asked < out_of_range_at:
            return
        kept.out_of_range_at = None
        if asked == out_of_range_at:  # it is there after all
            flow.lost = False
            return
        there_from = asked if log_start < 0 else min(asked, log_start)
        kept.skip(out_of_range_at, there_from, SkipReason.OUT_OF_RANGE, now_ms)

    def _given(self, flow: _Flow, asked: int, end: int | None, now_ms: float) -> None:
        if asked != flow.asked:  # the client has gone on meanwhile
            if end is not None:
                flow.partition.deliver(asked, end, now_ms)
        elif end is None:
            flow.has_bytes = True
        elif end > flow.given_to:
            flow.partition.deliver(flow.given_to, end, now_ms)
            flow.given_to = end
