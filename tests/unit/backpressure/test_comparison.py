"""Whether backpressure is ever worse than none: jobs that run without it, with pid and with cost.

Each job runs to its end once for each way. Its input ends after a while; completion is when the
last record is processed.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
from backpressure_parts import INTERVAL_MS, rule
from simulated_query import Load, Simulation

MINUTE_MS = 60_000.0
END_MS = 2 * MINUTE_MS
"""When the input of a job ends."""
GIVE_UP_S = 600.0
FAST_MS = 0.1
"""Of a record in one of two tasks: 20,000 records/s, 40,000 in an interval, as the most."""
STATIC = 50_000_000.0
"""The rule's own bound, in bytes per second: 250,000 records/s."""
NO_BOUND = 1e9
"""A min_rate that lets everything in."""
WORSE = 1.1
"""How many times the lag and the completion time without backpressure are allowed."""
WORST = 1.25
"""How many times the highest lag without it is."""
FIRST = 2.05
"""No first batch is longer, in intervals: that of the most expensive job has 2.0 of fixed cost."""
LONG = 1.5
"""A batch is long beyond this many intervals."""

WAYS = {
    "none": {"estimator": "pid", "min_rate": NO_BOUND},
    "pid": {"estimator": "pid"},
    "cost": {"estimator": "cost"},
}


@dataclass(frozen=True)
class Measured:
    mean_lag: float
    max_lag: float
    completion_s: float
    first: float
    """How long the first batch was, in intervals; so are the next."""
    longest: float
    long: int
    """How many batches were."""
    batches: int


def measured(simulation: Simulation) -> Measured:
    took = [batch.took_ms / INTERVAL_MS for batch in simulation.batches]
    done_ms = simulation.batches[-1].end_ms - simulation.start_ms
    return Measured(
        sum(simulation.lags) / len(simulation.lags),
        max(simulation.lags),
        done_ms / 1000 if simulation.is_done else GIVE_UP_S,
        took[0],
        max(took),
        sum(each > LONG for each in took),
        len(took),
    )


def run(load: Load, **settings) -> Measured:
    simulation = Simulation(load, rule(**{"static": STATIC, **settings}))
    simulation.run(GIVE_UP_S)
    return measured(simulation)


def steady(per_s: float, fixed: float = 0.05, each_ms: float = FAST_MS, **load) -> Load:
    """A job with a fixed cost of so many intervals."""
    return Load(
        **{
            "per_s": per_s,
            "cost_ms": lambda _since_start_ms: each_ms,
            "overhead_ms": fixed * INTERVAL_MS,
            "fetch_bytes": 2_000_000,
            "until_ms": END_MS,
            "poll_ms": 10.0,
            **load,
        }
    )


def burst(since_start_ms: float) -> float:
    return 30_000 if since_start_ms >= MINUTE_MS else 0


def triple(since_start_ms: float, per_s: float) -> float:
    return 2 * per_s * max(0.0, since_start_ms - MINUTE_MS) / 1000


def five_times_at_first(batch: int, _since_start_ms: float) -> float:
    return max(1.0, 5.0 - batch)


def slow_minute(_batch: int, since_start_ms: float) -> float:
    return 4.0 if MINUTE_MS / 2 <= since_start_ms < 1.5 * MINUTE_MS else 1.0


def ten_times(since_start_ms: float) -> float:
    return 10 * FAST_MS if since_start_ms >= MINUTE_MS else FAST_MS


def slow_half_minute(_batch: int, since_start_ms: float) -> float:
    return 10.0 if MINUTE_MS <= since_start_ms < 1.5 * MINUTE_MS else 1.0


def pause(batch: int) -> float:
    return 3 * INTERVAL_MS if batch % 20 == 19 else 0.0


def noise(part: float) -> Callable[[int, float], float]:
    drawn = random.Random(7)
    factors = [min(1 + 3 * part, max(1 - 3 * part, drawn.gauss(1, part))) for _ in range(1000)]
    return lambda batch, _since_start_ms: factors[batch % len(factors)]


@dataclass(frozen=True)
class Job:
    load: Callable[[], Load]
    long: int = 0
    """How many batches may be with the cost estimator; ANY where no size fits an interval, or none
    that keeps up."""
    worse: float = WORSE
    """How many times the lag without backpressure is allowed: more is the price of short batches,
    each of which pays its fixed cost."""


ANY = 10**6

