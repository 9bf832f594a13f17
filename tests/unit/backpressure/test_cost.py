"""The cost estimator: what it learns of a batch, and which batches it chooses for it."""

import math
import random

import pytest
from backpressure_parts import INTERVAL_MS, adaptive
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.backpressure.cost import (
    FIRST_NOISE,
    GROWTH,
    LEAST_NOISE,
    LONGEST,
    MOST_NOISE,
    PROBE,
    WORTHWHILE,
    BatchCostModel,
    CostEstimator,
    CostState,
    FinishedBatch,
)

MIN_RATE = 1.0
MOST = 1e6
EACH_MS = 0.05


def made(**changes) -> CostEstimator:
    return CostEstimator(adaptive(**{"min_rate": MIN_RATE, "estimator": "cost", **changes}))


class Query:
    """Its batches have what it is allowed, or what there is."""

    def __init__(self, fixed: float, each_ms: float = EACH_MS, arrivals: float | None = None):
        self.fixed_ms, self.each_ms, self.arrivals = fixed * INTERVAL_MS, each_ms, arrivals
        self.estimator = made()
        self.records: list[float] = []
        self.interval_ms = INTERVAL_MS

    @property
    def allowed(self) -> float:
        rate = self.estimator.rate
        return math.inf if rate is None else rate * self.interval_ms / 1000

    def runs(self, *sizes: float, left: float = 0.0, times: float = 1.0, pause_ms: float = 0.0):
        """Let batches of these sizes run, or of less where less is allowed."""
        for size in sizes:
            records = min(size, self.allowed)
            self.records.append(records)
            self.estimator.compute(
                FinishedBatch(
                    time_ms=0.0,
                    records=records,
                    processing_ms=self.time_ms(records) * times + pause_ms,
                    left=left + size - records,
                    arrivals=self.arrivals,
                    most=MOST,
                )
            )
        return self

    def time_ms(self, records: float) -> float:
        return self.fixed_ms + self.each_ms * records

    @property
    def next_intervals(self) -> float:
        """How long the next batch takes if it is as large as it may be."""
        return self.time_ms(self.allowed) / INTERVAL_MS


SMALL, LARGE = 5_000.0, 20_000.0
BACKLOG = [1e9] * 30

CHOSEN = {
    "no fixed cost: one interval": (Query(0.0).runs(SMALL, LARGE, *BACKLOG), 1.0),
    "a small one: one interval": (Query(0.05).runs(SMALL, LARGE, *BACKLOG), 1.0),
    "a tenth: eleven times that": (Query(0.1).runs(SMALL, LARGE, *BACKLOG), 0.1 * WORTHWHILE),
    "half: somewhat more than an interval": (Query(0.5).runs(SMALL, LARGE, *BACKLOG), LONGEST),
    "half, but what comes in needs longer batches": (
        Query(0.5, arrivals=14_000).runs(SMALL, LARGE, *BACKLOG),
        0.5 / (1 - 0.7 * 1.1),
    ),
    "half, but more comes in than is worth while": (
        Query(0.5, arrivals=18_000).runs(SMALL, LARGE, *BACKLOG),
        0.5 * WORTHWHILE,
    ),
    "half, and overloaded": (Query(0.5, arrivals=19_000).runs(SMALL, LARGE, *BACKLOG), LONGEST),
    "more than an interval: two": (Query(1.1, arrivals=5000).runs(SMALL, LARGE, *BACKLOG), 2.0),
    "two intervals: three": (Query(2.0, arrivals=5000).runs(SMALL, LARGE, *BACKLOG), 3.0),
    "more than an interval, and overloaded": (
        Query(1.1, arrivals=25_000).runs(SMALL, LARGE, *BACKLOG),
        1.1 * WORTHWHILE,
    ),
}


@pytest.mark.parametrize(("query", "intervals"), CHOSEN.values(), ids=CHOSEN)
def test_how_long_the_batches_of_a_backlog_are(query, intervals):
    assert query.next_intervals == pytest.approx(intervals, rel=0.15)


def test_there_is_a_rate_after_the_first_batch():
    assert made().rate is None
    query = Query(0.1).runs(LARGE, left=1e6)
    assert 0.5 < query.next_intervals < 2.5


def test_a_first_batch_that_was_bounded_is_not_followed_by_a_giant():
    """As with `initial_rate`, whatever the rule's own bound is."""
    query = Query(0.05).runs(4000, left=1e7)
    assert query.next_intervals < 2
    query.runs(*BACKLOG)
    assert max(map(query.time_ms, query.records)) < 2 * INTERVAL_MS


def test_after_a_trickle_the_rules_own_bound_is_all_there_is():
    sizes = random.Random(1)
    query = Query(0.1).runs(*(sizes.randint(1, 20) for _ in range(200)))
    assert query.estimator.rate >= MOST


