"""What one query has been given of one partition, what it has completed, and how far behind it is.

    skipped or completed  |  delivered, not completed: pending or failed  |  not delivered
                    committed_to                                       position

What lies above `committed_to` is kept as ranges, in sets with a bound. Times are monotonic
milliseconds.
"""

from dataclasses import dataclass, field
from typing import Final

from metrics.clock import MS_PER_SECOND
from proxy.cluster.kafka_client import format_partitions
from proxy.wire.topic_partition import TopicPartition

from .events import ChangeLog, ProgressEventKind
from .log_offsets import MAX_FORMER_IDS, LogOffsets
from .offset_ranges import MAX_RANGES, OffsetRange, OffsetRanges, SkippedRanges, SkipReason
from .report import THIS_PROXY, BatchRange, RefusalReason, ReportRefused


@dataclass(slots=True, eq=False)
class PartitionProgress:
    """One partition as one query reads it; see `log` for what is believed of the log's ends."""

    topic: Final[str]
    partition: Final[int]
    _changes: ChangeLog
    key: TopicPartition = field(init=False)
    log: LogOffsets = field(default_factory=LogOffsets)
    leader: int | None = None
    """The broker that answered the last Fetch."""
    run_id: str | None = None
    """The run whose report completed something here last."""
    read_ms: float | None = None
    """When it was last asked for."""
    is_dropped: bool = False
    """Whether the query has let go of it; a new one may have its place."""
    skipped: SkippedRanges = field(default_factory=SkippedRanges)
    refetched_records: int = 0
    """How many records were delivered that had been delivered before."""
    refetched: OffsetRange | None = None
    """The latest range of them."""
    stuck: bool = False
    """Whether the alarm is on."""
    stuck_since_ms: float | None = None
    """Since when there is lag and nothing moves; None without lag."""
    group_offset: int | None = None
    """What the commit group has, as far as is known."""
    may_go_back: bool = False
    """Whether the group may be moved back: the query was reset, or the topic made anew."""
    committed_at_s: float | None = None
    """When `committed_to` was reported, in seconds of the Unix epoch."""
    delivered: OffsetRanges = field(default_factory=OffsetRanges)
    failed: OffsetRanges = field(default_factory=OffsetRanges)
    """The part of `delivered` that will be delivered again."""
    committed_to: int | None = None
    """All below was completed; None before the first report."""
    fetched_from: int | None = None
    """The lowest offset that was asked for in this run."""
    fetched_from_ms: float = 0.0
    seen_from: int | None = None
    """The lowest that any run asked for here: what lies below may have gone to others."""
    open_ended: OffsetRange | None = None
    """What of the log an answer may have had whose end is not known."""
    out_of_range_at: int | None = None
    """The position that was out of range, until the query goes on somewhere."""
    client_saw_end: bool = False
    """Whether a client looked the log end up in this run."""
    started_over: bool = False
    """Whether the log is another one since the last report."""

    def __post_init__(self) -> None:
        """Have the key at hand."""
        self.key = (self.topic, self.partition)

    def _forget_ranges(self) -> None:
        for ranges in (self.delivered, self.failed, self.skipped.known):
            ranges.clear()

    @property
    def position(self) -> int | None:
        """All below was delivered, or skipped; None before anything is known.

        What was delivered beyond a hole, as when several executors read, is in `pending` only.
        """
        delivered, skipped, at = self.delivered, self.skipped.known, self.committed_to
        if at is not None:
            at = delivered.end_at(at) or at
        elif delivered.starts:
            at = delivered.ends[0]
        else:
            return self.fetched_from
        while skipped.starts and (end := skipped.end_at(at)) is not None:
            at = delivered.end_at(end) or end
        return at

    @property
    def lag_from(self) -> int | None:
        """What lag is measured from: `committed_to`, or `position` before the first report."""
        return self.committed_to if self.committed_to is not None else self.position

    @property
    def due_to_commit(self) -> int | None:
        """The offset that the group is to have; None: it has that, or more and may not go back."""
        done, committed = self.committed_to, self.group_offset
        if done is None or committed is None or done > committed:
            return done
        return done if done < committed and self.may_go_back else None

    @property
    def pending(self) -> list[OffsetRange]:
        """What is in flight: delivered, not completed, and not known to be delivered again."""
        return [gap for start, end in self.delivered for gap in self.failed.missing(start, end)]

    def lag_records(self) -> int | None:
        """Return how many records lie between `lag_from` and the log end; None when unknown."""
        end, at = self.log.high_watermark, self.committed_to
        if at is None:
            at = self.position
        if end is None or at is None:
            return None
        return end - at if end > at else 0

    def lag_ms(self, now_ms: float) -> float | None:
        """Return how long `lag_from`'s record was seen in the log; 0: no lag, None: not known."""
        lag_from, lag = self.lag_from, self.lag_records()
        if not lag or lag_from is None:
            return lag
        passed_ms = self.log.ends.passed_ms(lag_from)
        return None if passed_ms is None else max(now_ms - passed_ms, 0.0)

    # What passes

    def record_fetch_offset(self, offset: int, now_ms: float) -> None:
        """Record an offset that a reader goes on from."""
        if self.fetched_from is None or offset < self.fetched_from:
            self.fetched_from, self.fetched_from_ms = offset, now_ms
            if self.seen_from is None or offset < self.seen_from:
                self.seen_from = offset

    def deliver(self, start: int, end: int, now_ms: float) -> None:
        """Record what a reader was given. What lies beyond the log end is left out."""
        log_end = self.log.high_watermark
        if log_end is not None and end > log_end:
            end = log_end
        if start >= end:
            return
        delivered, failed, done = self.delivered, self.failed, self.committed_to
        if (done is None or start >= done) and not failed.starts and delivered.extend(start, end):
            # The usual case: reading on.
            if done is not None:
                return
            if self.stuck or self.skipped.known.starts or len(delivered.starts) > 1:
                self._record_move(now_ms)
            else:  # `end` is the position
                self.stuck_since_ms = now_ms if log_end is not None and log_end > end else None
            return
        was_exact = not (delivered.filled_gaps or failed.filled_gaps)
        low = start if done is None or start >= done else min(done, end)
        again = (end - start) - delivered.add(low, end)
        if again:
            self.refetched_records += again
            self.refetched = (start, end)
        failed.remove(low, end)
        if was_exact and (delivered.filled_gaps or failed.filled_gaps):
            self._add_merged("delivered", now_ms)
        if done is None:
            self._record_move(now_ms)

    def record_high_watermark(self, end: int, now_ms: float) -> None:
        """Record a high watermark; a lower one than is known is left out."""
        log = self.log
        if log.record_end(end, now_ms) and (log.cut_at is not None or self.stuck_since_ms is None):
            if log.cut_at is not None and (self.committed_to is None or end >= self.committed_to):
                log.cut_at = None
            if self.stuck_since_ms is None and self.lag_records():
                self.stuck_since_ms = now_ms

    def record_lookup_end(self, end: int, now_ms: float, *, client_saw_it: bool) -> None:
        """Record a log end from a look-up, by a client of the query or not; see LogOffsets."""
        self.client_saw_end |= client_saw_it
        if self.committed_to is None or end >= self.committed_to:
            self.log.cut_at = None
            if not client_saw_it:  # a client's may be the last stable offset
                self.log.record_own_lookup(end, now_ms)
        elif self.log.is_cut(end, now_ms):
            self.start_over(f"its log ends at {end} now, below what was completed", now_ms)
        self.record_high_watermark(end, now_ms)

    def pass_over(self, start: int, end: int, reason: SkipReason, now_ms: float) -> None:
        """Skip what of a range nobody was given, as a reader went on behind it.

        What was given to somebody may be completed: its batch will tell.
        """
        start = max(start, self.committed_to or 0)
        for low, high in self._undelivered(start, end):
            self._skip_split(low, high, reason, now_ms)
        for low, high in self.delivered.within(start, end):
            self.failed.add(low, high)

    def skip(self, start: int, end: int, reason: SkipReason, now_ms: float) -> None:
        """Record a range that is skipped; what of it was recorded before does not count."""
        was_exact = not self.skipped.known.filled_gaps
        new = self.skipped.add(start, end, reason, now_ms)
        if new:
            records = sum(high - low for low, high in new)
            text = f"{records} records skipped, offsets {new[0][0]} to before {new[-1][1]}"
            self._add_event(ProgressEventKind.SKIPPED, f"{text}: {reason}", now_ms)
        if was_exact and self.skipped.known.filled_gaps:
            self._add_merged("skipped", now_ms)

    # Another log under the same name

    def accepts_topic_id(self, topic_id: bytes, now_ms: float) -> bool:
        """Return whether another topic id is no replaced one; start over when it is a new one."""
        log = self.log
        if topic_id in log.former_topic_ids:
            return False
        former, log.topic_id = log.topic_id, topic_id
        if former is None:
            self._changes.changed(self.key)
        else:
            log.former_topic_ids = [*log.former_topic_ids, former][-MAX_FORMER_IDS:]
            self.start_over("the topic was made anew, it has another id", now_ms)
        return True

    def start_over(self, why: str, now_ms: float) -> None:
        """Forget what was known of the log: it is another one. What was unread is skipped."""
        if self.committed_to is not None and self.log.high_watermark is not None:
            self.skip(self.committed_to, self.log.high_watermark, SkipReason.RECREATED, now_ms)
        self.end_alarm("it starts over", now_ms)
        self.committed_to = self.fetched_from = self.seen_from = None
        self.open_ended = self.out_of_range_at = None
        self.fetched_from_ms, self.client_saw_end = 0.0, False
        self.log = LogOffsets(self.log.topic_id, self.log.former_topic_ids)
        self._forget_ranges()
        self.started_over = self.may_go_back = True
        self._add_event(ProgressEventKind.RECREATED, f"starts over: {why}", now_ms)
        self._changes.changed(self.key)

    def may_be_another_log(self, offset: int) -> bool:
        """Return whether the log was seen to be another one, or to end below this offset."""
        cut_at = self.log.cut_at
        return self.started_over or (cut_at is not None and cut_at < offset)

    # Runs and batches

    def begin_run(self, began_ms: float | None, now_ms: float) -> None:
        """Record a new run, which began then; None: that is not known."""
        self.client_saw_end = False
        if began_ms is not None and self.fetched_from_ms < began_ms:
            self.fetched_from = None
        self.end_alarm("a new run began", now_ms)

    def fail_pending(self) -> None:
        """Record that what is in flight will be delivered again: the run has ended."""
        self.failed = self.delivered.copy()

    def complete(
        self, read: BatchRange, run_id: str, gap: SkipReason | None, now_ms: float, now_s: float
    ) -> None:
        """Record what a batch completed; `check_reported_range` has refused what cannot be.

        `gap`: why offsets between those completed and the batch are skipped, if there are any;
        None when batches whose reports were lost completed them. `now_s`: of the Unix epoch.
        """
        start, end = self._start_of(read, run_id), read.end
        if start > end and not self.started_over:
            self.start_over(f"the query went back with its log, from {start} to {end}", now_ms)
        done = self.committed_to
        if done is not None:
            if start < done:
                self._replay(start, end, done, now_ms)
            elif done < start and gap is not None:
                self._skip_split(done, start, gap, now_ms)
            elif done < start:
                text = f"offsets {done} to before {start} were completed by lost reports"
                self._add_event(ProgressEventKind.LOST_REPORTS, text, now_ms)
            self._skip_removed(max(start, done), read, now_ms)
        self.run_id = run_id
        self.started_over = False
        self.committed_to, self.committed_at_s = end, now_s
        # What was found lost stays known: the reader may yet pass over it.
        known_to = end if self.out_of_range_at is None else min(end, self.out_of_range_at)
        lasting = (self.delivered, end), (self.failed, end), (self.skipped.known, known_to)
        for ranges, offset in lasting:
            if ranges.starts:
                ranges.remove_below(offset)
        self.log.ends.forget_below(end)
        self._changes.changed(self.key)
        if done != end:
            self._record_move(now_ms)

    def _start_of(self, read: BatchRange, run_id: str) -> int:
        if read.start is not None:
            return read.start
        if self.committed_to is not None and self.run_id == run_id:
            return self.committed_to
        return read.end if self.fetched_from is None else min(self.fetched_from, read.end)

    def _skip_split(self, start: int, end: int, reason: SkipReason, now_ms: float) -> None:
        """Skip a range: what of it the broker has removed as such, the rest for `reason`."""
        removed = min(max(self.log.log_start_offset or 0, start), end)
        self.skip(start, removed, SkipReason.RETENTION, now_ms)
        self.skip(removed, end, reason, now_ms)

    def _replay(self, start: int, end: int, done: int, now_ms: float) -> None:
        again = min(end, done)
        if start < again:
            # Not counted here: it was, or will be, when it was delivered.
            self.refetched = (start, again)
            text = f"a new run read offsets {start} to before {again} again"
            self._add_event(ProgressEventKind.REPLAY, text, now_ms)
        if end < done:
            self._forget_ranges()
            self.may_go_back = True
            text = f"the query went back from {done} to {end}, to an older checkpoint"
            self._add_event(ProgressEventKind.RESET, text, now_ms)

    def _skip_removed(self, start: int, read: BatchRange, now_ms: float) -> None:
        """Skip what a batch from `start` on did not get, since the broker had removed it.

        Only what surely was not delivered: not where this process did not see everything. Of a
        loss that it has not seen a reader is told, and goes on behind it.
        """
        first, seen_from = self.log.log_start_offset, self.seen_from
        if first is None or seen_from is None or max(start, seen_from) >= min(read.end, first):
            return
        undelivered = self._undelivered(max(start, seen_from), min(read.end, first))
        if not undelivered:
            return
        lost = OffsetRanges(2 * MAX_RANGES + 2)
        for low, high in undelivered:
            lost.add(low, high)
        if self.open_ended is not None:
            lost.remove(*self.open_ended)
        if read.rowless is not None and sum(high - low for low, high in lost) > read.rowless:
            return  # rows came of it
        for low, high in lost:
            self.skip(low, high, SkipReason.RETENTION, now_ms)

    def _undelivered(self, start: int, end: int) -> list[OffsetRange]:
        """Return what of a range was not delivered, or has failed and was not delivered again."""
        return [*self.delivered.missing(start, end), *self.failed.within(start, end)]

    # The alarm

    def check_stuck(self, now_ms: float, stuck_after_ms: float) -> None:
        """Raise the alarm, once, when nothing has moved for so long although there is lag."""
        lag, since_ms = self.lag_records(), self.stuck_since_ms
        if not lag or since_ms is None:
            self._record_move(now_ms)
        elif not self.stuck and now_ms - since_ms >= stuck_after_ms:
            self.stuck = True
            waited_s = (now_ms - since_ms) / MS_PER_SECOND
            text = f"stands at {self.lag_from} for {waited_s:.0f} s, {lag} records behind"
            self._add_event(ProgressEventKind.STUCK, text, now_ms)

    def end_alarm(self, why: str, now_ms: float) -> None:
        """Clear the alarm, and begin anew to wait for it."""
        self.stuck_since_ms = None
        if self.stuck:
            self.stuck = False
            self._add_event(ProgressEventKind.UNSTUCK, why, now_ms)

    def _record_move(self, now_ms: float) -> None:
        lag = self.lag_records()
        if self.stuck:
            self.end_alarm(f"moves again, {lag} records behind", now_ms)
        self.stuck_since_ms = now_ms if lag else None

    def _add_merged(self, what: str, now_ms: float) -> None:
        text = f"too many {what} ranges: the nearest ones are kept as one"
        self._add_event(ProgressEventKind.MERGED, text, now_ms)

    def _add_event(self, kind: ProgressEventKind, text: str, now_ms: float) -> None:
        self._changes.add_event(kind, self.key, text, now_ms)