JOBS = {
    "no fixed cost": Job(partial(steady, 5000, 0.0)),
    "fixed cost of 0.1 intervals": Job(partial(steady, 5000, 0.1)),
    "of 0.5": Job(partial(steady, 5000, 0.5)),
    "of 0.5, which only longer batches keep up with": Job(partial(steady, 14_000, 0.5), ANY),
    "of 1.1": Job(partial(steady, 5000, 1.1), ANY),
    "of 1.1 and nothing else": Job(partial(steady, 500, 1.1, 0.0001)),
    "of 2.0": Job(partial(steady, 5000, 2.0), ANY),
    "near what it can take": Job(partial(steady, 17_000)),
    "more than it can take": Job(partial(steady, 22_000), 3),
    "30,000 records after a trickle": Job(partial(steady, 10, 0.1, burst=burst)),
    "a backlog": Job(partial(steady, 5000, backlog=500_000)),
    "a backlog, fixed cost of 0.5": Job(partial(steady, 5000, 0.5, backlog=500_000), worse=1.6),
    "a backlog of forty intervals": Job(partial(steady, 2000, backlog=1_600_000)),
    "five times slower at first": Job(partial(steady, 5000, slowness=five_times_at_first), 2),
    "one partition ten times slower": Job(partial(steady, 3000, skew=10.0), 3),
    "a minute four times slower": Job(partial(steady, 4000, slowness=slow_minute)),
    "records ten times slower from a minute on": Job(partial(steady, 5000, cost_ms=ten_times), 1),
    "half a minute ten times slower": Job(partial(steady, 5000, slowness=slow_half_minute), 2),
    "pauses of three intervals": Job(partial(steady, 5000, pause_ms=pause), 4),
    "times differ by 10 %": Job(partial(steady, 12_000, 0.1, slowness=noise(0.1))),
    "times differ by 20 %": Job(partial(steady, 12_000, 0.1, slowness=noise(0.2))),
    "input jumps to three times": Job(
        partial(steady, 4000, 0.1, burst=partial(triple, per_s=4000))
    ),
    "rows counted twice": Job(partial(steady, 5000, 0.5, rows_each=2)),
}


@pytest.mark.parametrize("name", JOBS)
def test_cost_is_never_worse_than_none(name):
    job = JOBS[name]
    none, cost = (run(job.load(), **WAYS[way]) for way in ("none", "cost"))
    assert cost.completion_s <= WORSE * none.completion_s
    assert cost.mean_lag <= job.worse * none.mean_lag
    assert cost.max_lag <= WORST * none.max_lag
    assert cost.long <= job.long
    assert cost.first <= FIRST


@pytest.mark.parametrize("per_s", [3000, 5000, 7000])
@pytest.mark.parametrize("fixed", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("report_ms", [30.0, 700.0])
def test_a_query_that_is_ten_times_slower_has_one_very_long_batch(per_s, fixed, report_ms):
    """It was planned before; of those after it one is a little long. Though reports are late, as
    they are where the driver's machine is busy: look-ups tell how long a batch took.
    """
    load = steady(per_s, fixed, cost_ms=ten_times, report_ms=report_ms)
    cost = run(load, **WAYS["cost"])
    assert cost.longest <= 4
    assert cost.long <= 2


@pytest.mark.parametrize("fixed", [1.5, 2.75, 4.0])
@pytest.mark.parametrize("report_ms", [30.0, 900.0])
def test_a_slow_start_ends_though_the_smallest_batch_takes_longer_than_an_interval(
    fixed, report_ms
):
    """As on a busy driver: all of that time seems to be the records', until there are more."""
    load = partial(steady, 500, fixed, 0.0001, backlog=600, report_ms=report_ms)
    none, cost = (run(load(), **WAYS[way]) for way in ("none", "cost"))
    assert cost.completion_s <= WORSE * none.completion_s
    assert cost.mean_lag <= 1.5 * none.mean_lag


STARVED = ["of 0.5, which only longer batches keep up with", "of 1.1", "of 1.1 and nothing else"]


@pytest.mark.parametrize("name", STARVED)
def test_pid_starves_some_of_them(name):
    """Why it is not the default."""
    none, pid = (run(JOBS[name].load(), **WAYS[way]) for way in ("none", "pid"))
    assert pid.mean_lag > 3 * none.mean_lag


SHORT = {
    # fixed cost in intervals: how many times as long as none, which takes all in one batch
    "a small fixed cost": (0.05, 1.2),
    "half an interval": (0.5, 1.75),
    "nearly an interval": (0.9, 3.7),
    "more than an interval": (1.1, 4.0),
}


@pytest.mark.parametrize(("fixed", "worse"), SHORT.values(), ids=SHORT)
def test_what_short_batches_cost_a_backlog_that_is_bounded_from_the_first(fixed, worse):
    """Each batch pays its fixed cost: that is the price of batches that stay short."""
    load = partial(steady, 0.001, fixed, backlog=500_000, until_ms=1.0)
    none = run(load(), **WAYS["none"])
    cost = run(load(), **WAYS["cost"], initial_rate=2000.0)
    assert cost.completion_s <= worse * none.completion_s
    assert cost.longest <= (LONG if fixed < 1 else 3.0)