def test_what_is_known_of_a_record_outlasts_a_trickle():
    query = Query(0.1).runs(SMALL, LARGE, 3 * LARGE, *([10.0] * 500))
    assert query.next_intervals < 2


@pytest.mark.parametrize("pause", [1.0, 10.0])
def test_one_pause_costs_one_small_batch(pause):
    """For all one knows then, everything is slower from now on."""
    query = Query(0.1).runs(SMALL, LARGE, *BACKLOG)
    before = query.allowed
    query.runs(1e9, pause_ms=pause * INTERVAL_MS)
    small = query.allowed
    assert small == pytest.approx(before * min(PROBE, LONGEST / (1.1 + pause)), rel=0.1)
    query.runs(1e9)
    assert query.allowed >= min(0.8 * before, GROWTH * small)
    query.runs(1e9, 1e9)
    assert query.allowed > 0.8 * before


@pytest.mark.parametrize("is_all", [False, True], ids=["each record", "everything"])
@pytest.mark.parametrize(("fixed", "times"), [(0.0, 10), (0.02, 10), (0.05, 10), (0.0, 30)])
def test_many_times_slower_is_one_long_batch(fixed, times, is_all):
    """Batches of one size do not tell which of the two it is."""
    query = Query(fixed, arrivals=LARGE / INTERVAL_MS * 1000).runs(*[LARGE] * 30)
    query.each_ms *= times
    query.fixed_ms *= times if is_all else 1
    query.runs(LARGE)
    for _ in range(20):
        assert query.next_intervals <= 1.7
        query.runs(1e9)
    assert query.next_intervals >= 0.6, "it is as long as it may be, or a probe"


def test_four_times_slower_is_believed_the_second_time():
    query = Query(0.1).runs(SMALL, LARGE, *BACKLOG)
    query.runs(1e9, 1e9, times=4.0)
    assert query.time_ms(query.allowed) * 4 < 1.5 * INTERVAL_MS


@pytest.mark.parametrize("fixed", [0.1, 0.5, 0.9, 1.1, 2.0])
@pytest.mark.parametrize("arrivals", [100.0, 5000.0])
def test_a_job_whose_time_is_all_fixed_gets_what_comes_in(fixed, arrivals):
    per_batch = arrivals * max(fixed, 1.0) * INTERVAL_MS / 1000
    query = Query(fixed, each_ms=0.0, arrivals=arrivals).runs(*([per_batch] * 50))
    assert query.records[1:] == [per_batch] * 49
    assert query.allowed >= per_batch


def test_a_query_at_its_least_finds_out():
    """It was taken to be slow for each record, and only batches of min_rate went on."""
    query = Query(2.0, arrivals=5000).runs(4.0, *([1e6] * 40))
    assert query.allowed >= 5000 * 2.5


def test_a_query_that_falls_behind_has_a_smaller_batch_now_and_then():
    query = Query(1.1, arrivals=14_000).runs(28_000.0, *([1e6] * 40))
    assert query.next_intervals == pytest.approx(1.1 / (1 - 0.7 * 1.1), rel=0.1)


def test_a_new_run_begins_with_what_the_last_one_knew():
    query = Query(0.1).runs(SMALL, LARGE, *BACKLOG)
    query.estimator.begin_run()
    assert query.next_intervals == pytest.approx(0.1 * WORTHWHILE, rel=0.15)
    slower = 5.0
    query.runs(1e9, 1e9, 1e9, times=slower)
    assert query.time_ms(query.allowed) * slower < 1.5 * INTERVAL_MS


def test_the_lowest_rate_is_given_at_least():
    estimator = made(min_rate=300.0)
    slow = FinishedBatch(time_ms=0.0, records=10.0, processing_ms=1e6, left=1e6, most=MOST)
    assert estimator.compute(slow) == pytest.approx(300.0)
    assert estimator.compute(slow) >= 300.0


def test_another_interval_makes_other_batches_of_what_is_known():
    query = Query(0.1).runs(SMALL, LARGE, *BACKLOG)
    query.interval_ms = 5 * INTERVAL_MS
    query.estimator.update(adaptive(min_rate=MIN_RATE, batch_interval_ms=query.interval_ms))
    query.runs(1e9, 1e9, 1e9)
    assert query.next_intervals == pytest.approx(5, rel=0.1)


def test_a_later_process_goes_on():
    query = Query(0.5).runs(SMALL, LARGE, *BACKLOG)
    kept = query.estimator.state
    assert kept.fixed_ms == pytest.approx(0.5 * INTERVAL_MS, rel=0.1)
    assert kept.each_ms == pytest.approx(EACH_MS, rel=0.1)
    other = Query(0.5)
    other.estimator.state = kept
    assert other.estimator.state == pytest.approx(kept)
    other.runs(LARGE)
    assert other.next_intervals == pytest.approx(LONGEST, rel=0.2)


