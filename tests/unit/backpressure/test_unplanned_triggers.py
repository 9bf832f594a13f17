"""Runs whose driver plans no batches: nothing is withheld from them, and nothing learnt of them."""

import pytest
from backpressure_parts import INTERVAL_MS, BackpressureWorld, told

REAL_TIME = {"kind": "real_time", "interval_ms": 300_000}
UNHEARD_OF = {"kind": "whenever", "interval_ms": 20}
LOG_END = 50_000


@pytest.mark.parametrize("trigger", [REAL_TIME, UNHEARD_OF], ids=lambda each: each["kind"])
@pytest.mark.parametrize("settings", [{}, {"initial_rate": 100.0}], ids=["learns", "is told"])
def test_nothing_is_withheld(trigger, settings):
    world = BackpressureWorld(**settings)
    world.start(trigger=trigger)
    driver = world.lookups()
    assert told(world, driver, {0: LOG_END}) == {0: LOG_END}
    for end in (1000, 2000, 3000):
        world.pass_ms(INTERVAL_MS)
        world.batch({0: end}, rate=100.0, bytes_read=100_000)
        assert told(world, driver, {0: LOG_END}) == {0: LOG_END}
    document = world.document
    assert (document["clamp"]["on"], document["clamp"]["withheld"]) == (False, 0)
    assert document["clamp"]["why"] == "its trigger plans no batches that could be bounded"
    assert (document["rate"], document["bound"]) == (None, document["static_bound"])


def test_a_later_run_with_a_trigger_that_plans_is_bounded():
    world = BackpressureWorld()
    world.start(trigger=REAL_TIME)
    world.start(trigger={"kind": "processing_time", "interval_ms": INTERVAL_MS})
    driver = world.lookups()
    told(world, driver, {0: 1000})
    world.rated(100.0, {0: 1000})
    assert told(world, driver, {0: LOG_END}) == {0: 1000 + round(100.0 * INTERVAL_MS / 1000)}
