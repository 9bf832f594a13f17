"""From reports to the bound in force: figures, reasons, stops, changes of rules, forgetting."""

import json

import pytest
from backpressure_parts import (
    CLIENT,
    CONSUMER,
    ENTITY,
    IDENTITY,
    INTERVAL_MS,
    LABEL,
    STATIC,
    BackpressureWorld,
    rule,
    tell_earliest,
    told,
)
from parts.sensor_views import sensors_in_use

from proxy.backpressure.backpressure import RETURN_FACTOR, RETURN_STEP_MS
from proxy.progress.query_registry import FORGET_AFTER_MS
from proxy.quota.entities import DEFAULT, ClientIdentity
from proxy.quota.rules import Rule

HOLD_MS = 30_000.0
PLAIN = Rule(client_id=CLIENT, bounds={CONSUMER: STATIC})


def row(world: BackpressureWorld):
    world.client.charge(CONSUMER, 1, world.now_ms)
    (found,) = [
        row for row in sensors_in_use(world.quotas, lambda: world.now_ms) if row.entity == ENTITY
    ]
    return found


def steady(*rules: Rule, rate: float = 2000.0) -> BackpressureWorld:
    """A query that makes one batch per interval and reads 100 bytes for a record."""
    world = begun(*rules)
    for end in (4000, 8000):
        world.pass_ms(INTERVAL_MS)
        world.batch({0: end}, rate=rate, bytes_read=400_000)
    return world


def begun(*rules: Rule) -> BackpressureWorld:
    """A run whose client has connected after its first report."""
    world = BackpressureWorld(*rules)
    world.start()
    assert world.query_backpressure is not None
    return world


def test_before_any_report_the_rules_own_bound_is_in_force():
    world = BackpressureWorld()
    assert world.query_backpressure.bound == STATIC
    seen = row(world)
    assert (seen.bound, seen.static_bound) == (STATIC, STATIC)
    assert seen.reason == "no batch was reported yet"


def test_the_first_report_gives_no_rate():
    world = BackpressureWorld()
    assert world.query_backpressure.rate is None
    world.start()
    world.batch({0: 4000}, ms=1800, bytes_read=400_000)
    assert (world.query_backpressure.rate, world.query_backpressure.bound) == (None, STATIC)
    assert world.document["reason"] == (
        "batch 0: 4,000 records in 1,800 ms: the first of this run, no rate yet"
    )


def test_the_second_report_bounds_the_reading():
    world = steady()
    assert world.query_backpressure.rate == pytest.approx(2000)
    assert world.query_backpressure.measurements.bytes_per_record.value == 100
    seen = row(world)
    assert (seen.bound, seen.static_bound) == (pytest.approx(200_000), STATIC)
    assert seen.reason == "batch 1: 4,000 records in 2,000 ms -> 2,000 records/s of 100 bytes"
    assert world.gauge == pytest.approx(200_000)


def test_time_that_the_proxy_held_the_query_is_left_out():
    world = begun(rule(integral=0.0))
    world.batch({0: 4000}, ms=1000)
    start_ms = world.now_ms
    # Three executors side by side, and a hold that outlasts the batch.
    for begin, end in [(100, 300), (150, 350), (200, 250), (1750, 5000)]:
        world.query_backpressure.record_hold(start_ms + begin, start_ms + end)
    world.pass_ms(1800)
    world.batch({0: 8000}, ms=1800, bytes_read=400_000)
    assert world.query_backpressure.rate == pytest.approx(4000 / 1500 * 1000)
    assert world.document["reason"].startswith(
        "batch 1: 4,000 records in 1,800 ms (held 300 ms left out) -> 2,667 records/s"
    )


def test_the_batch_was_when_the_driver_says_not_when_its_report_came():
    world = begun(rule(integral=0.0))
    world.batch({0: 1000}, ms=1000)
    world.query_backpressure.record_hold(world.now_ms, world.now_ms + 500)
    world.pass_ms(1000 + 700)
    world.batch({0: 2000}, ms=1000, age_ms=700)
    assert world.query_backpressure.rate == pytest.approx(2000)