def test_the_interval_may_be_known_later_than_the_costs():
    """As after a restart, when it is learnt from the reports."""
    kept = Query(0.1).runs(SMALL, LARGE, *BACKLOG).estimator.state
    query = Query(0.1)
    query.estimator = made(batch_interval_ms=None)
    query.estimator.state = kept
    query.estimator.begin_run()
    assert query.estimator.rate is None
    query.estimator.update(adaptive(min_rate=MIN_RATE))
    assert query.next_intervals == pytest.approx(0.1 * WORTHWHILE, rel=0.15)
    query.estimator.update(adaptive(min_rate=MIN_RATE, batch_interval_ms=None))
    assert query.estimator.rate is None


def test_what_is_first_believed():
    """A short batch is mostly its fixed time; a long one has no more of it than an interval."""
    short = BatchCostModel.first(10.0, 0.1 * INTERVAL_MS, INTERVAL_MS)
    assert short.fixed_ms > 0.9 * 0.1 * INTERVAL_MS
    long = BatchCostModel.first(1e6, 20 * INTERVAL_MS, INTERVAL_MS)
    assert 0.9 * INTERVAL_MS < long.fixed_ms < INTERVAL_MS
    assert long.time_ms(1e6) == pytest.approx(20 * INTERVAL_MS)
    assert long.noise == FIRST_NOISE**2


@settings(deadline=None, max_examples=50)
@given(
    fixed_ms=st.floats(0, 5000),
    each_ms=st.floats(0.001, 10),
    sizes=st.lists(st.integers(1, 100_000), min_size=20, max_size=40, unique=True),
)
def test_exact_batches_are_learnt_exactly(fixed_ms, each_ms, sizes):
    cost = BatchCostModel.first(sizes[0], fixed_ms + each_ms * sizes[0], INTERVAL_MS)
    for size in sizes[1:] * 3:
        cost = cost.after(size, fixed_ms + each_ms * size)
    for size in sizes:
        assert cost.time_ms(size) == pytest.approx(fixed_ms + each_ms * size, rel=0.35, abs=50)


ANY = st.floats() | st.sampled_from([5e-324, 1e308, -0.0, 1e-9, 1.0])
BATCHES = st.lists(
    st.builds(
        FinishedBatch,
        time_ms=ANY,
        records=ANY | st.floats(1, 1e6),
        processing_ms=ANY | st.floats(1, 1e6),
        left=st.none() | st.floats(0, 1e9),
        arrivals=st.none() | st.floats(0, 1e9),
        most=st.floats(1, 1e9) | st.just(math.inf),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=50)
@given(batches=BATCHES, restarts=st.sets(st.integers(0, 29)))
def test_no_input_whatever_makes_a_rate_that_is_no_number(batches, restarts):
    estimator = made()
    for number, batch in enumerate(batches):
        if number in restarts:
            estimator.begin_run()
        rate = estimator.compute(batch)
        assert rate is None or (math.isfinite(rate) and rate >= MIN_RATE)
        kept = estimator.state
        if kept is not None:
            assert all(map(math.isfinite, kept))
            assert min(kept.fixed_ms, kept.each_ms, kept.fixed_doubt_ms, kept.each_doubt_ms) >= 0
            assert abs(kept.correlation) <= 1
            assert kept.widest >= 1
            assert LEAST_NOISE <= kept.noise <= MOST_NOISE


STATES = st.builds(
    CostState,
    fixed_ms=st.floats(0, 1e15),
    fixed_doubt_ms=st.floats(0, 1e15),
    each_ms=st.floats(0, 1e15),
    each_doubt_ms=st.floats(0, 1e15),
    correlation=st.floats(-1, 1),
    widest=st.floats(1, 1e15),
    noise=st.floats(LEAST_NOISE, MOST_NOISE),
)


@settings(deadline=None, max_examples=50)
@given(state=STATES, batches=BATCHES)
def test_nor_does_anything_that_was_kept(state, batches):
    estimator = made()
    estimator.state = state
    estimator.begin_run()
    for batch in batches:
        rate = estimator.compute(batch)
        assert rate is None or (math.isfinite(rate) and rate >= MIN_RATE)


@settings(deadline=None, max_examples=50)
@given(
    fixed_ms=st.floats(0, 4000),
    each_ms=st.floats(0.001, 1),
    shorter=st.floats(100, 5000),
    longer=st.floats(1, 5000),
    doubt=st.sampled_from([0.0, 1.0]),
)
def test_more_fits_into_a_longer_time(fixed_ms, each_ms, shorter, longer, doubt):
    cost = BatchCostModel.first(1000.0, fixed_ms + each_ms * 1000, INTERVAL_MS)
    for size in (500.0, 2000.0, 100.0):
        cost = cost.after(size, fixed_ms + each_ms * size)
    less = cost.largest(shorter, doubt=doubt)
    assert 0 <= less <= cost.largest(shorter + longer, doubt=doubt)
