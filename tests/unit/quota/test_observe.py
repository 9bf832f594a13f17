"""Quotas that are not enforced: all is measured and counted, and nobody waits for anything."""

from dataclasses import replace

import pytest
from parts.quota_world import QuotaWorld, shown_figure

from proxy.quota.client_quotas import ClientQuotas
from proxy.quota.entities import DEFAULT, QuotaKind
from proxy.quota.gate import FetchSizes, GateWaiter
from proxy.quota.meter import AdaptedBound
from proxy.quota.rules import AdaptiveSettings, QuotaManagerSettings, Rule, RuleTable

CONSUMER, PRODUCER, REQUEST, *_ = QuotaKind
MB = 1_000_000
ASKED = 50 * MB
ENTITY = "client-id=c"
RULE = Rule(client_id=DEFAULT, bounds={CONSUMER: MB, PRODUCER: MB, REQUEST: 50.0})
OBSERVED = replace(RULE, enforce=False)
ALL_OBSERVED = QuotaManagerSettings(rules=(RULE,), enforce=False)


def counted(world: QuotaWorld, name: str, kind: QuotaKind = CONSUMER) -> float:
    return shown_figure(world.quotas, name, ENTITY, kind) or 0.0


def goes_on(client: ClientQuotas, now_ms: float, holds: bool = True) -> bool:
    """Whether nothing of a Fetch is held, lowered or kept waiting."""
    waiter = GateWaiter(lambda _: None)
    is_admitted = client.admit(CONSUMER, waiter, None, now_ms, holds=holds)
    return (
        is_admitted
        and client.grant(ASKED, FetchSizes(), now_ms, holds=holds) == (ASKED, None)
        and client.owed_ms(CONSUMER, now_ms) == 0.0
        and not client.is_paced(CONSUMER)
    )


@pytest.mark.parametrize(
    "settings",
    [QuotaManagerSettings(rules=(OBSERVED,)), ALL_OBSERVED],
    ids=["rule", "throttle"],
)
@pytest.mark.parametrize("holds", [True, False], ids=["delay", "mute"])
def test_nothing_is_held_and_all_is_measured(settings: QuotaManagerSettings, holds: bool):
    world = QuotaWorld()
    world.open_quotas(settings)
    client = world.client_quotas()
    assert client.has(CONSUMER)
    assert client.is_bounded, "group members' timeouts are read"
    for second in range(20):
        for kind in (CONSUMER, PRODUCER):
            assert client.charge(kind, 10 * MB, second * 1000.0) is None
        assert client.charge(REQUEST, 5000.0, second * 1000.0) is None
        assert goes_on(client, second * 1000.0, holds)
    rows = {row.kind: row for row in world.rows(19_000.0)}
    assert rows[CONSUMER].rate == pytest.approx(10 * MB, rel=0.1)
    assert rows[REQUEST].rate == pytest.approx(500, rel=0.1)
    for row in rows.values():
        assert (row.enforced, row.throttled, row.holds, row.owed_ms) == (False, False, 0, 0.0)
        assert row.client_count == 1
    assert world.quotas.unbounded() == []


def test_what_would_be_held_is_counted_by_measurement_and_by_second():
    world = QuotaWorld()
    world.open_quotas(ALL_OBSERVED)
    client = world.client_quotas()
    assert client.charge(CONSUMER, 9 * MB, 0.0) is None
    assert counted(world, "would_throttle_total") == 0
    for at_ms in (100.0, 200.0, 300.0, 1100.0):
        client.charge(CONSUMER, 2 * MB, at_ms)
    assert counted(world, "would_throttle_total") == 4
    assert counted(world, "would_throttle_seconds_total") == 2
    assert counted(world, "violations_total") == 4
    assert counted(world, "throttled_responses_total") == 0
    (row,) = world.rows(1200.0)
    assert (row.would_throttle, row.above_s) == (4, 2)
    (row,) = world.rows(120_000.0)
    assert (row.would_throttle, row.above_s) == (0, 0)


@pytest.mark.parametrize("kind", [None, CONSUMER, PRODUCER])
def test_the_relay_may_send_on_at_once(kind: QuotaKind | None):
    rule = Rule(client_id=DEFAULT, bounds={CONSUMER: MB, PRODUCER: MB}, enforce=False)
    client = QuotaWorld(rule).client_quotas()
    client.charge(CONSUMER, MB, 0.0)
    client.charge(PRODUCER, MB, 0.0)
    assert client.lends(kind, GateWaiter(lambda _: None), 0.0)


def test_only_the_quotas_of_the_rule_are_not_enforced():
    world = QuotaWorld(
        Rule(client_id="c", bounds={CONSUMER: MB}, enforce=False),
        Rule(client_id=DEFAULT, bounds={PRODUCER: MB}, number=1),
    )
    client = world.client_quotas()
    assert client.charge(CONSUMER, 100 * MB, 0.0) is None
    assert client.charge(PRODUCER, 100 * MB, 0.0) is not None
    assert world.client_quotas("other").charge(PRODUCER, 100 * MB, 0.0) is not None