def test_a_batch_that_was_held_all_the_time_took_a_millisecond():
    world = BackpressureWorld()
    pressure = world.query_backpressure
    world.batch({0: 1000}, ms=1000)
    pressure.record_hold(world.now_ms, world.now_ms + 5000)
    world.pass_ms(2000)
    world.batch({0: 1001}, ms=1000)
    assert world.query_backpressure.rate == pytest.approx(1000)


def test_batches_that_wait_lower_the_rate():
    world = begun()
    world.pass_ms(4000)
    world.batch({0: 4000}, ms=4000)
    world.pass_ms(2000)
    world.batch({0: 6000}, ms=2000)
    # The first took two intervals, so the second would have waited one.
    assert world.query_backpressure.rate == pytest.approx(1000 * (1 - 0.2 * 1))
    assert world.document["waiting_ms"] == 2000


def test_an_idle_query_has_no_batches_waiting():
    world = steady(rate=1000.0)
    assert world.document["waiting_ms"] > 0
    world.send("idle")
    assert world.document["waiting_ms"] == 0


def test_batches_without_records_change_nothing():
    world = steady()
    before = world.document["bound"]
    world.pass_ms(INTERVAL_MS)
    world.batch({0: 8000}, rows=0, ms=50)
    assert world.document["bound"] == before


def test_the_rate_is_capped_outside_of_the_estimator():
    world = steady(rule(max_rate=1500.0), rate=4000.0)
    assert (world.query_backpressure.rate, world.query_backpressure.bound) == (1500.0, 150_000.0)
    assert world.document["reason"].endswith("-> 4,000 records/s of 100 bytes, at most 1,500")


def test_the_rate_does_not_fall_below_the_lowest():
    world = steady(rule(min_rate=500.0), rate=10.0)
    assert world.query_backpressure.rate == 500.0


def test_the_bound_is_never_above_the_rules_own():
    world = steady(rule(static=150_000.0), rate=4000.0)
    assert world.query_backpressure.bound == 150_000.0
    assert row(world).bound == 150_000.0
    assert row(world).reason.endswith("; the rule's own bound is lower")


def test_without_the_size_of_a_record_the_rules_own_bound_stays():
    world = begun()
    for end in (1000, 2000):
        world.pass_ms(INTERVAL_MS)
        world.batch({0: end})
    assert (world.query_backpressure.rate, world.query_backpressure.bound) == (1000.0, STATIC)
    assert world.document["reason"].endswith("; the size of a record is not known yet")


def test_what_was_read_before_the_first_report_says_nothing_of_its_size():
    """The proxy may have seen only the end of that batch."""
    world = BackpressureWorld()
    world.start()
    world.batch({0: 1000}, bytes_read=5)
    world.pass_ms(INTERVAL_MS)
    world.batch({0: 2000}, bytes_read=100_000)
    assert world.query_backpressure.measurements.bytes_per_record.value == 100


# When reports stop


def test_when_reports_stop_the_bound_stays_and_then_goes_back_stepwise():
    world = steady()
    world.tick(HOLD_MS)
    assert world.document["bound"] == pytest.approx(200_000)
    world.tick(1000)
    seen = []
    for _ in range(12):
        seen.append(world.document["bound"])
        world.tick(RETURN_STEP_MS)
    steps = [200_000 * RETURN_FACTOR**step for step in range(1, 10)]
    assert seen == [pytest.approx(step) for step in steps] + [STATIC] * 3
    assert row(world).reason == "no report for more than 30 s: the rule's own bound"


def test_each_step_back_has_its_reason():
    world = steady()
    world.tick(HOLD_MS + 1000)
    assert row(world).reason == "no report for more than 30 s: step 1 back to the rule's own bound"
    assert world.document["state"] == "returning"


def test_idle_events_keep_the_bound():
    world = steady()
    for _ in range(6):
        world.tick(HOLD_MS / 2)
        world.send("idle")
    assert world.document["bound"] == pytest.approx(200_000)


def test_when_reports_are_back_the_bound_is_too():
    world = steady()
    world.tick(HOLD_MS + 5000)
    assert world.document["bound"] > 200_000
    world.send("idle")
    assert world.document["bound"] == pytest.approx(200_000)
    assert row(world).reason == "batch 1: 4,000 records in 2,000 ms -> 2,000 records/s of 100 bytes"


def test_how_long_the_bound_stays_is_a_setting():
    world = steady(rule(hold_ms=5000.0))
    world.tick(6000)
    assert world.document["state"] == "returning"


