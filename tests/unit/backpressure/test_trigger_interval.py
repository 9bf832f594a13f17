"""The trigger interval, from when batches begin or from what the listener says."""

import pytest
from backpressure_parts import BackpressureWorld, ask, rule, tell_earliest, told

EVERY_750_MS = {"kind": "processing_time", "interval_ms": 750.0}

BATCHES = {
    "batches that fit": ([300, 900, 200, 450], [1000, 1000, 1000, 1000], 1000.0),
    "some take longer and are followed at once": (
        [1500, 300, 300, 300, 300],
        [1500, 500, 1000, 1000, 1000],
        500.0,
    ),
    "some triggers find nothing": ([100, 100, 100, 100], [3000, 1000, 2000, 1000], 1000.0),
    "too few": ([100, 100, 100], [1000, 1000, 1000], None),
    "none that fits": ([1500] * 6, [1500] * 6, None),
}


@pytest.mark.parametrize(("took", "gaps", "learnt"), BATCHES.values(), ids=BATCHES)
def test_it_is_learnt(took, gaps, learnt):
    world = BackpressureWorld(rule(batch_interval_ms=None))
    world.start()
    assert world.query_backpressure.measurements.interval_ms is None
    end = 0
    for took_ms, gap_ms in zip(took, gaps, strict=True):
        end += 100
        world.pass_ms(took_ms)
        world.batch({0: end}, ms=took_ms)
        world.pass_ms(gap_ms - took_ms)
    assert world.query_backpressure.measurements.interval_ms == learnt


def test_what_the_listener_says_counts_and_outlives_the_process():
    world = BackpressureWorld(rule(batch_interval_ms=None))
    assert world.query_backpressure.measurements.interval_ms is None
    world.start(trigger=EVERY_750_MS)
    assert world.query_backpressure.measurements.interval_ms == 750.0
    world.crash()
    assert world.query_backpressure.measurements.interval_ms == 750.0


def test_what_the_rule_says_counts_more():
    world = BackpressureWorld(rule(batch_interval_ms=3000.0))
    world.start(trigger=EVERY_750_MS)
    assert world.query_backpressure.measurements.interval_ms == 3000.0


@pytest.mark.parametrize("estimator", ["cost", "pid"])
def test_a_query_without_a_trigger_goes_on_while_records_come(estimator):
    """Spark says that the interval is 0 s: which one the batches keep to is still to be learnt."""
    world = BackpressureWorld(rule(batch_interval_ms=None, estimator=estimator))
    lookups = world.lookups()
    world.start(trigger={"kind": "processing_time", "interval_ms": 0})
    tell_earliest(world, lookups, {0: 0})
    done = 0
    for number in range(20):
        end = 1000 + 300 * number
        lookups.wait_ms(ask({0: end}, correlation_id=4 * number), world.now_ms)
        read_to = told(world, lookups, {0: end}, correlation_id=4 * number)[0]
        world.pass_ms(300)
        if read_to > done:
            world.batch({0: read_to}, ms=300, bytes_read=100 * (read_to - done))
            done = read_to
    assert done == end
