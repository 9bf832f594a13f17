"""The closed loop: real quotas, real progress and a simulated query, for minutes of its time."""

from itertools import pairwise

import pytest
from backpressure_parts import INTERVAL_MS, rule
from simulated_query import BatchSeen, Load, Simulation

from proxy.backpressure.driver_view import REPORT_WAIT_MS

pytestmark = pytest.mark.slow

INPUT = 4000.0
FAST_MS = 0.2
"""Of a record in one of two tasks: 10,000 records/s, of which INPUT is 40 %."""
SLOWER = 4
SLOW_FROM_MS = 40_000.0
SLOW_TO_MS = 90_000.0
END_S = 160.0
LONG = 1.5
"""A batch is long beyond this many intervals."""
LONGEST = 1.75
"""A batch may be as long just after a change."""
SETTLED = 5
"""So many batches after a change the loop has to be settled."""
MIN_RATE = 100.0


def changing(since_start_ms: float) -> float:
    slow = SLOW_FROM_MS <= since_start_ms < SLOW_TO_MS
    return FAST_MS * SLOWER if slow else FAST_MS


def steady(_since_start_ms: float) -> float:
    return FAST_MS


NO_BOUND = 1e9
AMPLE = 100_000_000.0
"""A bound of the rule that no batch comes near, in bytes per second."""


def run(load: Load, seconds: float = END_S, estimator: str = "cost", **settings) -> Simulation:
    simulation = Simulation(
        load, rule(**{"min_rate": MIN_RATE, "static": AMPLE, "estimator": estimator, **settings})
    )
    simulation.run(seconds)
    return simulation


def between(simulation: Simulation, from_ms: float, to_ms: float) -> list[BatchSeen]:
    start_ms = simulation.start_ms
    return [b for b in simulation.batches if from_ms <= b.start_ms - start_ms < to_ms]


def assert_every_record_once(simulation: Simulation) -> None:
    for p, ranges in simulation.read_ranges.items():
        assert ranges[0][0] == 0
        assert all(before[1] == after[0] for before, after in pairwise(ranges))
        assert ranges[-1][1] >= simulation.completed[p]


