"""What the driver of a query has completed, by its reports and by what was advertised to it.

Structured Streaming works on one batch at a time: a driver that looks up the end of a log again has
done all that it planned before.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from proxy.progress.query import QueryProgress
from proxy.wire.topic_partition import TopicPartition

from .advertised_ends import AdvertisedEnds

RETRIES_MS = 2000.0
"""After its first answer, when a driver that knows later ends looks up for the third time: Spark's
fetchOffset.retryIntervalMs, twice."""

EVENT_JITTER_MS = 50.0
"""By how much a driver's event may seem later than it was: its report was under way so long."""


@dataclass(frozen=True)
class DriverProgress:
    """What can be known at one moment. A connection is whatever stands for it in `advertised`."""

    query: QueryProgress
    advertised: AdvertisedEnds
    event_ms: float
    """When the driver made its latest report of this run; long ago if there is none."""
    waited_ms: float
    """After that the run was seen between two batches, all before being reported; or long ago."""
    answered_ms: float
    """When the present run got its first answer; far ahead if it has none."""
    is_resumed: bool
    """Whether its run was resumed from an earlier process, with all that was advertised there."""

    @property
    def is_unproved(self) -> bool:
        """Whether no batch of the run has proved where it is."""
        return self.query.run_batches == 0 and not self.is_resumed

    def base(self, key: TopicPartition) -> int | None:
        """Return the offset from which the next batch takes its part; None when not known.

        What is completed; before the first report also the log start that the driver was given.
        """
        base = self.completed(key)
        if base is None and self.query.run_batches == 0:
            base = self.advertised.starts.get(key)
        if base is None:
            return None
        end = self.advertised.get(key)
        partition = self.query.partitions.get(key)
        log_start = partition.log.log_start_offset if partition is not None else None
        return max(base, end.idle_offset if end else 0, log_start or 0)

    def completed(self, key: TopicPartition) -> int | None:
        """Return what this run has completed; before its first report the same query's before."""
        query, partition = self.query, self.query.partitions.get(key)
        is_same_query = query.run_batches == 0 and query.progress_id == query.query_id
        if partition is not None and (partition.run_id == query.run_id or is_same_query):
            return partition.committed_to
        return None

    def planned(self, key: TopicPartition) -> int:
        """Return how many offsets were advertised that are not known to be completed."""
        end = self.advertised.get(key)
        return max(0, end.offset - (self.base(key) or 0)) if end is not None else 0

    def is_unread(self, key: TopicPartition) -> bool:
        """Return whether nothing was read of the query since more was advertised of this.

        Then no batch was planned up to there, or one whose records were all read ahead.
        """
        end, partition = self.advertised.get(key), self.query.partitions.get(key)
        if end is None or not self.planned(key) or self._last_read_ms >= end.raised_ms:
            return False
        position = partition.position if partition is not None else None
        return position is None or position < end.offset

    def is_refused(self, key: TopicPartition, connection: object) -> bool:
        """Return whether the driver is known to have planned no batch of what it got here.

        That nothing was fetched does not show it: small records are read ahead of their batch.
        """
        end = self.advertised.get(key)
        if end is None or not (end.answered_on is end.raised_on is connection):
            return False
        return end.raised_ms < self.waited_ms and self.planned(key) > 0

    def is_unreported(self, key: TopicPartition, connection: object) -> bool:
        """Return whether a batch up to what was advertised last here is not reported yet.

        Spark may tell the listener late, of the batch before: one that ended at the `previous`.
        """
        end = self.advertised.get(key)
        if end is None or end.raised_on is not connection:
            return False
        base = self.base(key) or 0
        is_newer = end.raised_ms > self.event_ms - EVENT_JITTER_MS
        return base < end.offset and (is_newer or base == end.previous)

    def done_by_now(
        self, key: TopicPartition, connection: object, *, is_overdue: bool
    ) -> int | None:
        """Return what a driver that looks up again here has completed, reported or not.

        Its batch is done, or it knew before what was advertised. None when that is not known.
        `is_overdue`: an answer waited in vain for a report, and none came since.
        """
        end = self.advertised.get(key)
        if end is None or end.answered_on is not connection:
            return None
        if end.raised_on is connection:
            is_done = is_overdue and self.is_unreported(key, connection)
        else:
            is_done = self.is_unproved or (is_overdue and self.planned(key) > 0)
        return end.offset if is_done else None

    def knows_more(self, keys: Iterable[TopicPartition], connection: object, now_ms: float) -> bool:
        """Return whether a driver that looks up again may know later ends than it was given here.

        An earlier run may have read past this proxy. Spark looks up again and again when it gets
        less than it knows, and fails the query if that does not help. A run that has read or waited
        since its first answer has got beyond that; its later batches may have been read ahead.
        """
        is_stuck = max(self._last_read_ms, self.waited_ms) < self.answered_ms
        is_third = now_ms >= self.answered_ms + RETRIES_MS
        return (self.is_unproved and is_stuck and is_third) and any(
            end.raised_on is connection
            and end.offset < end.log_end
            and self._last_read_ms < end.raised_ms
            for key in keys
            if (end := self.advertised.get(key)) is not None
        )

    @property
    def has_planned_nothing(self) -> bool:
        """Whether the run has no batch yet, for certain: then it knows no end of any log.

        One that reads without a report may be in a batch planned before: its end is not known.
        """
        began_ms = self.query.run_began_ms
        return self.is_unproved and began_ms is not None and self._last_read_ms < began_ms

    @cached_property
    def _last_read_ms(self) -> float:
        """When the query read last; costs a walk over all partitions."""
        read_ms = self.query.last_read_ms
        return -math.inf if read_ms is None else read_ms
