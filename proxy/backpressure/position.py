"""Where the driver of a query is: what it has completed, by its reports and by what it was told.

Structured Streaming works on one batch at a time: a driver that asks for the end of a log again has
done all that it planned before.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from proxy.progress.query import QueryProgress
from proxy.wire.topic_partition import TopicPartition

from .told import ToldEnds

EVENT_JITTER_MS = 50.0
"""By how much a driver's event may seem later than it was: its report was under way so long."""


@dataclass(frozen=True, slots=True)
class Position:
    """What can be known at one moment. A connection is whatever stands for it in `told`."""

    query: QueryProgress
    told: ToldEnds
    event_ms: float
    """When the driver made its latest report of this run; long ago if there is none."""
    goes_on: bool
    """Whether its run was taken up from an earlier process, with all that was told there."""
    _read_ms: list[float] = field(default_factory=list, init=False, repr=False, compare=False)
    """When the query read last, once it was asked for: it costs a walk over all partitions."""

    @property
    def is_unproved(self) -> bool:
        """Whether no batch of the run has proved where it is."""
        return self.query.run_batches == 0 and not self.goes_on

    def base(self, key: TopicPartition) -> int | None:
        """Return the offset from which the next batch takes its share; None when not known.

        It is what is completed; before the first report also the start of the log as the driver
        was told.
        """
        query = self.query
        base = self.completed(key)
        if base is None and query.run_batches == 0:
            base = self.told.starts.get(key)
        if base is None:
            return None
        told = self.told.get(key)
        partition = query.partitions.get(key)
        log_start = partition.log.log_start_offset if partition is not None else None
        return max(base, told.idle_at if told else 0, log_start or 0)

    def completed(self, key: TopicPartition) -> int | None:
        """Return what this run has completed; before its first report the same query's before."""
        query = self.query
        partition = query.partitions.get(key)
        if partition is not None and (
            partition.run_id == query.run_id
            or (query.run_batches == 0 and query.progress_id == query.query_id)
        ):
            return partition.committed_to
        return None

    def offered(self, key: TopicPartition) -> int:
        """Return how many offsets the driver was told of that are not known to be completed."""
        told = self.told.get(key)
        return max(0, told.offset - (self.base(key) or 0)) if told is not None else 0

    def is_unread(self, key: TopicPartition) -> bool:
        """Return whether nothing was read of the query since the driver was told more of this.

        Then no batch was planned up to there, or one whose records were all read ahead.
        """
        told = self.told.get(key)
        if told is None or not self.offered(key) or self._last_read_ms >= told.raised_ms:
            return False
        partition = self.query.partitions.get(key)
        reached = partition.position if partition is not None else None
        return reached is None or reached < told.offset

    def is_refused(self, key: TopicPartition, connection: object) -> bool:
        """Return whether a driver that asks again on a connection planned no batch of this."""
        told = self.told.get(key)
        return (
            told is not None
            and told.told_on is connection
            and told.raised_on is connection
            and self.is_unread(key)
        )

    def is_unreported(self, key: TopicPartition, connection: object) -> bool:
        """Return whether what was told last on a connection is in a batch not reported yet.

        Spark may tell the listener late, of the batch before: one that ended where that was told.
        """
        told = self.told.get(key)
        if told is None or told.raised_on is not connection:
            return False
        base = self.base(key) or 0
        is_newer = told.raised_ms > self.event_ms - EVENT_JITTER_MS
        return base < told.offset and (is_newer or base == told.before)

    def done_by_now(
        self, key: TopicPartition, connection: object, *, is_overdue: bool
    ) -> int | None:
        """Return what a driver that asks again on a connection has completed, reported or not.

        Its batch is done, or it knew before what it was told. None when that can't be said.
        `is_overdue`: an answer waited in vain for a report, and none came since.
        """
        told = self.told.get(key)
        if told is None or told.told_on is not connection:
            return None
        if told.raised_on is connection:
            is_done = is_overdue and self.is_unreported(key, connection)
        else:
            is_done = self.is_unproved or (is_overdue and self.offered(key) > 0)
        return told.offset if is_done else None

    def knows_more(self, keys: Iterable[TopicPartition], connection: object) -> bool:
        """Say whether a driver that asks again may know later ends than it was told here.

        An earlier run may have read past this proxy. Spark asks again when it is told less than it
        knows, and fails the query if that does not help.
        """
        if not self.is_unproved:
            return False
        read_ms = self._last_read_ms
        return any(
            told.raised_on is connection and told.offset < told.latest and read_ms < told.raised_ms
            for key in keys
            if (told := self.told.get(key)) is not None
        )

    @property
    def has_planned_nothing(self) -> bool:
        """Whether the run has no batch yet, for certain: then it knows no end of any log.

        A run that reads without a report may have taken up a batch from its checkpoint, or one that
        it planned when it was not bounded: its end is not known here.
        """
        began_ms = self.query.run_began_ms
        return self.is_unproved and began_ms is not None and self._last_read_ms < began_ms

    @property
    def _last_read_ms(self) -> float:
        if not self._read_ms:
            read_ms = self.query.last_read_ms
            self._read_ms.append(-math.inf if read_ms is None else read_ms)
        return self._read_ms[0]
