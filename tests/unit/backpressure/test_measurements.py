"""What goes into the estimator: waiting batches, figures per record, what comes in."""

from itertools import accumulate

import pytest

from proxy.backpressure.measurements import (
    DECAY,
    HELD_SHARE,
    MAX_WAITING_INTERVALS,
    REACH_GROWTH,
    InputRate,
    PerRecordAverage,
    ThrottledRate,
    queued_ms,
)
from proxy.progress.report import BatchReport


def test_waiting_is_lindleys_recursion():
    delays = [1000, 3000, 2500, 1500, 500, 500, 500]
    waited = accumulate(delays, lambda ms, delay: queued_ms(ms, delay, 2000), initial=0)
    assert list(waited) == [0, 0, 1000, 1500, 1000, 0, 0, 0]


def test_waiting_does_not_pile_up_without_end():
    waiting_ms = queued_ms(0, 600_000, 2000)
    assert waiting_ms == MAX_WAITING_INTERVALS * 2000
    for _ in range(3):
        waiting_ms = queued_ms(waiting_ms, 0, 2000)
    assert waiting_ms == 0


def test_per_record_is_decayed_over_batches():
    size = PerRecordAverage()
    assert size.value is None
    size.add(1000, 10)
    assert size.value == 100
    size.add(3000, 10)
    assert size.value == pytest.approx((1000 * DECAY + 3000) / (10 * DECAY + 10))
    for _ in range(100):
        size.add(3000, 10)
    assert size.value == pytest.approx(300)


def test_what_is_read_ahead_is_used_up_record_by_record():
    size = PerRecordAverage()
    size.add(100_000, 10)
    seen = []
    for _ in range(9):
        size.add(0, 110)
        seen.append(size.value)
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 100


def test_batches_that_read_nothing_new_do_not_make_records_seem_smaller():
    """A consumer that reads far ahead: the size of a record must not fall meanwhile."""
    size = PerRecordAverage()
    for _ in range(5):
        size.add(100_000, 100)
        for _ in range(9):
            size.add(0, 100)
    # Ten batches of 100 records each use up 100,000 bytes.
    assert size.value == pytest.approx(100, rel=0.25)


def test_what_was_read_ahead_before_the_first_measurement_does_not_count():
    size = PerRecordAverage()
    size.add(0, 50)
    assert size.value is None
    size.add(20_000, 40)
    assert size.value == 500


def test_reach_follows_batches_that_were_held_and_opens_again():
    reach = ThrottledRate()
    assert reach.limit(1000.0, 1.0) == 1000.0
    reach.add(400, 4000, 3000)
    assert reach.limit(1000.0, 1.0) == 100.0
    reach.add(300, 2000, 10)
    assert reach.limit(1000.0, 1.0) == 100.0 * REACH_GROWTH
    for _ in range(10):
        reach.add(300, 2000, 0)
    assert reach.limit(1000.0, 1.0) == 1000.0
    assert reach.rate is None


def test_reach_is_never_below_the_lowest_rate():
    reach = ThrottledRate()
    reach.add(1, 20_000, 19_000)
    assert reach.limit(1000.0, 100.0) == 100.0


def test_a_short_hold_says_nothing():
    reach = ThrottledRate()
    reach.add(10, 1000, 1000 * HELD_SHARE)
    assert reach.rate is None


def batch(*sources):
    return BatchReport(
        batch_id=1,
        timestamp="2026-01-02T03:04:05.678Z",
        rows=0,
        durations_ms={},
        sources=tuple(
            {"description": "", "start": start, "end": end, "latest": None, "rows": rows}
            for start, end, rows in sources
        ),
    )


READ = [
    # sources (start, end, rows), then records and offsets
    ("no source", [], 0, 0),
    ("one", [({"t": {"0": 5, "1": 7}}, {"t": {"0": 9, "1": 10}}, 7)], 7, 7),
    ("gaps of transactions", [({"t": {"0": 0}}, {"t": {"0": 20}}, 10)], 10, 20),
    (
        "the same topic twice: records twice, offsets once",
        [({"t": {"0": 0}}, {"t": {"0": 10}}, 10), ({"t": {"0": 2}}, {"t": {"0": 10}}, 8)],
        18,
        10,
    ),
    (
        "a source that is ahead: what both have read",
        [({"t": {"0": 0}}, {"t": {"0": 10}}, 10), ({"t": {"0": 20}}, {"t": {"0": 25}}, 5)],
        15,
        10,
    ),
    ("the first batch has no start", [(None, {"t": {"0": 10}}, 10)], 10, None),
    ("a new partition has none", [({"t": {"0": 1}}, {"t": {"0": 3, "1": 9}}, 11)], 11, None),
]


@pytest.mark.parametrize(
    ("sources", "records", "offsets"), [row[1:] for row in READ], ids=[row[0] for row in READ]
)
def test_what_a_batch_read(sources, records, offsets):
    read = batch(*sources)
    assert sum(source.rows for source in read.sources) == records
    assert read.offsets == offsets


GROWING = [
    # (log ends, when), then offsets per second
    ("seen once", [({0: 5}, 0)], None),
    ("seen at one time", [({0: 5}, 0), ({0: 9}, 0)], None),
    ("steady", [({0: 100 * n, 1: n}, 1000 * n) for n in range(5)], 101),
    ("nothing comes", [({0: 7}, 1000 * n) for n in range(5)], 0),
    ("a new partition has not grown", [({0: 0}, 0), ({0: 10, 1: 1000}, 1000)], 10),
    ("nor has one that was made anew", [({0: 90, 1: 0}, 0), ({0: 0, 1: 10}, 1000)], 10),
    ("long ago", [({0: 0}, 0), ({0: 10**6}, 1000), ({0: 10**6 + 10**4}, 1_001_000)], 10),
]


@pytest.mark.parametrize(
    ("seen", "rate"), [row[1:] for row in GROWING], ids=[row[0] for row in GROWING]
)
def test_arrivals(seen, rate):
    arrivals = InputRate()
    for ends, seen_ms in seen:
        arrivals.add({("t", p): end for p, end in ends.items()}, seen_ms, 1000.0)
    assert arrivals.rate == (None if rate is None else pytest.approx(rate))