@pytest.mark.parametrize(
    ("error", "why"), [(None, "the query ended"), ("boom", "the query failed")]
)
def test_when_the_run_ends_the_bound_goes_back_at_once(error, why):
    world = steady()
    world.send("terminated", error=error)
    assert world.document["bound"] == pytest.approx(200_000 * RETURN_FACTOR)
    assert world.document["reason"] == f"{why}: step 1 back to the rule's own bound"
    world.tick(60_000)
    assert world.document["bound"] == STATIC


def test_a_new_run_begins_anew():
    world = steady()
    world.start()
    assert world.query_backpressure.rate is None
    assert world.document["reason"].startswith("a new run began: step 1 back")
    world.pass_ms(INTERVAL_MS)
    world.batch({0: 9000}, rate=500.0)
    assert world.query_backpressure.rate is None
    world.pass_ms(INTERVAL_MS)
    world.batch({0: 10_000}, rate=500.0)
    assert world.query_backpressure.rate == pytest.approx(500)
    assert world.document["state"] == "adaptive"


# Changes of the rules


def test_a_lower_bound_set_by_an_operator_holds_and_the_adapted_one_is_not_lost():
    world = steady()
    world.update(rule(static=120_000.0))
    world.tick()
    assert (world.query_backpressure.bound, row(world).bound) == (120_000.0, 120_000.0)
    assert world.gauge == 120_000.0
    world.update(rule())
    world.tick()
    assert world.query_backpressure.bound == pytest.approx(200_000)
    assert row(world).bound == pytest.approx(200_000)


def test_a_rule_that_is_adaptive_no_more_is_back_at_its_own_bound_at_once():
    world = steady()
    world.update(PLAIN)
    assert row(world).bound == STATIC
    assert (row(world).static_bound, row(world).reason) == (None, None)
    world.tick()
    assert world.backpressure.of_client(CLIENT) == []
    assert world.backpressure.of_identity(IDENTITY, world.now_ms) is None
    assert world.gauge is None


def test_a_rule_that_becomes_adaptive_again_begins_anew():
    world = steady()
    world.update(PLAIN)
    world.tick()
    world.update(rule())
    assert (world.query_backpressure.bound, world.query_backpressure.rate) == (STATIC, None)
    assert row(world).bound == STATIC


def test_settings_follow_a_reload():
    world = steady()
    world.update(rule(max_rate=1000.0, hold_ms=1000.0))
    world.tick()
    assert world.document["bound"] == pytest.approx(100_000)
    world.update(rule(min_rate=3000.0, integral=0.0))
    world.tick()
    assert world.document["bound"] == pytest.approx(300_000)


def test_a_reload_that_changes_nothing_changes_nothing():
    world = steady()
    before = world.document
    world.update(rule())
    world.tick()
    assert world.document == before


def test_a_more_special_rule_takes_over():
    world = steady()
    special = Rule(
        client_id=CLIENT, listener="default", bounds={CONSUMER: 5e6}, adaptive=rule().adaptive
    )
    world.update(rule(), special)
    assert world.query_backpressure.entity != ENTITY
    assert world.query_backpressure.bound == 5e6
    assert len(world.backpressure.of_client(CLIENT)) == 1


# Flow control from outside


def test_a_ceiling_lowers_the_bound_and_says_why():
    world = steady()
    world.query_backpressure.set_ceiling(50.0, "stage `join` takes 50 records/s", world.now_ms)
    assert world.document["bound"] == 5000.0
    assert row(world).reason == "stage `join` takes 50 records/s"
    world.query_backpressure.set_ceiling(None, "", world.now_ms)
    assert world.document["bound"] == pytest.approx(200_000)


def test_a_ceiling_holds_before_there_is_a_rate_and_when_reports_stop():
    world = steady()
    world.query_backpressure.set_ceiling(50.0, "slow", world.now_ms)
    world.tick(HOLD_MS + 60_000)
    assert world.document["bound"] == 5000.0
    world.start()
    assert world.document["bound"] == 5000.0


def test_a_ceiling_above_the_rate_changes_nothing():
    world = steady()
    world.query_backpressure.set_ceiling(1e9, "fast", world.now_ms)
    assert world.document["bound"] == pytest.approx(200_000)


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_a_ceiling_is_not_negative(bad):
    with pytest.raises(ValueError, match="ceiling"):
        BackpressureWorld().query_backpressure.set_ceiling(bad, "", 0.0)