def test_who_is_held_waits_for_nothing_once_it_is_not_enforced():
    world = QuotaWorld(RULE)
    client = world.client_quotas()
    woken: list[float] = []
    waiter = GateWaiter(woken.append)
    assert client.charge(CONSUMER, 100 * MB, 0.0) is not None
    assert not client.admit(CONSUMER, waiter, None, 0.0, holds=True)
    woken.clear()
    world.quotas.update(QuotaManagerSettings(rules=(OBSERVED,)))
    assert woken, "it is read again"
    assert client.admit(CONSUMER, waiter, None, 1.0, holds=True)
    assert goes_on(client, 1.0)
    assert client.charge(CONSUMER, MB, 1.0) is None
    (row,) = world.rows(1.0)
    assert (row.owed_ms, row.hold_until_ms, row.enforced) == (0.0, None, False)
    assert row.rate > 100 * MB / 11, "what was measured stays"


def test_what_was_not_enforced_is_not_punished_when_it_is():
    world = QuotaWorld(OBSERVED)
    client = world.client_quotas()
    for second in range(60):
        client.charge(CONSUMER, 20 * MB, second * 1000.0)
    world.quotas.update(QuotaManagerSettings(rules=(RULE,)))
    first = client.charge(CONSUMER, MB / 10, 60_000.0)
    assert first is not None
    assert first.delay_ms == 100, "it is paced from now on, and owes nothing of before"
    total = 0.0
    now_ms = 60_000.0
    while now_ms < 120_000.0:
        charge = client.charge(CONSUMER, MB / 10, now_ms)
        total += MB / 10
        now_ms = charge.due_ms if charge is not None else now_ms
    assert total / 60 == pytest.approx(MB, rel=0.02)


def test_who_is_below_its_bound_is_not_paced_when_it_is_enforced():
    world = QuotaWorld(OBSERVED)
    client = world.client_quotas()
    client.charge(CONSUMER, MB, 0.0)
    world.quotas.update(QuotaManagerSettings(rules=(RULE,)))
    assert client.charge(CONSUMER, MB, 1000.0) is None
    assert not client.is_paced(CONSUMER)


def test_an_adapted_bound_holds_nobody_until_it_is_enforced():
    adaptive = AdaptiveSettings(batch_interval_ms=1000.0)
    rule = Rule(client_id="c", bounds={CONSUMER: 100 * MB}, adaptive=adaptive)
    world = QuotaWorld(replace(rule, enforce=False))
    client = world.client_quotas()
    client.charge(CONSUMER, 1, 0.0)
    world.quotas.adapt(CONSUMER, ENTITY, AdaptedBound(MB / 10, "slow batches"), 0.0)
    for second in range(30):
        assert client.charge(CONSUMER, MB, second * 1000.0) is None
        assert goes_on(client, second * 1000.0)
    (row,) = world.rows(29_000.0)
    assert (row.bound, row.above_s > 0) == (MB / 10, True)
    world.quotas.update(QuotaManagerSettings(rules=(rule,)))
    charges = [client.charge(CONSUMER, MB, 30_000.0 + number) for number in range(5)]
    assert charges[0] is None, "nothing is owed for what was before"
    assert any(charges)


def test_a_lower_bound_holds_nobody_who_is_not_enforced():
    world = QuotaWorld(OBSERVED)
    client = world.client_quotas()
    for second in range(30):
        client.charge(CONSUMER, MB / 2, second * 1000.0)
    lower = replace(OBSERVED, bounds={CONSUMER: MB / 100})
    world.quotas.update(QuotaManagerSettings(rules=(lower,)))
    assert client.charge(CONSUMER, MB / 2, 30_000.0) is None
    assert goes_on(client, 30_000.0)


def test_counts_go_with_the_sensor():
    world = QuotaWorld(OBSERVED)
    client = world.client_quotas()
    client.charge(CONSUMER, 100 * MB, 0.0)
    assert counted(world, "would_throttle_total") == 1
    assert any(world.quotas.expiring(3_600_001.0))
    assert counted(world, "would_throttle_total") == 0
    assert counted(world, "would_throttle_seconds_total") == 0
    client.charge(CONSUMER, 100 * MB, 3_600_002.0)
    assert counted(world, "would_throttle_total") == 1


def test_a_client_says_that_its_rule_is_not_enforced():
    world = QuotaWorld()
    identity = world.client_quotas().identity
    for table, text in (
        (RuleTable((RULE,)), f"applies to {ENTITY}"),
        (RuleTable((OBSERVED,)), f"applies to {ENTITY}, is not enforced"),
        (RuleTable((RULE,), enforce=False), f"applies to {ENTITY}, is not enforced"),
    ):
        assert {each.reason for each in table.explain(identity)} == {text}
