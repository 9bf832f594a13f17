"""What one query has been given of one partition, what it has completed, and how far behind it is.

    skipped or completed  |  delivered, not completed: pending or failed  |  not delivered
                    completed_to                                     delivered_to

What lies above `completed_to` is kept as ranges, in sets with a bound. Times are monotonic
milliseconds.
"""

from typing import Final

from .log import LogEdges
from .notes import NoteKind, PartitionSink, SkipReason
from .ranges import Range, Ranges
from .skips import SkipLog
from .spans import Span
from .stall import Stall


class PartitionProgress:
    """One partition as one query reads it; see `log` for what is believed of the log's ends."""

    __slots__ = (
        *("_sink", "asked_from", "asked_from_ms", "committed", "completed_s", "completed_to"),
        *("delivered", "failed", "gone", "leader", "log", "lost_at", "may_go_back", "partition"),
        *("read_ms", "refetched", "refetched_records", "run_id", "skips", "stall"),
        *("started_over", "told", "topic"),
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
        self.gone = False
        """Whether the query has let go of it; whoever holds it looks for the new one."""
        self.skips = SkipLog()
        self.refetched_records = 0
        """How many records were delivered that had been delivered before."""
        self.refetched: Range | None = None
        """The latest range of them."""
        self.stall = Stall()
        self.committed: int | None = None
        """What the commit group has, as far as is known."""
        self.may_go_back = False
        """Whether the group may be moved back: the query was reset, or the topic made anew."""
        self.completed_s: float | None = None
        """When `completed_to` was reported, in seconds of the Unix epoch."""
        self.delivered = Ranges()
        """What was delivered, at or above `completed_to`."""
        self.failed = Ranges()
        """The part of it that will be delivered again."""
        self._clear()

    def _clear(self) -> None:
        self.completed_to: int | None = None
        """All below was completed; None before the first report."""
        self.asked_from: int | None = None
        """The lowest offset that was asked for in this run."""
        self.asked_from_ms = 0.0
        self.lost_at: int | None = None
        """The position that was out of range, until the query goes on somewhere."""
        self.told = False
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
    def delivered_to(self) -> int | None:
        """All below was delivered, or skipped; None before anything is known.

        What was delivered beyond a hole, as when several executors read, is in `pending` only.
        """
        at = self.completed_to
        if at is None:
            at = self.delivered.first
            if at is None:
                return self.asked_from
        while (end := self.delivered.end_at(at) or self.skips.end_at(at)) is not None:
            at = end
        return at

    @property
    def position(self) -> int | None:
        """What lag is measured from: `completed_to`, or `delivered_to` before the first report."""
        return self.completed_to if self.completed_to is not None else self.delivered_to

    @property
    def pending(self) -> list[Range]:
        """What is in flight: delivered, not completed, and not known to be delivered again."""
        return self.delivered.without(self.failed)

    def lag_records(self) -> int | None:
        """Return how many records lie between the position and the log end; None if unknown."""
        end = self.log.high_watermark
        if end is None or (position := self.position) is None:
            return None
        return max(end - position, 0)

    def lag_ms(self, now_ms: float) -> float | None:
        """Return for how long the record at the position has been in the log, 0 without lag.

        None when unknown. What was in the log when that was first seen counts from then.
        """
        position, lag = self.position, self.lag_records()
        if not lag or position is None:
            return None if lag is None else 0.0
        passed_ms = self.log.ends.passed_ms(position)
        return None if passed_ms is None else max(now_ms - passed_ms, 0.0)

    def asked(self, offset: int, now_ms: float) -> None:
        """Take note of an offset that a reader goes on from."""
        if self.asked_from is None or offset < self.asked_from:
            self.asked_from, self.asked_from_ms = offset, now_ms

    def deliver(self, start: int, end: int, now_ms: float) -> None:
        """Take note of what a reader was given. What lies beyond the log end is left out."""
        if self.log.high_watermark is not None:
            end = min(end, self.log.high_watermark)
        if start >= end:
            return
        low = start if self.completed_to is None else min(max(start, self.completed_to), end)
        was_exact = not (self.delivered.blurred or self.failed.blurred)
        again = (end - start) - self.delivered.add(low, end)
        if again:
            self.refetched_records += again
            self.refetched = (start, end)
        if self.failed:
            self.failed.remove(low, end)
        if was_exact and (self.delivered.blurred or self.failed.blurred):
            self._merged("delivered", now_ms)
        if self.completed_to is None:
            self._moved(now_ms)

    def saw_end(self, end: int, now_ms: float) -> None:
        """Take note of a high watermark; a lower one than is known is left out."""
        if self.log.saw_end(end, now_ms):
            if self.completed_to is None or end >= self.completed_to:
                self.log.is_whole()
            if self.stall.since_ms is None and self.lag_records():
                self.stall.since_ms = now_ms

    def looked_up_end(self, end: int, now_ms: float, *, told: bool) -> None:
        """Take note of a log end from a look-up; see LogEdges on one that is lower than before.

        `told` says whether a client of the query was told it.
        """
        if end < 0:
            return
        self.told |= told
        if self.completed_to is not None and end < self.completed_to:
            if self.log.is_cut(end, now_ms):
                self.start_over(f"its log ends at {end} now, below what was completed", now_ms)
        else:
            self.log.is_whole()
        self.saw_end(end, now_ms)

    def saw_start(self, offset: int, now_ms: float) -> None:
        """Take note of the log start; what was unread below it is skipped."""
        if self.log.saw_start(offset):
            self._check_retention(now_ms)

    def skip(self, start: int, end: int, reason: SkipReason, now_ms: float) -> None:
        """Take note of a range that is skipped; what of it was noted before does not count."""
        was_exact = not self.skips.blurred
        new = self.skips.add(start, end, reason, now_ms)
        if new:
            records = sum(high - low for low, high in new)
            text = f"{records} records skipped, offsets {new[0][0]} to before {new[-1][1]}"
            self._sink.note(NoteKind.SKIPPED, self, f"{text}: {reason}", now_ms)
        if was_exact and self.skips.blurred:
            self._merged("skipped", now_ms)

    def is_of(self, topic_id: bytes, now_ms: float) -> bool:
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
        if self.completed_to is not None and self.high_watermark is not None:
            self.skip(self.completed_to, self.high_watermark, SkipReason.RECREATED, now_ms)
        self.calm("it starts over", now_ms)
        self._clear()
        self.started_over = True
        self.may_go_back = True
        self._sink.note(NoteKind.RECREATED, self, f"starts over: {why}", now_ms)
        self._sink.changed(self)

    def may_be_another_log(self, offset: int) -> bool:
        """Say whether the log was seen to be another one, or to end below this offset."""
        return self.started_over or self.log.may_be_cut_below(offset)

    def fail(self) -> None:
        """Take what is in flight as to be delivered again: the run that read it has ended."""
        self.failed = self.delivered.copy()

    def begin_run(self, began_ms: float | None, now_ms: float) -> None:
        """Take note of a new run, which began then; None: that is not known."""
        self.told = False
        if began_ms is not None and self.asked_from_ms < began_ms:
            self.asked_from = None
        self.calm("a new run began", now_ms)

    def complete(
        self, span: Span, run_id: str, gap: SkipReason | None, now_ms: float, now_s: float
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
        done = self.completed_to
        if done is not None and done < start:
            self._pass_gap(done, start, gap, now_ms)
        elif done is not None and start < done:
            self._replay(start, end, done, now_ms)
        self.run_id = run_id
        self.started_over = False
        self.completed_to = end
        self.completed_s = now_s
        self.delivered.remove_below(end)
        self.failed.remove_below(end)
        # What was found lost stays known: the reader may yet pass over it.
        self.skips.forget_below(end if self.lost_at is None else min(end, self.lost_at))
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
            text = f"stands at {self.position} for {waited_s:.0f} s, {lag} records behind"
            self._sink.note(NoteKind.STUCK, self, text, now_ms)

    def calm(self, why: str, now_ms: float) -> None:
        """Take the alarm back, and let the time for it begin anew."""
        if self.stall.end(None):
            self._sink.note(NoteKind.UNSTUCK, self, why, now_ms)

    def _start_of(self, span: Span, run_id: str) -> int:
        if span.start is not None:
            return span.start
        if self.completed_to is not None and self.run_id == run_id:
            return self.completed_to
        if self.asked_from is not None and self.asked_from <= span.end:
            return self.asked_from
        return span.end

    def _pass_gap(self, done: int, start: int, gap: SkipReason | None, now_ms: float) -> None:
        if gap is None:
            text = f"offsets {done} to before {start} were completed by lost reports"
            self._sink.note(NoteKind.LOST_REPORTS, self, text, now_ms)
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
            self._sink.note(NoteKind.REPLAY, self, text, now_ms)
        if end < done:
            self.delivered.clear()
            self.failed.clear()
            self.skips.forget_known()
            self.may_go_back = True
            text = f"the query went back from {done} to {end}, to an older checkpoint"
            self._sink.note(NoteKind.RESET, self, text, now_ms)

    def _check_retention(self, now_ms: float) -> None:
        done, first = self.completed_to, self.log.log_start
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
            self._sink.note(NoteKind.UNSTUCK, self, text, now_ms)

    def _merged(self, what: str, now_ms: float) -> None:
        text = f"too many {what} ranges: the nearest ones are kept as one"
        self._sink.note(NoteKind.MERGED, self, text, now_ms)