# Who is who


def test_only_clients_with_an_adaptive_rule_have_a_pressure():
    world = BackpressureWorld(rule(), Rule(client_id=DEFAULT, bounds={CONSUMER: STATIC}))
    other = ClientIdentity("default", None, "somebody")
    assert world.backpressure.of_identity(other, 0.0) is None
    nameless = ClientIdentity("default", None, None)
    assert world.backpressure.of_identity(nameless, 0.0) is None


def test_each_client_of_a_default_rule_has_its_own():
    adaptive = rule().adaptive
    world = BackpressureWorld(Rule(client_id=DEFAULT, bounds={CONSUMER: STATIC}, adaptive=adaptive))
    first, second = (
        world.backpressure.of_identity(ClientIdentity("default", None, name), 0.0) for name in "ab"
    )
    assert first is not None
    assert second is not None
    assert first is not second
    assert world.backpressure.of_client("a") == [first]


def test_reports_on_clients_that_never_connected_are_nothing_to_it():
    world = BackpressureWorld()
    world.start()
    assert world.backpressure.of_client(CLIENT) == []


def test_a_run_that_was_known_before_the_client_connected_counts():
    world = BackpressureWorld(rule(initial_rate=100.0))
    world.start()
    world.pass_ms(100)
    driver = world.lookups()
    tell_earliest(world, driver, {0: 0})
    assert told(world, driver, {0: 9000}) == {0: 200}


def test_it_is_forgotten_an_hour_after_the_client_is_gone():
    world = steady()
    driver = world.lookups()
    world.pass_ms(2 * FORGET_AFTER_MS)
    world.tick()
    assert len(world.backpressure.of_client(CLIENT)) == 1
    driver.closed()
    world.pass_ms(FORGET_AFTER_MS)
    world.tick()
    assert len(world.backpressure.of_client(CLIENT)) == 1
    world.pass_ms(1)
    world.tick()
    assert world.backpressure.of_client(CLIENT) == []
    assert world.gauge is None


def test_there_is_a_bound_on_how_many_there_are(monkeypatch):
    monkeypatch.setattr("proxy.backpressure.backpressure.MAX_QUERIES", 2)
    adaptive = rule().adaptive
    world = BackpressureWorld(Rule(client_id=DEFAULT, bounds={CONSUMER: STATIC}, adaptive=adaptive))
    made = [
        world.backpressure.of_identity(ClientIdentity("default", None, name), 0.0) for name in "abc"
    ]
    assert [pressure is not None for pressure in made] == [True, True, False]


def test_what_the_driver_is_not_told_of_is_shown():
    """An autoscaler sees no overload in batches that are short: this is its signal."""
    trigger = {"kind": "processing_time", "interval_ms": INTERVAL_MS}
    world = BackpressureWorld()
    world.start(trigger=trigger)
    world.pass_ms(1)
    driver = world.lookups()
    tell_earliest(world, driver, {0: 0})
    assert told(world, driver, {0: 10**6}) == {0: 200}
    assert world.document["clamp"]["withheld"] == world.withheld == 10**6 - 200
    world.send("terminated")
    assert world.document["clamp"]["withheld"] == world.withheld == 0
    world.start(trigger=trigger)
    assert told(world, driver, {0: 10**6})[0] < 10**6
    assert world.withheld > 0
    assert told(world, driver, {0: 200}) == {0: 200}
    assert world.withheld == 0


def test_no_gauge_is_left_of_a_query_without_an_adaptive_rule():
    world = steady()
    told(world, world.lookups(), {0: 10**6})
    world.update(Rule(client_id=CLIENT, bounds={CONSUMER: STATIC}))
    world.tick()
    assert (world.gauge, world.withheld) == (None, None)


def test_the_document_can_be_written_as_json():
    world = BackpressureWorld()
    assert json.loads(json.dumps(world.query_backpressure.document(world.now_ms)))["rate"] is None
    shown = json.loads(json.dumps(steady().document))
    assert shown["query"] == LABEL
    assert shown["client_id"] == CLIENT
    assert shown["state"] == "adaptive"
    assert shown["clamp"]["on"] is False
    assert shown["report_age_s"] == 0