LOADS = {
    "one thing after the other": {},
    "reading and processing overlap": {"overlaps": True},
    "many partitions": {"partitions": 12, "per_s": 6 * INPUT},
    "reports take a quarter of a second": {"report_ms": 250.0},
    "small responses": {"fetch_bytes": 20_000},
    "responses that hold many batches": {"fetch_bytes": 2_000_000},
    "near what it can take": {"per_s": 8000.0},
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
@pytest.mark.parametrize("estimator", ["cost", "pid"])
def test_batches_follow_what_the_query_can_take(load, estimator):
    """Slower by four for a while: batches stay short, the rate does not collapse, it recovers."""
    load = Load(**{"per_s": INPUT, "cost_ms": changing, **load})
    simulation = run(load, estimator=estimator)
    slow = between(simulation, SLOW_FROM_MS, SLOW_TO_MS)
    assert slow[0].took_ms > LONG * INTERVAL_MS
    assert max(b.took_ms for b in slow[SETTLED:]) <= LONG * INTERVAL_MS
    after = between(simulation, SLOW_TO_MS, END_S * 1000)
    assert max(b.took_ms for b in after) <= LONGEST * INTERVAL_MS
    assert max(b.took_ms for b in after[SETTLED:]) <= LONG * INTERVAL_MS
    fast_rate = slow[0].rate
    assert fast_rate is not None
    # No spiral: never far below the quarter that is left.
    rates = [b.rate for b in (*slow, *after) if b.rate is not None]
    assert min(rates) > 0.5 * fast_rate / SLOWER > 2 * MIN_RATE
    recovered = after[SETTLED].rate
    assert recovered is not None
    assert recovered >= 0.9 * fast_rate
    assert_every_record_once(simulation)


def test_what_waited_is_caught_up_with():
    simulation = run(Load(INPUT, changing))
    assert simulation.lag <= 2.5 * INPUT * INTERVAL_MS / 1000


def test_the_bound_holds_no_batch_that_has_the_right_size():
    """Else held time would hide processing time, and the rate would swing: see quota.Meter."""
    assert run(Load(INPUT, changing)).held_ms == 0
    assert run(Load(INPUT, changing, overlaps=True)).held_ms == 0


def test_without_the_clamp_batches_grow():
    """A bound that only holds makes a batch longer and the next one bigger."""
    simulation = run(Load(INPUT, changing, clamps=False))
    slow = between(simulation, SLOW_FROM_MS, SLOW_TO_MS)
    assert max(b.took_ms for b in slow) > 5 * INTERVAL_MS
    assert simulation.held_ms > 0
    assert_every_record_once(simulation)


def test_without_the_clamp_it_still_recovers():
    """The time in which it was held is left out, or the rate would stay where the bound is."""
    simulation = run(Load(INPUT, changing, clamps=False), 240.0)
    last = simulation.batches[-1]
    assert last.rate is not None
    assert last.rate > 2 * INPUT
    assert last.took_ms < INTERVAL_MS


def test_a_steady_query_is_left_alone():
    simulation = run(Load(INPUT, steady), 60.0)
    settled = simulation.batches[3:]
    assert {b.records for b in settled} <= set(range(7990, 8011))
    assert simulation.held_ms == 0


def test_a_long_first_batch_does_not_keep_the_rate_at_its_lowest():
    """Hundreds of intervals of work before there is a rate, and no debt for it afterwards."""
    simulation = run(Load(INPUT, steady, backlog=1_000_000), 300.0, initial_rate=NO_BOUND)
    bounded = [b for b in simulation.batches if b.rate is not None]
    assert simulation.batches[0].took_ms > 40 * INTERVAL_MS
    assert max(b.took_ms for b in bounded) <= LONG * INTERVAL_MS
    assert all(b.rate is not None and b.rate > 10 * MIN_RATE for b in bounded)
    assert bounded[2 * SETTLED].rate == pytest.approx(9700, rel=0.15)


@pytest.mark.parametrize("estimator", ["cost", "pid"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_query_of_which_nothing_is_known_has_no_long_batch_either(overlaps, estimator):
    """It starts slowly, and is at its full size a few batches later."""
    load = Load(INPUT, steady, backlog=1_000_000, overlaps=overlaps)
    simulation = run(load, 120.0, estimator=estimator)
    assert max(b.took_ms for b in simulation.batches) <= LONG * INTERVAL_MS
    assert simulation.batches[0].records == MIN_RATE * INTERVAL_MS / 1000
    assert simulation.batches[2 * SETTLED].rate == pytest.approx(9700, rel=0.15)
    assert_every_record_once(simulation)


def test_what_comes_in_is_not_held_back_by_a_slow_start():
    """Not while the first report is late, and not after it."""
    simulation = run(Load(INPUT, steady, report_ms=5000.0), 30.0)
    assert {b.records for b in simulation.batches[1:]} <= set(range(7990, 8011))


def test_with_an_initial_rate_there_is_no_long_batch_at_all():
    load = Load(INPUT, steady, backlog=1_000_000)
    simulation = run(load, 60.0, initial_rate=2000.0)
    assert max(b.took_ms for b in simulation.batches) <= LONG * INTERVAL_MS
    assert_every_record_once(simulation)


def test_a_rule_that_lets_it_read_less_than_it_can_take_makes_no_long_batches():
    load = Load(1500.0, steady, backlog=50_000)
    simulation = run(load, 120.0, static=400_000.0)
    bounded = [b for b in simulation.batches if b.rate is not None]
    assert max(b.took_ms for b in bounded) <= LONG * INTERVAL_MS
    assert simulation.lag <= 2.5 * 1500 * INTERVAL_MS / 1000


@pytest.mark.parametrize("overlaps", [False, True])
def test_nor_does_one_that_its_rule_lets_read_nothing_like_that(overlaps):
    """Reading beside processing makes the time held mean less; batches still do not grow."""
    load = Load(1900.0, changing, backlog=50_000, overlaps=overlaps)
    simulation = run(load, 240.0, static=400_000.0)
    bounded = [b for b in simulation.batches if b.rate is not None]
    *others, longest = sorted(b.took_ms for b in bounded)
    assert longest <= 2 * INTERVAL_MS, "once its fixed time may be taken for more than it is"
    assert others[-1] <= LONG * INTERVAL_MS
    assert_every_record_once(simulation)


def test_reports_that_come_too_late_cost_a_trigger_and_no_more():
    simulation = run(Load(INPUT, changing, report_ms=REPORT_WAIT_MS + 400))
    slow = between(simulation, SLOW_FROM_MS, SLOW_TO_MS)
    assert max(b.took_ms for b in slow[SETTLED:]) <= LONG * INTERVAL_MS
    assert_every_record_once(simulation)


@pytest.mark.parametrize("backlog", [10_000, 1_000_000, 10_000_000], ids="{:,}".format)
def test_a_quiet_partition_beside_a_backlog_waits_for_one_batch_at_most(backlog):
    """Its record is in the first batch that is planned after it came, however much lies beside."""
    quiet, every_ms = 1, 3 * INTERVAL_MS
    load = Load(INPUT, steady, backlog=backlog, quiet_every_ms=every_ms)
    simulation = run(load, 60.0, initial_rate=2000.0)
    for number in range(int(60_000 / every_ms) - 1):
        came_ms = simulation.start_ms + (number + 1) * every_ms
        first = next(b for b in simulation.batches if b.start_ms >= came_ms)
        assert first.ends[quiet] == number + 1
    assert_every_record_once(simulation)
