"""The PID estimator: worked figures, and Spark's formula written a second time."""

import math

import pytest
from backpressure_parts import EPOCH_S, INTERVAL_MS, BackpressureWorld, adaptive, stamp
from hypothesis import given, settings
from hypothesis import strategies as st
from parts.reports import batch_document

from proxy.backpressure.cost import FinishedBatch, PidEstimator


class Transcription:
    """SPEC's formula line by line, with exact fractions nowhere and no care for bad numbers."""

    def __init__(self, interval, p, i, d, min_rate):
        self.interval, self.p, self.i, self.d, self.min_rate = interval, p, i, d, min_rate
        self.time, self.rate, self.error, self.first = -1, -1, -1, True

    def compute(self, time, elements, processing_delay, scheduling_delay):
        if time <= self.time or elements <= 0 or processing_delay <= 0:
            return None
        dt = (time - self.time) / 1000
        processing_rate = elements / processing_delay * 1000
        error = self.rate - processing_rate
        historical = scheduling_delay * processing_rate / self.interval
        d_error = (error - self.error) / dt
        new = self.rate - self.p * error - self.i * historical - self.d * d_error
        self.time = time
        if self.first:
            self.first, self.rate, self.error = False, processing_rate, 0
            return None
        self.rate = max(self.min_rate, new)
        self.error = error
        return self.rate


def estimator(**settings) -> PidEstimator:
    return PidEstimator(adaptive(**settings))


def seen(time, elements, processing_delay, scheduling_delay) -> FinishedBatch:
    return FinishedBatch(
        time_ms=time,
        records=elements,
        processing_ms=processing_delay,
        waited_ms=scheduling_delay,
    )


def test_the_first_batch_gives_no_rate_but_sets_the_latest_one():
    pid = estimator(proportional=0.0, integral=0.0)
    assert pid.compute(seen(1000, 4000, 2000, 0)) is None
    assert pid.compute(seen(3000, 100, 2000, 0)) == 2000.0


WORKED = [
    # gains, then batches (time, elements, processing delay, scheduling delay) and the last rate
    ("defaults follow the processing rate", {}, [(0, 50, 100, 0), (2000, 4000, 2000, 0)], 2000.0),
    (
        "what waits costs a fifth of it per interval",
        {},
        [(0, 4000, 2000, 0), (2000, 4000, 2000, 2000)],
        1600.0,
    ),
    (
        "half the error only",
        {"proportional": 0.5, "integral": 0.0},
        [(0, 4000, 2000, 0), (2000, 2000, 2000, 0)],
        1500.0,
    ),
    (
        "change of the error: error 1000 after 0 in 2 s, 500 a second",
        {"proportional": 0.0, "integral": 0.0, "derivative": 1.0},
        [(0, 4000, 2000, 0), (2000, 2000, 2000, 0)],
        1500.0,
    ),
    (
        "never below the lowest rate",
        {"min_rate": 300.0},
        [(0, 4000, 2000, 0), (2000, 100, 2000, 0)],
        300.0,
    ),
    (
        "four times slower than before, three intervals behind",
        {},
        [(0, 4000, 2000, 0), (8000, 4000, 8000, 6000)],
        500 * (1 - 0.2 * 3),
    ),
]


@pytest.mark.parametrize(
    ("gains", "batches", "rate"), [row[1:] for row in WORKED], ids=[row[0] for row in WORKED]
)
def test_worked_figures(gains, batches, rate):
    pid = estimator(**gains)
    *_, last = [pid.compute(seen(*batch)) for batch in batches]
    assert last == pytest.approx(rate)


@pytest.mark.parametrize(
    "skipped",
    [
        (2000, 1000, 500, 0),
        (1000, 1000, 500, 0),
        (4000, 0, 500, 0),
        (4000, -5, 500, 0),
        (4000, 1000, 0, 0),
        (4000, 1000, -1, 0),
        (math.nan, 1000, 500, 0),
        (math.inf, 1000, 500, 0),
        (4000, math.nan, 500, 0),
        (4000, math.inf, 500, 0),
        (4000, 1000, math.nan, 0),
        (4000, 1000, 500, math.nan),
        (4000, 1000, 500, math.inf),
        (4000, 1e308, 1e-308, 0),
    ],
)
def test_what_is_skipped_leaves_no_trace(skipped):
    pid, untouched = estimator(), estimator()
    for each in (pid, untouched):
        each.compute(seen(0, 800, 400, 0))
        each.compute(seen(2000, 1000, 500, 100))
    assert pid.compute(seen(*skipped)) is None
    after = (6000, 3000, 1500, 200)
    assert pid.compute(seen(*after)) == untouched.compute(seen(*after))


GAIN = st.floats(0, 10)
BATCH = st.tuples(
    st.integers(-5, 10**13), st.integers(-5, 10**9), st.integers(-5, 10**8), st.integers(0, 10**8)
)


@settings(deadline=None)
@given(
    interval=st.floats(1, 1e6),
    gains=st.tuples(GAIN, GAIN, GAIN),
    min_rate=st.floats(0.01, 1e6),
    batches=st.lists(BATCH, max_size=20),
)
def test_it_is_the_formula(interval, gains, min_rate, batches):
    p, i, d = gains
    oracle = Transcription(interval, p, i, d, min_rate)
    pid = estimator(
        batch_interval_ms=interval, proportional=p, integral=i, derivative=d, min_rate=min_rate
    )
    for batch in batches:
        expected = oracle.compute(*batch)
        rate = pid.compute(seen(*batch))
        assert rate == (None if expected is None else pytest.approx(expected))
        assert rate is None or rate >= min_rate


ANY = st.floats() | st.sampled_from([5e-324, 1e308, -0.0, 1e-9])


@settings(deadline=None)
@given(
    gains=st.tuples(st.floats(0, 1e308), st.floats(0, 1e308), st.floats(0, 1e308)),
    min_rate=st.floats(5e-324, 1e308),
    batches=st.lists(st.tuples(ANY, ANY, ANY, ANY), max_size=20),
)
def test_no_input_whatever_makes_a_rate_that_is_no_number(gains, min_rate, batches):
    p, i, d = gains
    pid = estimator(proportional=p, integral=i, derivative=d, min_rate=min_rate)
    for batch in batches:
        rate = pid.compute(seen(*batch))
        assert rate is None or (math.isfinite(rate) and rate >= min_rate)


def test_a_driver_whose_clock_is_set_back_gets_new_rates():
    world = BackpressureWorld()
    world.start()
    rates = []
    for number, (rate, back_s) in enumerate([(1000, 0)] * 3 + [(500, 3600)] * 2):
        end, records = 1000 * number, 1000
        world.pass_ms(INTERVAL_MS)
        timestamp = stamp(EPOCH_S + world.now_ms / 1000 - back_s)
        took_ms = records * 1000 // rate
        sizes = {"rows": records, "took_ms": took_ms, "timestamp": timestamp}
        world.send(
            "progress", batch=batch_document(number, {0: end}, {0: end + records}, "t", **sizes)
        )
        rates.append(world.query_backpressure.rate)
    assert rates[2:] == [1000, 1000, 500], "the first one on another clock is the first"