def check_reported_range(
    key: TopicPartition,
    read: BatchRange,
    partition: PartitionProgress | None,
    asked_end: int | None,
    run_id: str,
) -> None:
    """Raise ReportRefused when a batch cannot have completed this of a partition.

    An end offset is refused when it is beyond the highest log end that was seen here, and that is
    up to date: the cluster was just asked, for `asked_end`, or a client of the query looked the end
    up through this proxy in this run, from which the driver has its offsets then.
    """
    start, end = read.start, read.end
    seen = partition.log.high_watermark if partition is not None else None
    is_fresh = asked_end is not None or (partition is not None and partition.client_saw_end)
    log_end = seen if asked_end is None or (seen is not None and seen > asked_end) else asked_end
    if is_fresh and log_end is not None and end > log_end:
        text = f"{format_partitions((key,))} ends at {end}, beyond the log's end {log_end}"
        raise ReportRefused(RefusalReason.IMPOSSIBLE, text, THIS_PROXY)
    # Spark goes back with a log that is another one, if it is told not to fail on data loss.
    another = partition is not None and partition.may_be_another_log(
        end if start is None else start
    )
    if start is not None and end < start and not another:
        text = f"{format_partitions((key,))} ends at {end}, below its start {start}"
        raise ReportRefused(RefusalReason.IMPOSSIBLE, text, "report the batch's own offsets")
    done = partition.committed_to if partition is not None else None
    if partition is None or done is None or partition.run_id != run_id or another:
        return
    low = end if start is None else min(start, end)
    if low < done:
        again = start is not None and start < end <= done
        reason = RefusalReason.REPEATED if again else RefusalReason.OUT_OF_ORDER
        name = format_partitions((key,))
        text = f"{name} begins at {low}, but this run has completed all below {done}"
        raise ReportRefused(reason, text)
