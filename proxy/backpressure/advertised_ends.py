"""The end offsets that were advertised to the drivers of a query."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from proxy.progress.report import BatchRange
from proxy.wire.topic_partition import TopicPartition

PartitionOffsets = Mapping[TopicPartition, int]

MAX_PLANNED = 6
"""Ends of a partition kept with its log end then: Spark may report a batch several later."""

MAX_PARTITIONS = 10_000
"""Of one query; the ends of further ones are never clamped."""


@dataclass(slots=True)
class AdvertisedEnd:
    """One partition, as a driver knows it; a connection of None is one of an earlier process."""

    log_end: int
    """The real one when it was last looked up."""
    offset: int
    """What was advertised instead, or the same."""
    answered_ms: float
    answered_on: object | None
    """Of the last answer: when, and on which connection."""
    raised_ms: float
    raised_on: object | None
    """The same of the last that advertised more than the one before."""
    idle_offset: int = 0
    """All below had been read when the query was idle."""
    previous: int | None = None
    """What was advertised until it was raised last."""
    new: int = 0
    """By how much the log had grown at the last look-up since the one before."""
    planned: tuple[tuple[int, int], ...] = ()
    """The latest offsets that were advertised, each with the real end then."""


EndState = tuple[int, int, int]
"""What is kept of a partition in the state: offset, log end and idle offset."""


class AdvertisedEnds(dict[TopicPartition, AdvertisedEnd]):
    """All partitions of one query, over all connections of its drivers."""

    __slots__ = ("starts",)

    def __init__(self) -> None:
        super().__init__()
        self.starts: dict[TopicPartition, int] = {}
        """Starts of logs that the driver was given, before the first batch of its run."""

    def begin_run(self, event_ms: float, done: Mapping[TopicPartition, int | None] | None) -> None:
        """Forget what was advertised by the last event, unless it is beyond `done`; None: all."""
        for key, end in list(self.items()):
            is_pending = done is not None and end.offset > (done[key] or 0)
            if end.answered_ms <= event_ms and not is_pending:
                del self[key]
        if done is None:
            self.starts.clear()

    def record_idle(self, event_ms: float, unread: Collection[TopicPartition]) -> None:
        """Record that all that was advertised by then is done, but of partitions in `unread`."""
        for key, end in self.items():
            if end.answered_ms < event_ms and key not in unread:
                end.idle_offset = end.offset

    def record(
        self, key: TopicPartition, log_end: int, offset: int, connection: object, now_ms: float
    ) -> bool:
        """Record what is advertised; return whether it is another offset than before."""
        end = self.get(key)
        if end is None:
            if len(self) < MAX_PARTITIONS:
                self[key] = AdvertisedEnd(log_end, offset, now_ms, connection, now_ms, connection)
                self[key].planned = ((offset, log_end),)
            return True
        is_other = offset != end.offset
        if offset > end.offset:
            end.raised_ms, end.raised_on, end.previous = now_ms, connection, end.offset
            end.planned = (*end.planned[1 - MAX_PLANNED :], (offset, log_end))
        end.new = log_end - end.log_end
        end.log_end, end.offset, end.idle_offset = log_end, offset, min(end.idle_offset, offset)
        end.answered_ms, end.answered_on = now_ms, connection
        return is_other

    def new(self, log_ends: PartitionOffsets) -> int:
        """Return by how much all logs have grown from one look-up to the next, to these ends."""
        known = {key: end.new for key, end in self.items() if key not in log_ends}
        known |= {key: end - self[key].log_end for key, end in log_ends.items() if key in self}
        return sum(known.values())

    def record_start(self, key: TopicPartition, offset: int) -> bool:
        """Record the start of a log that the driver was given; return whether it is new."""
        is_new = self.starts.get(key) != offset
        if key in self.starts or len(self.starts) < MAX_PARTITIONS:
            self.starts[key] = offset
        return is_new

    def left(self, ranges: Mapping[TopicPartition, BatchRange]) -> int | None:
        """Return how many offsets were beyond a batch when it was planned; None: not known."""
        known = [
            log_end - offset
            for key, read in ranges.items()
            if key in self
            for offset, log_end in self[key].planned
            if offset == read.end
        ]
        return sum(known) if known else None

    def state(self) -> dict[TopicPartition, EndState]:
        """Return what `resume` needs, in a later process."""
        return {key: (end.offset, end.log_end, end.idle_offset) for key, end in self.items()}

    def resume(
        self, ends: Mapping[TopicPartition, EndState], starts: PartitionOffsets, now_ms: float
    ) -> None:
        """Add what an earlier process advertised: some time before now."""
        for key, (offset, log_end, idle_offset) in ends.items():
            if len(self) < MAX_PARTITIONS:
                known = log_end, offset, now_ms, None, -math.inf, None, idle_offset
                self[key] = AdvertisedEnd(*known)
        for key, start in starts.items():
            self.record_start(key, start)
