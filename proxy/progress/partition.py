"""What one query has been given of one partition, what it has completed, and how far behind it is.

    skipped or completed  |  delivered, not completed: pending or failed  |  not delivered
                    committed_to                                     position

What lies above `committed_to` is kept as ranges, in sets with a bound. Times are monotonic
milliseconds.
"""

from typing import Final

from .events import EventKind, PartitionSink, SkipReason
from .log_edges import LogEdges
from .offset_ranges import OffsetRange, OffsetRanges
from .report import BatchRange
from .skipped_ranges import SkippedRanges
from .stall import Stall


class PartitionProgress:
    """One partition as one query reads it; see `log` for what is believed of the log's ends."""

    __slots__ = (
        *("_sink", "client_saw_end", "committed_at_s", "committed_to", "delivered", "failed"),
        *("fetched_from", "fetched_from_ms", "group_offset", "is_dropped", "leader", "log"),
        *("may_go_back", "out_of_range_at", "partition", "read_ms", "refetched"),
        *("refetched_records", "run_id", "skips", "stall", "started_over", "topic"),
    )

    def __init__(self, topic: str, partition: int, sink: PartitionSink) -> None:
        self.topic: Final = topic
        self.partition: Final = partition
        self._sink = sink
        self.log = LogEdges()
        self.leader: int | None = None
        """The broker that answered the last Fetch."""
        self.run_id: str | None = None
        """The run whose report completed something here last."""
        self.read_ms: float | None = None
        """When it was last asked for."""
        self.is_dropped = False
        """Whether the query has let go of it; whoever holds it looks for the new one."""
        self.skips = SkippedRanges()
        self.refetched_records = 0
        """How many records were delivered that had been delivered before."""
        self.refetched: OffsetRange | None = None
        """The latest range of them."""
        self.stall = Stall()
        self.group_offset: int | None = None
        """What the commit group has, as far as is known."""
        self.may_go_back = False
        """Whether the group may be moved back: the query was reset, or the topic made anew."""
        self.committed_at_s: float | None = None
        """When `committed_to` was reported, in seconds of the Unix epoch."""
        self.delivered = OffsetRanges()
        """What was delivered, at or above `committed_to`."""
        self.failed = OffsetRanges()
        """The part of it that will be delivered again."""
        self._clear()

    def _clear(self) -> None:
        self.committed_to: int | None = None
        """All below was completed; None before the first report."""
        self.fetched_from: int | None = None
        """The lowest offset that was asked for in this run."""
        self.fetched_from_ms = 0.0
        self.out_of_range_at: int | None = None
        """The position that was out of range, until the query goes on somewhere."""
        self.client_saw_end = False
        """Whether a client was told the log end in this run."""
        self.started_over = False
        """Whether the log is another one since the last report."""
        self.log.forget()
        self.delivered.clear()
        self.failed.clear()
        self.skips.forget_known()

    @property
    def key(self) -> tuple[str, int]:
        """Topic and partition."""
        return self.topic, self.partition

    @property
    def high_watermark(self) -> int | None:
        """The log end as far as is known."""
        return self.log.high_watermark

    @property
    def log_start(self) -> int | None:
        """The offset of the first record that is still there, as far as is known."""
        return self.log.log_start

    @property
    def topic_id(self) -> bytes | None:
        """The 16 bytes that tell the topic from another one of its name; None when not known."""
        return self.log.topic_id

    @property
    def position(self) -> int | None:
        """All below was delivered, or skipped; None before anything is known.

        What was delivered beyond a hole, as when several executors read, is in `pending` only.
        """
        at = self.committed_to
        if at is None:
            at = self.delivered.first
            if at is None:
                return self.fetched_from
        while (end := self.delivered.end_at(at) or self.skips.end_at(at)) is not None:
            at = end
        return at

    @property
    def lag_from(self) -> int | None:
        """What lag is measured from: `committed_to`, or `position` before the first report."""
        return self.committed_to if self.committed_to is not None else self.position

    @property
    def pending(self) -> list[OffsetRange]:
        """What is in flight: delivered, not completed, and not known to be delivered again."""
        return self.delivered.without(self.failed)

    def lag_records(self) -> int | None:
        """Return how many records lie between the position and the log end; None if unknown."""
        end = self.log.high_watermark
        if end is None or (lag_from := self.lag_from) is None:
            return None
        return max(end - lag_from, 0)

    def lag_ms(self, now_ms: float) -> float | None:
        """Return for how long the record at the position has been in the log, 0 without lag.

        None when unknown. What was in the log when that was first seen counts from then.
        """
        lag_from, lag = self.lag_from, self.lag_records()
        if not lag or lag_from is None:
            return None if lag is None else 0.0
        passed_ms = self.log.ends.passed_ms(lag_from)
        return None if passed_ms is None else max(now_ms - passed_ms, 0.0)

    def asked(self, offset: int, now_ms: float) -> None:
        """Take note of an offset that a reader goes on from."""
        if self.fetched_from is None or offset < self.fetched_from:
            self.fetched_from, self.fetched_from_ms = offset, now_ms

    def deliver(self, start: int, end: int, now_ms: float) -> None:
        """Take note of what a reader was given. What lies beyond the log end is left out."""
        if self.log.high_watermark is not None:
            end = min(end, self.log.high_watermark)
        if start >= end:
            return
        low = start if self.committed_to is None else min(max(start, self.committed_to), end)
        was_exact = not (self.delivered.filled_gaps or self.failed.filled_gaps)
        again = (end - start) - self.delivered.add(low, end)
        if again:
            self.refetched_records += again
            self.refetched = (start, end)
        if self.failed:
            self.failed.remove(low, end)
        if was_exact and (self.delivered.filled_gaps or self.failed.filled_gaps):
            self._merged("delivered", now_ms)
        if self.committed_to is None:
            self._moved(now_ms)

    def record_high_watermark(self, end: int, now_ms: float) -> None:
        """Take note of a high watermark; a lower one than is known is left out."""
        if self.log.record_high_watermark(end, now_ms):
            if self.committed_to is None or end >= self.committed_to:
                self.log.is_whole()
            if self.stall.since_ms is None and self.lag_records():
                self.stall.since_ms = now_ms

    def record_lookup_end(self, end: int, now_ms: float, *, client_saw_it: bool) -> None:
        """Take note of a log end from a look-up; see LogEdges on one that is lower than before.

        `client_saw_it`: whether a client of the query was told it.
        """
        if end < 0:
            return
        self.client_saw_end |= client_saw_it
        if self.committed_to is not None and end < self.committed_to:
            if self.log.is_cut(end, now_ms):
                self.start_over(f"its log ends at {end} now, below what was completed", now_ms)
        else:
            self.log.is_whole()
        self.record_high_watermark(end, now_ms)

    def record_log_start(self, offset: int, now_ms: float) -> None:
        """Take note of the log start; what was unread below it is skipped."""
        if self.log.record_log_start(offset):
            self._check_retention(now_ms)

    def skip(self, start: int, end: int, reason: SkipReason, now_ms: float) -> None:
        """Take note of a range that is skipped; what of it was noted before does not count."""
        was_exact = not self.skips.filled_gaps
        new = self.skips.add(start, end, reason, now_ms)
        if new:
            records = sum(high - low for low, high in new)
            text = f"{records} records skipped, offsets {new[0][0]} to before {new[-1][1]}"
            self._sink.add_event(EventKind.SKIPPED, self, f"{text}: {reason}", now_ms)
        if was_exact and self.skips.filled_gaps:
            self._merged("skipped", now_ms)

    def accepts_topic_id(self, topic_id: bytes, now_ms: float) -> bool:
        """Say whether an answer under this topic id is about this partition as it is now.

        An id that is new means that the topic was made anew: the partition starts over. One that
        was replaced is not heard any more.
        """
        if topic_id == self.log.topic_id:
            return True
        if self.log.is_gone(topic_id):
            return False
        if self.log.replace_id(topic_id):
            self.start_over("the topic was made anew, it has another id", now_ms)
        else:
            self._sink.changed(self)
        return True

    def start_over(self, why: str, now_ms: float) -> None:
        """Forget what was known of the log: it is another one. What was unread is skipped."""
        if self.committed_to is not None and self.high_watermark is not None:
            self.skip(self.committed_to, self.high_watermark, SkipReason.RECREATED, now_ms)
        self.end_stall("it starts over", now_ms)
        self._clear()
        self.started_over = True
        self.may_go_back = True
        self._sink.add_event(EventKind.RECREATED, self, f"starts over: {why}", now_ms)
        self._sink.changed(self)

    def may_be_another_log(self, offset: int) -> bool:
        """Say whether the log was seen to be another one, or to end below this offset."""
        return self.started_over or self.log.may_be_cut_below(offset)

    def fail_pending(self) -> None:
        """Take what is in flight as to be delivered again: the run that read it has ended."""
        self.failed = self.delivered.copy()

    def begin_run(self, began_ms: float | None, now_ms: float) -> None:
        """Take note of a new run, which began then; None: that is not known."""
        self.client_saw_end = False
        if began_ms is not None and self.fetched_from_ms < began_ms:
            self.fetched_from = None
        self.end_stall("a new run began", now_ms)

    def complete(
        self, span: BatchRange, run_id: str, gap: SkipReason | None, now_ms: float, now_s: float
    ) -> None:
        """Take note of what a batch completed.

        Args:
            span: the offsets; `intake` has refused those that cannot be.
            run_id: of the query's run.
            gap: why offsets between those completed and the batch are skipped, if there are any;
                None when batches whose reports were lost completed them.
            now_ms: the time.
            now_s: the time in seconds of the Unix epoch.

        """
        start, end = self._start_of(span, run_id), span.end
        if start > end and not self.started_over:
            self.start_over(f"the query went back with its log, from {start} to {end}", now_ms)
        done = self.committed_to
        if done is not None and done < start:
            self._pass_gap(done, start, gap, now_ms)
        elif done is not None and start < done:
            self._replay(start, end, done, now_ms)
        self.run_id = run_id
        self.started_over = False
        self.committed_to = end
        self.committed_at_s = now_s
        self.delivered.remove_below(end)
        self.failed.remove_below(end)
        # What was found lost stays known: the reader may yet pass over it.
        self.skips.forget_below(
            end if self.out_of_range_at is None else min(end, self.out_of_range_at)
        )
        self.log.ends.forget_below(end)
        self._check_retention(now_ms)
        self._sink.changed(self)
        if done != end:
            self._moved(now_ms)

    def check_stuck(self, now_ms: float, stuck_after_ms: float) -> None:
        """Raise the alarm, once, when nothing has moved for so long although there is lag."""
        lag = self.lag_records()
        if not lag or self.stall.since_ms is None:
            self._moved(now_ms)
        elif self.stall.check(now_ms, stuck_after_ms):
            waited_s = (now_ms - self.stall.since_ms) / 1000
            text = f"stands at {self.lag_from} for {waited_s:.0f} s, {lag} records behind"
            self._sink.add_event(EventKind.STUCK, self, text, now_ms)

    def end_stall(self, why: str, now_ms: float) -> None:
        """Take the alarm back, and let the time for it begin anew."""
        if self.stall.end(None):
            self._sink.add_event(EventKind.UNSTUCK, self, why, now_ms)

    def _start_of(self, span: BatchRange, run_id: str) -> int:
        if span.start is not None:
            return span.start
        if self.committed_to is not None and self.run_id == run_id:
            return self.committed_to
        if self.fetched_from is not None and self.fetched_from <= span.end:
            return self.fetched_from
        return span.end

    def _pass_gap(self, done: int, start: int, gap: SkipReason | None, now_ms: float) -> None:
        if gap is None:
            text = f"offsets {done} to before {start} were completed by lost reports"
            self._sink.add_event(EventKind.LOST_REPORTS, self, text, now_ms)
            return
        removed = min(max(self.log_start or 0, done), start)
        self.skip(done, removed, SkipReason.RETENTION, now_ms)
        self.skip(removed, start, gap, now_ms)

    def _replay(self, start: int, end: int, done: int, now_ms: float) -> None:
        again = min(end, done)
        if start < again:
            # Not counted here: it was, or will be, when it was delivered.
            self.refetched = (start, again)
            text = f"a new run read offsets {start} to before {again} again"
            self._sink.add_event(EventKind.REPLAY, self, text, now_ms)
        if end < done:
            self.delivered.clear()
            self.failed.clear()
            self.skips.forget_known()
            self.may_go_back = True
            text = f"the query went back from {done} to {end}, to an older checkpoint"
            self._sink.add_event(EventKind.RESET, self, text, now_ms)

    def _check_retention(self, now_ms: float) -> None:
        done, first = self.committed_to, self.log.log_start
        if done is None or first is None or first <= done:
            return
        # What was delivered and did not fail may still be completed.
        for start, end in [*self.delivered.missing(done, first), *self.failed]:
            self.skip(start, min(end, first), SkipReason.RETENTION, now_ms)
        self.failed.remove_below(first)

    def _moved(self, now_ms: float) -> None:
        lag = self.lag_records()
        if self.stall.end(now_ms if lag else None):
            text = f"moves again, {lag} records behind"
            self._sink.add_event(EventKind.UNSTUCK, self, text, now_ms)

    def _merged(self, what: str, now_ms: float) -> None:
        text = f"too many {what} ranges: the nearest ones are kept as one"
        self._sink.add_event(EventKind.MERGED, self, text, now_ms)
