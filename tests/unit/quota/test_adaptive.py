"""A bound that moves below the rule's own: settings, what it survives, and how it paces."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parts.quota_world import QuotaWorld, sensor_collector

from proxy.quota.entities import DEFAULT, QuotaKind
from proxy.quota.meter import LONGEST_HOLD, SAVED_INTERVALS, AdaptedBound
from proxy.quota.rules import AdaptiveSettings, QuotaManagerSettings, Rule

CONSUMER = QuotaKind.CONSUMER_BYTE_RATE
PRODUCER = QuotaKind.PRODUCER_BYTE_RATE
HOUR_MS = 3_600_000.0
KB = 1000
STATIC = 1000.0 * KB
ENTITY = "client-id=c"
INTERVAL_MS = 2000.0
SAVED_MS = SAVED_INTERVALS * INTERVAL_MS
"""How much of its time a query may save."""
LONGEST_MS = LONGEST_HOLD * INTERVAL_MS
BURST_S = 11
"""What a client that was idle may read at once: the time that a sensor looks back on."""
WHY = "batch 7: 100 records in 50 ms -> 2,000 records/s"


def adaptive(**settings) -> AdaptiveSettings:
    return AdaptiveSettings(**{"batch_interval_ms": INTERVAL_MS, **settings})


def rule(bound=STATIC, *, moves=True, interval_ms=INTERVAL_MS, **keys) -> Rule:
    return Rule(
        **(keys or {"client_id": "c"}),
        bounds={CONSUMER: bound, PRODUCER: bound},
        adaptive=adaptive(batch_interval_ms=interval_ms) if moves else None,
    )


class AdaptiveWorld(QuotaWorld):
    """One client, by default under an adaptive rule."""

    def __init__(self, *rules: Rule, **settings):
        super().__init__(*(rules or (rule(),)), **settings)
        self.client = self.client_quotas()

    def update(self, *rules: Rule) -> None:
        self.quotas.update(QuotaManagerSettings(rules=rules))

    def adapt(self, bound, now_ms, reason=WHY, entity=ENTITY, kind=CONSUMER) -> None:
        adapted = None if reason is None else AdaptedBound(bound, reason)
        self.quotas.adapt(kind, entity, adapted, now_ms)

    def row(self, now_ms=0.0, entity=ENTITY, kind=CONSUMER):
        (row,) = [row for row in self.rows(now_ms) if (row.entity, row.kind) == (entity, kind)]
        return row

    def brake_ms(self, now_ms):
        brake = self.client.meters[CONSUMER].brake
        return brake.due_ms - now_ms

    def read(self, now_ms, size=1, kind=CONSUMER):
        return self.client.charge(kind, size, now_ms)


# Settings


def test_defaults():
    made = AdaptiveSettings()
    assert (made.batch_interval_ms, made.estimator) == (None, "cost")
    assert (made.min_rate, made.max_rate, made.initial_rate) == (100.0, None, None)
    assert (made.proportional, made.integral, made.derivative) == (1.0, 0.2, 0.0)
    assert made.hold_ms == 30_000.0


BAD_RULES = [
    ("no consumer byte rate", {"client_id": "c", "bounds": {PRODUCER: 1.0}}, "consumer_byte_rate"),
    ("shared", {"client_id": "c", "scope": "shared", "bounds": {CONSUMER: 1.0}}, "scope"),
    ("no client", {"user": "alice", "bounds": {CONSUMER: 1.0}}, "client-id"),
    ("listener only", {"listener": "l", "bounds": {CONSUMER: 1.0}}, "client-id"),
]


@pytest.mark.parametrize(
    ("keys", "message"), [row[1:] for row in BAD_RULES], ids=[row[0] for row in BAD_RULES]
)
def test_rules_that_cannot_be_adaptive(keys, message):
    with pytest.raises(ValueError, match=message):
        Rule(adaptive=adaptive(), **keys)


@pytest.mark.parametrize("keys", [{"client_id": DEFAULT}, {"client_id_prefix": "etl-"}])
def test_rules_for_many_clients_can(keys):
    assert rule(**keys).adaptive is not None


# In force


def test_without_an_interval_the_rule_has_no_brake():
    """Batches are shaped where they are planned; how much one may read at once is not known."""
    world = AdaptiveWorld(rule(interval_ms=None))
    world.adapt(200.0 * KB, 0)
    assert [world.read(0, STATIC) for _ in range(4)] == [None] * 4
    assert world.row().bound == 200.0 * KB


def test_the_lower_bound_is_in_force_at_once():
    world = AdaptiveWorld()
    world.read(0)
    world.adapt(200.0 * KB, 0)
    row = world.row()
    assert (row.bound, row.static_bound, row.reason) == (200.0 * KB, STATIC, WHY)
    world.prometheus.register(sensor_collector(world.quotas, lambda: 0.0))
    labels = {"quota_entity": ENTITY, "quota": str(CONSUMER)}
    shown = world.prometheus.get_sample_value("kafka_quota_proxy_bound_bytes", labels)
    assert shown == 200.0 * KB


def test_it_is_never_above_the_rules_own():
    world = AdaptiveWorld()
    world.read(0)
    world.adapt(5 * STATIC, 0)
    assert world.row().bound == STATIC


def test_without_a_bound_the_rules_own_is_in_force_and_says_why():
    world = AdaptiveWorld()
    world.read(0)
    world.adapt(200.0 * KB, 0)
    world.adapt(None, 0, "the query ended")
    row = world.row()
    assert (row.bound, row.reason) == (STATIC, "the query ended")


def test_forgotten():
    world = AdaptiveWorld()
    world.read(0)
    world.adapt(200.0 * KB, 0)
    world.adapt(None, 0, None)
    row = world.row()
    assert (row.bound, row.static_bound, row.reason) == (STATIC, STATIC, None)


def test_only_the_entity_is_adapted_and_only_its_reading():
    world = AdaptiveWorld(rule(client_id=DEFAULT))
    other = world.client_quotas("d")
    other.charge(CONSUMER, 1, 0)
    world.read(0)
    world.read(0, kind=PRODUCER)
    world.adapt(200.0 * KB, 0)
    assert world.row().bound == 200.0 * KB
    assert world.row(entity="client-id=d").bound == STATIC
    produced = world.row(kind=PRODUCER)
    assert (produced.bound, produced.static_bound, produced.reason) == (STATIC, None, None)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_bound_is_above_0(bad):
    with pytest.raises(ValueError, match="above 0"):
        AdaptiveWorld().adapt(bad, 0)


# What it survives


def test_it_may_come_before_the_first_byte():
    world = AdaptiveWorld()
    world.adapt(200.0 * KB, 0)
    world.read(0)
    assert world.row().bound == 200.0 * KB


def test_it_survives_an_update_of_the_rules():
    world = AdaptiveWorld()
    world.read(0)
    world.adapt(200.0 * KB, 0)
    world.update(rule(), rule(client_id="d"))
    world.read(10)
    assert (world.row(10).bound, world.row(10).reason) == (200.0 * KB, WHY)


def test_it_survives_the_sensor():
    world = AdaptiveWorld()
    world.read(0)
    world.adapt(200.0 * KB, 0)
    assert sum(world.quotas.expiring(2 * HOUR_MS)) == 1
    assert world.rows(2 * HOUR_MS) == []
    world.read(2 * HOUR_MS)
    assert (world.row(2 * HOUR_MS).bound, world.row(2 * HOUR_MS).reason) == (200.0 * KB, WHY)


def test_a_lower_bound_of_the_rule_is_in_force_while_it_is_lower():
    world = AdaptiveWorld()
    world.read(0)
    world.adapt(200.0 * KB, 0)
    world.update(rule(50.0 * KB))
    world.read(10)
    assert (world.row(10).bound, world.row(10).static_bound) == (50.0 * KB, 50.0 * KB)
    world.adapt(20.0 * KB, 20)
    assert world.row(20).bound == 20.0 * KB
    world.adapt(200.0 * KB, 30)
    world.update(rule())
    world.read(40)
    assert world.row(40).bound == 200.0 * KB


def test_it_counts_only_while_the_rule_is_adaptive():
    world = AdaptiveWorld()
    world.read(0)
    world.adapt(200.0 * KB, 0)
    world.update(rule(moves=False))
    world.read(10)
    row = world.row(10)
    assert (row.bound, row.static_bound, row.reason) == (STATIC, None, None)


def test_clients_that_share_a_sensor_are_not_adapted():
    world = AdaptiveWorld(rule(client_id=DEFAULT), max_client_entities=1)
    world.client_quotas("first").charge(CONSUMER, 1, 0)
    world.adapt(200.0 * KB, 0)
    world.read(0)
    assert world.row(entity="other").bound == STATIC


# How it paces


def batches(world, size, responses, start_ms, count, interval_ms=INTERVAL_MS):
    """Read batches as a query does, each as fast as it goes; return the longest hold."""
    longest = 0.0
    for number in range(count):
        now_ms = start_ms + number * interval_ms
        for _ in range(responses):
            charge = world.read(now_ms, size / responses)
            if charge is not None:
                longest = max(longest, charge.delay_ms)
                now_ms = charge.due_ms
    return longest


def test_a_batch_of_one_intervals_bytes_is_not_held():
    world = AdaptiveWorld()
    world.adapt(200.0 * KB, 0)
    assert batches(world, 400 * KB, 10, 0, 50) == 0


@pytest.mark.parametrize("interval_ms", [500.0, 10_000.0, 60_000.0])
def test_whatever_the_interval(interval_ms):
    """Also where it is longer than the time that a sensor looks back on."""
    world = AdaptiveWorld(rule(100 * STATIC, interval_ms=interval_ms))
    world.adapt(200.0 * KB, 0)
    size = 200 * KB * interval_ms / 1000
    assert batches(world, size, 10, 0, 30, interval_ms) == 0


def test_a_query_that_uses_part_of_its_bound_is_not_held_either():
    world = AdaptiveWorld(rule(interval_ms=60_000.0))
    world.adapt(200.0 * KB, 0)
    assert batches(world, 200 * KB * 60 * 0.8, 10, 0, 30, 60_000.0) == 0


def test_a_fall_does_not_hold_the_next_batch():
    """Nor does a rise: what a query has saved is time, in which it may read the next batch."""
    world = AdaptiveWorld()
    world.adapt(800.0 * KB, 0)
    now_ms = 0.0
    for bound in (800, 200, 180, 700, 100, 800):
        world.adapt(bound * 1.0 * KB, now_ms)
        assert batches(world, bound * KB * 2, 4, now_ms, 5) == 0
        now_ms += 5 * INTERVAL_MS


def test_more_than_that_is_slowed_a_little_at_a_time():
    """Spark reads ahead: one response may serve many batches, and none may wait for long."""
    world = AdaptiveWorld()
    world.adapt(200.0 * KB, 0)
    holds = [world.read(0, 1000 * KB) for _ in range(4)]
    waited = [charge.delay_ms if charge is not None else 0 for charge in holds]
    assert waited == [0, LONGEST_MS, LONGEST_MS, LONGEST_MS]


def test_the_rules_own_bound_is_kept_all_the_same():
    """Twenty connections that wait a little each would read more than that."""
    world = AdaptiveWorld(max_delay_ms=10 * HOUR_MS)
    world.adapt(200.0 * KB, 0)
    ready_ms, total = [0.0] * 20, 0
    while (now_ms := min(ready_ms)) < 120_000:
        charge = world.read(now_ms, STATIC)
        total += STATIC
        ready_ms[ready_ms.index(now_ms)] = charge.due_ms if charge is not None else now_ms + 1
    longest_response_s = 20
    assert total / STATIC == pytest.approx(120 + BURST_S, abs=longest_response_s)


def test_what_is_owed_when_the_bound_rises_takes_less_time():
    world = AdaptiveWorld(rule(interval_ms=HOUR_MS))
    world.adapt(100.0 * KB, 0)
    world.read(0, 0)
    saved_ms = SAVED_INTERVALS * HOUR_MS
    world.read(0, 100 * KB / 1000 * (saved_ms + 60_000))
    assert world.brake_ms(0) == pytest.approx(60_000)
    world.adapt(400.0 * KB, 0)
    assert world.brake_ms(0) == pytest.approx(15_000)


def test_what_is_owed_survives_a_change_of_the_rules():
    """The sensor has forgotten it long before: it looks back on eleven seconds."""
    world = AdaptiveWorld()
    world.adapt(10.0 * KB, 0)
    world.read(0, 1000 * KB)
    world.update(rule())
    minute_ms = 60_000.0
    assert sum(world.quotas.expiring(minute_ms)) == 0
    assert world.read(minute_ms).delay_ms == LONGEST_MS


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.floats(1, 5000),
            st.sampled_from([10.0 * KB, 200.0 * KB, 999.0 * KB]),
            st.integers(0, 200_000),
        ),
        min_size=1,
        max_size=25,
    )
)
def test_each_response_waits_for_what_was_read_before_it(steps):
    """A second bookkeeping: milliseconds owed (or saved, below 0) of reading at the bound."""
    world = AdaptiveWorld(rule(1e12))
    now_ms, owed_ms, before = 0.0, -math.inf, None
    for elapsed_ms, bound, size in steps:
        now_ms += elapsed_ms
        owed_ms -= elapsed_ms
        world.adapt(bound, now_ms)
        if owed_ms > 0 and before is not None:
            owed_ms *= before / bound
        before = bound
        owed_ms = max(owed_ms, -SAVED_MS)
        charge = world.read(now_ms, size)
        waited_ms = charge.delay_ms if charge is not None else 0
        assert waited_ms == pytest.approx(min(max(0.0, owed_ms), LONGEST_MS), abs=1)
        owed_ms += size / bound * 1000
        if size % 2:  # the next request comes only after this response
            now_ms += waited_ms
            owed_ms -= waited_ms
