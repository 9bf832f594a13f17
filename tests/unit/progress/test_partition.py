"""One partition: what was delivered and completed, against sets of offsets; every trap by name."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.progress.events import ProgressEventKind
from proxy.progress.log_offsets import CUT_CONFIRM_MS
from proxy.progress.offset_ranges import MAX_RANGES, MAX_SKIPS, SkipReason
from proxy.progress.partition import PartitionProgress
from proxy.progress.report import BatchRange

RUN, OTHER_RUN = "run-1", "run-2"
OLD_ID, NEW_ID = b"o" * 16, b"n" * 16
UNEXPLAINED = SkipReason.UNEXPLAINED


class Sink:
    """Keeps what it is told."""

    def __init__(self):
        self.events = []
        self.changes = 0

    def add_event(self, kind, _key, text, _now_ms):
        self.events.append((kind, text))

    def changed(self, _key):
        self.changes += 1

    @property
    def kinds(self):
        return [kind for kind, _ in self.events]


class Part(PartitionProgress):
    """A partition with short ways to drive it."""

    def __init__(self, committed_to=None, end=None):
        self.sink = Sink()
        super().__init__("t", 0, self.sink)
        if end is not None:
            self.record_high_watermark(end, 0.0)
        if committed_to is not None:
            self.batch(committed_to, committed_to)
        self.sink.events.clear()

    def batch(self, start, end, run_id=RUN, gap=UNEXPLAINED, now_ms=0.0):
        self.complete(BatchRange(start, end), run_id, gap, now_ms, now_ms / 1000)

    @property
    def skips(self):
        return [(skip.start, skip.end, str(skip.reason)) for skip in self.skipped.ranges]


def ranges_of(offsets):
    """Return sorted offsets as ranges."""
    pairs = []
    for offset in sorted(offsets):
        if pairs and pairs[-1][1] == offset:
            pairs[-1] = (pairs[-1][0], offset + 1)
        else:
            pairs.append((offset, offset + 1))
    return pairs


SPAN = st.tuples(st.integers(0, 40), st.integers(0, 12))
STEP = st.one_of(
    st.tuples(st.just("deliver"), SPAN),
    st.tuples(st.just("batch"), st.integers(0, 12)),
    st.tuples(st.just("fail"), st.none()),
    st.tuples(st.just("replay"), SPAN),
)


@given(st.lists(STEP, max_size=40))
def test_it_is_what_sets_of_offsets_say(steps):
    part = Part()
    delivered, failed, refetched = set(), set(), 0
    done = None
    for number, (what, value) in enumerate(steps):
        if what == "deliver":
            start, count = value
            span = set(range(start, start + count))
            known = delivered | set(range(done or 0))
            refetched += len(span & known)
            part.deliver(start, start + count, 0.0)
            delivered |= {offset for offset in span if offset >= (done or 0)}
            failed -= span
        elif what == "batch":
            start = done or 0
            done = start + value
            part.batch(start, done)
        elif what == "replay":
            start, count = value
            if done is not None and start + count < done:
                delivered, failed = set(), set()
            done = start + count
            part.batch(start, done, f"run {number}", gap=None)
        else:
            part.fail_pending()
            failed = set(delivered)
        delivered = {offset for offset in delivered if offset >= (done or 0)}
        failed = {offset for offset in failed if offset >= (done or 0)}
        assert list(part.delivered) == ranges_of(delivered)
        assert list(part.failed) == ranges_of(failed)
        assert part.pending == ranges_of(delivered - failed)
        assert part.committed_to == done
        assert part.refetched_records == refetched
        base = done if done is not None else min(delivered, default=None)
        if base is not None:
            expected = next(n for n in itertools.count(base) if n not in delivered)
            assert part.position == expected


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 9)), max_size=600))
def test_memory_has_a_bound_and_what_is_not_completed_is_never_called_so(ranges):
    part = Part()
    for start, length in ranges:
        part.deliver(start, start + length, 0.0)
        assert len(part.delivered) <= MAX_RANGES
    for start, count in ranges:
        assert not part.delivered.missing(start, start + count)
    assert part.committed_to is None


def test_many_holes_are_noted_once_and_nothing_delivered_is_forgotten():
    part = Part(0, 10**6)
    for offset in range(0, 4000, 2):
        part.deliver(offset, offset + 1, 0.0)
    assert part.sink.kinds == [ProgressEventKind.MERGED]
    assert len(part.delivered) == MAX_RANGES
    assert not part.delivered.missing(0, 1)
    assert not part.delivered.missing(3998, 3999)
    assert part.committed_to == 0


# --- lag


@pytest.mark.parametrize(
    ("committed_to", "end", "lag"),
    [
        pytest.param(None, None, None, id="nothing known"),
        pytest.param(10, None, None, id="no log end"),
        pytest.param(None, 10, None, id="no position"),
        pytest.param(10, 10, 0, id="at the end"),
        pytest.param(4, 10, 6, id="behind"),
        pytest.param(12, 10, 0, id="never below 0"),
    ],
)
def test_lag_in_records(committed_to, end, lag):
    part = Part(committed_to, end)
    assert part.lag_records() == lag


def test_lag_is_from_what_was_delivered_before_the_first_report():
    part = Part(end=100)
    part.record_fetch_offset(10, 0.0)
    assert part.lag_records() == 90
    part.deliver(10, 30, 0.0)
    assert part.lag_records() == 70
    part.batch(10, 20)
    assert part.lag_records() == 80


def test_lag_in_time_is_from_when_the_log_end_passed_what_is_completed():
    part = Part(0, 0)
    part.record_high_watermark(100, 10_000.0)
    assert part.lag_ms(12_000.0) == 12_000.0
    part.batch(0, 50, now_ms=12_000.0)
    assert part.lag_ms(12_000.0) == 7_000.0
    part.batch(50, 100, now_ms=13_000.0)
    assert part.lag_ms(60_000.0) == 0.0
    assert Part(5).lag_ms(0.0) is None


# --- the log's ends


def test_the_high_watermark_only_goes_up():
    part = Part(5, 100)
    part.record_high_watermark(90, 1.0)
    part.record_high_watermark(-1, 1.0)
    part.record_lookup_end(50, 2.0, client_saw_it=True)  # the last stable offset, say
    assert part.log.high_watermark == 100
    part.record_high_watermark(110, 3.0)
    assert part.log.high_watermark == 110


def test_a_log_that_ends_below_what_is_completed_is_another_one_when_seen_twice():
    part = Part(80, 100)
    part.record_lookup_end(10, 0.0, client_saw_it=False)
    part.record_lookup_end(10, CUT_CONFIRM_MS - 1, client_saw_it=False)
    assert (part.committed_to, part.log.high_watermark) == (80, 100)
    part.record_lookup_end(12, CUT_CONFIRM_MS, client_saw_it=False)
    assert (part.committed_to, part.log.high_watermark) == (None, 12)
    assert part.sink.kinds == [ProgressEventKind.SKIPPED, ProgressEventKind.RECREATED]
    assert part.skips == [(80, 100, "recreated")]


def test_a_lower_end_above_what_is_completed_is_believed_when_own_look_ups_see_it_twice():
    part = Part(50, 100)
    for now_ms in (1.0, 1.0 + CUT_CONFIRM_MS):
        part.record_lookup_end(80, now_ms, client_saw_it=True)  # the last stable offset, say
    assert part.lag_records() == 50
    for now_ms in (2.0, 1.0 + CUT_CONFIRM_MS):
        part.record_lookup_end(80, now_ms, client_saw_it=False)
    assert part.log.high_watermark == 100
    part.record_lookup_end(80, 2.0 + CUT_CONFIRM_MS, client_saw_it=False)
    assert (part.committed_to, part.log.high_watermark, part.lag_records()) == (50, 80, 30)
    part.batch(50, 80)
    assert (part.lag_records(), part.lag_ms(5_000.0)) == (0, 0)
    part.record_lookup_end(80, 6_000.0, client_saw_it=False)
    part.record_high_watermark(90, 6_000.0)
    assert (part.lag_records(), part.lag_ms(7_000.0)) == (10, 1_000.0)


def test_an_end_that_goes_on_between_two_lower_ones_is_not_lowered():
    part = Part(50, 100)
    part.record_lookup_end(80, 0.0, client_saw_it=False)
    part.record_high_watermark(101, 10.0)
    part.record_lookup_end(99, CUT_CONFIRM_MS, client_saw_it=False)
    assert part.log.high_watermark == 101


def test_answers_that_overtake_each_other_cut_nothing():
    part = Part(80, 100)
    part.record_lookup_end(79, 0.0, client_saw_it=False)
    part.record_lookup_end(101, 10.0, client_saw_it=False)
    part.record_lookup_end(79, CUT_CONFIRM_MS + 1, client_saw_it=False)
    assert (part.committed_to, part.sink.events) == (80, [])


def test_a_topic_made_anew_starts_over_and_the_old_id_is_heard_no_more():
    part = Part(80, 100)
    assert part.accepts_topic_id(OLD_ID, 0.0)
    part.deliver(80, 90, 0.0)
    assert part.accepts_topic_id(NEW_ID, 1.0)
    assert (part.committed_to, part.log.high_watermark, list(part.delivered)) == (None, None, [])
    assert part.skips == [(80, 100, "recreated")]
    assert part.may_go_back
    assert not part.accepts_topic_id(OLD_ID, 2.0)
    assert part.log.topic_id == NEW_ID
    assert part.sink.kinds.count(ProgressEventKind.RECREATED) == 1


def test_a_batch_that_goes_back_with_its_log_is_taken():
    part = Part(80, 100)
    part.accepts_topic_id(OLD_ID, 0.0)
    part.accepts_topic_id(NEW_ID, 0.0)
    part.batch(80, 10)  # what Spark reports with failOnDataLoss=false
    assert part.committed_to == 10
    part.batch(10, 20)
    assert part.committed_to == 20


def test_a_batch_that_goes_back_after_one_look_up_that_was_lower_is_taken():
    part = Part(80, 100)
    part.record_lookup_end(10, 0.0, client_saw_it=True)
    assert part.may_be_another_log(80)
    part.batch(80, 10)
    assert part.committed_to == 10
    assert part.log.high_watermark is None
    assert ProgressEventKind.RECREATED in part.sink.kinds


# --- gaps and what is skipped


def test_a_gap_is_completed_by_reports_that_were_lost():
    part = Part(10, 100)
    part.batch(30, 40, gap=None)
    assert (part.committed_to, part.skips) == (40, [])
    assert part.sink.kinds == [ProgressEventKind.LOST_REPORTS]
    assert "10 to before 30" in part.sink.events[0][1]


def test_a_gap_without_a_lost_report_is_skipped_and_says_so():
    part = Part(10, 100)
    part.batch(30, 40)
    assert part.skips == [(10, 30, "unexplained")]
    assert part.skipped.records == 20


def test_a_gap_below_the_log_start_is_retention_and_the_rest_is_not():
    part = Part(10, 100)
    part.log.record_start(25)
    part.batch(30, 40)
    assert part.skips == [(10, 25, "retention"), (25, 30, "unexplained")]
    assert part.skipped.records == 20


def test_what_was_removed_is_lost_with_the_batches_that_should_have_had_it():
    part = Part(10, 100)
    part.record_fetch_offset(10, 0.0)
    part.log.record_start(50)
    part.log.record_start(20)
    assert part.skips == []
    part.batch(10, 30)
    assert part.skips == [(10, 30, "retention")]
    part.batch(30, 60)
    assert part.skips == [(10, 30, "retention"), (30, 50, "retention")]
    assert (part.committed_to, part.skipped.records) == (60, 40)


def test_what_was_removed_of_a_batch_that_was_not_seen_from_its_start_is_not_known():
    part = Part(10, 100)
    part.log.record_start(50)
    part.batch(10, 30)
    part.record_fetch_offset(40, 0.0)
    part.batch(30, 60)
    assert part.skips == [(40, 50, "retention")]


def test_what_was_delivered_is_not_lost():
    part = Part(10, 100)
    part.record_fetch_offset(10, 0.0)
    part.deliver(10, 20, 0.0)
    part.log.record_start(30)
    part.batch(10, 40)
    assert part.skips == [(20, 30, "retention")]


def test_what_failed_and_was_removed_is_lost():
    part = Part(10, 100)
    part.record_fetch_offset(10, 0.0)
    part.deliver(10, 40, 0.0)
    part.fail_pending()
    part.log.record_start(30)
    part.batch(10, 40, OTHER_RUN)
    assert part.skips == [(10, 30, "retention")]


def test_what_was_asked_for_again_and_is_not_there_is_lost_with_its_batch():
    part = Part(10, 100)
    part.record_fetch_offset(10, 0.0)
    part.deliver(10, 40, 0.0)
    part.log.record_start(60)
    part.pass_over(10, 60, SkipReason.OUT_OF_RANGE, 1.0)
    assert part.skips == [(40, 60, "retention")]
    part.batch(10, 60)
    assert part.skips == [(40, 60, "retention"), (10, 40, "retention")]


def test_a_query_that_is_reset_below_the_log_start_loses_what_it_does_not_read_again():
    part = Part(10, 100)
    part.record_fetch_offset(10, 0.0)
    part.batch(10, 60)
    part.log.record_start(50)
    part.batch(0, 20, OTHER_RUN, gap=None)
    assert part.skips == []
    part.batch(20, 60, OTHER_RUN)
    assert part.skips == [(20, 50, "retention")]


def test_an_offset_that_is_out_of_range_is_skipped_up_to_the_new_start():
    part = Part(10, 100)
    part.skip(10, 30, SkipReason.OUT_OF_RANGE, 0.0)
    part.log.record_start(30)
    assert part.skips == [(10, 30, "out_of_range")]
    assert part.position == 30


def test_many_skips_become_one_row_and_none_is_uncounted():
    part = Part(0, 10**6)
    for number in range(40):
        part.skip(number * 10, number * 10 + 4, SkipReason.RETENTION, float(number))
    part.skip(5000, 5001, UNEXPLAINED, 99.0)
    assert len(part.skipped.ranges) == MAX_SKIPS
    assert part.skipped.records == 161
    assert sum(skip.records for skip in part.skipped.ranges) == 161
    first = part.skipped.ranges[0]
    assert (first.start, first.reason) == (0, SkipReason.RETENTION)


def test_skips_with_different_reasons_become_several():
    part = Part(0, 10**6)
    for number in range(MAX_SKIPS + 1):
        reason = UNEXPLAINED if number % 2 else SkipReason.RETENTION
        part.skip(number * 10, number * 10 + 4, reason, float(number))
    assert part.skipped.ranges[0].reason is SkipReason.SEVERAL


def test_so_many_skips_that_they_blur_are_noted():
    part = Part(0, 10**6)
    for number in range(MAX_RANGES + 5):
        part.skip(number * 10, number * 10 + 4, UNEXPLAINED, 0.0)
    assert Counter(part.sink.kinds)[ProgressEventKind.MERGED] == 1
    assert part.skipped.records == (MAX_RANGES + 5) * 4


# --- runs


def test_a_new_run_that_reads_again_is_a_replay():
    part = Part(10, 100)
    part.batch(10, 50)
    part.batch(30, 60, OTHER_RUN, gap=None)
    assert (part.committed_to, part.refetched) == (60, (30, 50))
    assert part.sink.kinds == [ProgressEventKind.REPLAY]
    assert not part.may_go_back


def test_a_new_run_from_an_older_checkpoint_goes_back():
    part = Part(10, 100)
    part.batch(10, 50)
    part.batch(10, 20, OTHER_RUN, gap=None)
    assert part.committed_to == 20
    assert part.sink.kinds == [ProgressEventKind.REPLAY, ProgressEventKind.RESET]
    assert part.may_go_back
    assert part.lag_records() == 80


@pytest.mark.parametrize(
    ("asked", "end", "skipped"),
    [
        pytest.param(30, 40, [(10, 30, "new_checkpoint")], id="from what was asked"),
        pytest.param(None, 40, [(10, 40, "new_checkpoint")], id="nothing asked: the end"),
        pytest.param(50, 40, [(10, 40, "new_checkpoint")], id="asked beyond it: the end"),
        pytest.param(10, 40, [], id="goes on where the other was"),
    ],
)
def test_a_batch_without_start_begins_where_the_query_asked(asked, end, skipped):
    part = Part(10, 100)
    part.begin_run(1.0, 1.0)
    if asked is not None:
        part.record_fetch_offset(asked, 2.0)
    part.batch(None, end, OTHER_RUN, SkipReason.NEW_CHECKPOINT)
    assert (part.committed_to, part.skips) == (end, skipped)


def test_what_was_asked_since_the_run_began_counts_although_the_report_is_late():
    part = Part(10, 100)
    part.record_fetch_offset(5, 0.0)
    part.begin_run(1.0, 3.0)
    assert part.fetched_from is None
    part.record_fetch_offset(30, 2.0)
    part.begin_run(1.0, 3.0)
    assert part.fetched_from == 30


def test_what_failed_is_delivered_again_and_then_failed_no_more():
    part = Part(10, 100)
    part.deliver(10, 40, 0.0)
    part.fail_pending()
    assert (part.pending, list(part.failed)) == ([], [(10, 40)])
    part.deliver(10, 20, 1.0)
    assert (part.pending, list(part.failed)) == ([(10, 20)], [(20, 40)])
    assert part.refetched_records == 10
    part.batch(10, 30)
    assert list(part.failed) == [(30, 40)]
    part.batch(30, 50)
    assert list(part.failed) == []


def test_one_failure_does_not_stop_the_partition():
    part = Part(0, 100)
    part.deliver(0, 1, 0.0)
    part.fail_pending()
    part.batch(0, 100)
    assert (part.committed_to, part.lag_records(), list(part.failed)) == (100, 0, [])


def test_nothing_is_delivered_beyond_the_log_end():
    part = Part(0, 100)
    part.deliver(90, 2**63 - 1, 0.0)
    assert list(part.delivered) == [(90, 100)]


def test_all_below_delivered_to_was_delivered():
    part = Part(0, 100)
    part.deliver(50, 60, 0.0)
    assert part.position == 0
    part.deliver(0, 20, 0.0)
    assert part.position == 20
    part.deliver(20, 50, 0.0)
    assert part.position == 60


# --- stuck


def test_a_stuck_partition_raises_an_alarm_once_and_says_when_it_moves():
    part = Part(10, 10)
    part.check_stuck(1_000_000.0, 300.0)
    assert part.sink.kinds == []  # no lag, however long
    part.record_high_watermark(20, 1_000_000.0)
    part.check_stuck(1_000_299.0, 300.0)
    assert not part.stuck
    for now_ms in (1_000_300.0, 1_000_301.0):
        part.check_stuck(now_ms, 300.0)
    assert part.sink.kinds == [ProgressEventKind.STUCK]
    assert part.stuck_since_ms == 1_000_000.0
    part.batch(10, 15, now_ms=1_000_400.0)
    assert part.sink.kinds == [ProgressEventKind.STUCK, ProgressEventKind.UNSTUCK]
    part.check_stuck(1_000_699.0, 300.0)
    assert not part.stuck
    part.check_stuck(1_000_700.0, 300.0)
    assert part.stuck


def test_a_batch_that_completes_nothing_does_not_end_the_alarm():
    part = Part(10, 20)
    part.check_stuck(0.0, 300.0)
    part.check_stuck(300.0, 300.0)
    part.batch(10, 10, now_ms=301.0)
    assert part.stuck


def test_a_query_without_reports_is_stuck_when_it_is_given_nothing():
    part = Part(end=100)
    part.record_fetch_offset(0, 0.0)
    part.check_stuck(0.0, 300.0)
    part.deliver(0, 10, 250.0)
    part.check_stuck(300.0, 300.0)
    assert not part.stuck
    part.check_stuck(550.0, 300.0)
    assert part.stuck


def test_a_query_that_ended_is_not_stuck():
    part = Part(10, 20)
    part.check_stuck(0.0, 300.0)
    part.check_stuck(300.0, 300.0)
    part.end_alarm("the query has ended", 301.0)
    assert (part.stuck, part.sink.kinds) == (
        False,
        [ProgressEventKind.STUCK, ProgressEventKind.UNSTUCK],
    )
