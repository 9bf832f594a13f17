"""Bounds that change while clients are at them: no time gets more than the bounds of it allow."""

import itertools
from dataclasses import replace

import pytest
from closed_loop import (
    CONSUMER,
    MB,
    PRODUCER,
    WINDOW_MS,
    ClosedLoop,
    Consumer,
    Producer,
    consumers,
    make_manager,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from parts.quota_world import QuotaWorld

from proxy.quota.entities import DEFAULT
from proxy.quota.gate import GateWaiter
from proxy.quota.rules import Budget, QuotaManagerSettings, Rule, Share

SETTLED_MS = 20_000.0
LONGEST_WINDOW = 1.1
LEAST_SHARE = 0.9
SECOND_MS = 1000.0
STEP_MS = 100.0

CLIENTS = {
    "1 connection, 16 KiB": (1, 16_384, 16_384, False),
    "1 connection, 1 MiB": (1, 1 << 20, 16_384, False),
    "4 connections, 1 MiB": (4, 1 << 20, 16_384, False),
    "50 connections, 1 MiB": (50, 1 << 20, 16_384, False),
    "300 connections, 1 MiB": (300, 1 << 20, 4096, False),
    "4 connections, 1 MiB, mute": (4, 1 << 20, 16_384, True),
    "50 connections, 1 MiB, mute": (50, 1 << 20, 16_384, True),
    "1 producer": (1, 0, 100_000, False),
    "50 producers": (50, 0, 200_000, False),
}


def world_at(bound: float, client: str = "4 connections, 1 MiB", **more) -> ClosedLoop:
    """Return a world whose client takes all that it gets, and has done so for a while."""
    world = ClosedLoop(make_manager(bound, **more))
    world.bounds.append((0.0, bound))
    connections, asked, batch_bytes, mutes = CLIENTS[client]
    if asked:
        consumers(world, connections, asked, batch_bytes=batch_bytes, mutes=mutes)
    else:
        for number in range(connections):
            world.at(0.1 * number, Producer(world, batch_bytes).ask)
    world.run(SETTLED_MS)
    return world


def owed_bytes(world: ClosedLoop) -> float:
    """What was charged and is not delivered."""
    return sum(
        meter.pacer.debt_ms(world.now_ms) * meter.pacer.bound / 1000
        for meter in world.manager.iter_meters()
    )


def check_windows(world: ClosedLoop, begin_ms: float, promised: float = 0.0) -> None:
    """No 11 s from then on have more than 1.1 times what the bounds allow, and one answer."""
    delivered = sorted(world.delivered)
    largest = max(size for _, size in delivered)
    first = total = 0
    for at_ms, size in delivered:
        total += size
        while delivered[first][0] <= at_ms - WINDOW_MS:
            total -= delivered[first][1]
            first += 1
        if at_ms - WINDOW_MS >= begin_ms:
            allowed = LONGEST_WINDOW * world.allowed(at_ms - WINDOW_MS, at_ms)
            assert total <= allowed + largest + promised, f"in the 11 s until {at_ms} ms"


def check_never_below(world: ClosedLoop, bound: float, begin_ms: float, end_ms: float) -> None:
    """No second from then on has less than 0.9 of a bound, but for the time of one answer."""
    delivered = sorted(world.delivered)
    largest_ms = max(size for _, size in delivered) / bound * 1000
    length_ms = SECOND_MS + largest_ms
    start_ms = begin_ms
    while start_ms + length_ms <= end_ms:
        inside = sum(size for at_ms, size in delivered if 0 < at_ms - start_ms <= length_ms)
        assert inside >= LEAST_SHARE * bound * SECOND_MS / 1000, f"from {start_ms} ms on"
        start_ms += STEP_MS


@pytest.mark.parametrize("factor", [1.05, 2, 10])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_raised_bound(client, factor):
    world = world_at(MB, client)
    world.change_bound(factor * MB)
    end_ms = SETTLED_MS + 2 * WINDOW_MS
    world.run(end_ms)
    check_windows(world, SETTLED_MS - WINDOW_MS)
    check_never_below(world, MB, SETTLED_MS, end_ms)
    after = [size for at_ms, size in world.delivered if at_ms > SETTLED_MS + SECOND_MS]
    least = 0.9 if "1 connection, 16" not in client else 0.7  # which does not ask for more
    assert sum(after) >= least * factor * MB * (end_ms - SETTLED_MS - SECOND_MS) / 1000


@pytest.mark.parametrize("every_ms", [500.0, 3000.0])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_bound_that_is_raised_again_and_again(client, every_ms):
    world = world_at(MB, client)
    bound = 1.0 * MB
    for number in range(1, 11):
        before, bound = bound, bound * 1.3
        at_ms = SETTLED_MS + number * every_ms
        world.change_bound(bound)
        world.run(at_ms)
        if every_ms > 2 * SECOND_MS and "1 connection, 16" not in client:  # asks for no more
            check_never_below(world, before, at_ms - every_ms, at_ms)
    world.run(world.now_ms + WINDOW_MS)
    check_windows(world, SETTLED_MS - WINDOW_MS)


@pytest.mark.parametrize("every_ms", [300.0, 1000.0])
@pytest.mark.parametrize("factor", [1.5, 8, 50])
@pytest.mark.parametrize(
    "client", ["4 connections, 1 MiB", "50 connections, 1 MiB", "50 producers"]
)
def test_a_bound_that_goes_up_and_down_gives_its_mean(client, factor, every_ms):
    """What is held when it goes down goes out as it was promised, and is worked off."""
    world = world_at(MB, client)
    promised = 0.0
    for number in range(1, 41):
        if number % 2 == 0:
            promised = max(promised, owed_bytes(world))
        world.change_bound(MB if number % 2 == 0 else factor * MB)
        world.run(SETTLED_MS + number * every_ms)
    check_windows(world, SETTLED_MS - WINDOW_MS, promised)
    passed = sum(size for at_ms, size in world.delivered if at_ms > SETTLED_MS)
    assert passed <= world.allowed(SETTLED_MS, world.now_ms) + promised + (1 << 20)


def test_who_was_held_long_ago_keeps_its_credit_as_well():
    world = world_at(MB)
    now_ms = world.now_ms + 3 * WINDOW_MS
    world.now_ms = now_ms
    world.change_bound(1.01 * MB)
    assert world.client.charge(CONSUMER, 9 * MB, now_ms) is None


@pytest.mark.parametrize("taken", [0.0, 3.0, 9.5])
@pytest.mark.parametrize("factor", [1.01, 10])
def test_who_is_not_held_keeps_its_credit_and_gets_no_further_one(factor, taken):
    """It was quiet, and may take ten seconds' worth: of the bound that there was then."""
    world = ClosedLoop(make_manager(MB))
    world.bounds.append((0.0, MB))
    world.now_ms = SETTLED_MS
    assert world.client.charge(CONSUMER, taken * MB, SETTLED_MS) is None
    world.delivered.append((SETTLED_MS, int(taken * MB)))
    world.change_bound(factor * MB)
    left = 0.0
    while world.client.charge(CONSUMER, 10_000, SETTLED_MS) is None and left < 200 * MB:
        left += 10_000
    assert left == pytest.approx((10 - taken) * MB, rel=0.05, abs=0.1 * MB)
    world.delivered.append((SETTLED_MS, int(left)))
    consumers(world, 4, 1 << 20, start_ms=SETTLED_MS, batch_bytes=16_384)
    world.run(3 * SETTLED_MS)
    check_windows(world, SETTLED_MS - WINDOW_MS)


def test_a_quiet_client_gets_the_credit_of_a_raised_bound_when_the_old_one_is_out_of_sight():
    now_ms = 3 * WINDOW_MS
    world = QuotaWorld(Rule(client_id="c", bounds={CONSUMER: MB}))
    client = world.client_quotas()
    client.charge(CONSUMER, 1000, 0.0)
    world.quotas.update(
        QuotaManagerSettings(rules=(Rule(client_id="c", bounds={CONSUMER: 2.0 * MB}),))
    )
    assert client.charge(CONSUMER, 1000, 1.0) is None
    assert client.charge(CONSUMER, 19 * MB, now_ms) is None
    assert client.charge(CONSUMER, 1000, now_ms + 1) is None


@pytest.mark.parametrize("kind", [CONSUMER, PRODUCER])
def test_a_rule_of_its_own_gives_no_credit_of_a_new_client(kind):
    """An override takes a client out of the sensor that it shared."""
    shared = Rule(client_id_prefix="c", scope="shared", bounds={kind: MB})
    world = QuotaWorld(shared)
    client = world.client_quotas("c-1")
    client.charge(kind, 1000, 0.0)
    own = Rule(client_id="c-1", bounds={kind: 10.0 * MB})
    world.quotas.update(QuotaManagerSettings(rules=(shared, own)))
    charge = client.charge(kind, 10 * MB, 1.0)
    assert charge is not None
    assert charge.delay_ms == 500
    fresh = world.client_quotas("c-2")
    world.quotas.update(
        QuotaManagerSettings(rules=(shared, own, Rule(client_id="c-2", bounds={kind: MB})))
    )
    assert fresh.charge(kind, 9 * MB, 1.0) is None


EACH = Rule(client_id=DEFAULT, bounds={CONSUMER: MB})
ANALYTICS = Budget(name="analytics", bounds={CONSUMER: MB})


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"scope": "shared"}, id="shared"),
        pytest.param({"listener": "default"}, id="with a listener"),
        pytest.param({"share": Share(ANALYTICS)}, id="in a budget"),
        pytest.param({"share": Share(ANALYTICS), "bounds": {}}, id="bound by a budget alone"),
        pytest.param(
            {"share": Share(ANALYTICS), "bounds": {CONSUMER: MB / 2}}, id="with less in a budget"
        ),
    ],
)
def test_what_a_client_took_of_its_bound_is_owed_after_a_change_of_its_sensor(change):
    world = QuotaWorld(EACH)
    clients = [world.client_quotas("c-1"), world.client_quotas("c-1", user="u")]
    assert clients[0].charge(CONSUMER, 10 * MB, 0.0) is None
    assert clients[1].charge(CONSUMER, 1, 0.0) is None
    taken, rule = 0, replace(EACH, **change)
    for now_ms in range(1, int(WINDOW_MS), 100):
        if now_ms % 1000 == 1:
            world.quotas.update(QuotaManagerSettings(rules=(rule,)))
        for client in clients:
            waiter = GateWaiter(lambda _: None)
            if client.admit(CONSUMER, waiter, None, now_ms, holds=True):
                hold = client.charge(CONSUMER, 100_000, now_ms)
                taken += 100_000 if hold is None or hold.due_ms <= WINDOW_MS else 0
            waiter.leave(now_ms)
    assert 0 < taken <= LONGEST_WINDOW * 11 * MB - 10 * MB, "ten seconds' worth was taken before"


def test_others_of_a_shared_sensor_pay_for_no_more_than_a_rate_would_show():
    world = QuotaWorld(EACH)
    heavy, light = world.client_quotas("c-1"), world.client_quotas("c-2")
    heavy.charge(CONSUMER, 1000 * MB, 0.0)
    light.charge(CONSUMER, 1000, 0.0)
    world.quotas.update(QuotaManagerSettings(rules=(replace(EACH, scope="shared"),)))
    heavy.charge(CONSUMER, 0, 1.0)
    (shared,) = heavy.charged
    assert shared.debt_ms(1.0) == shared.span_ms
    light.charge(CONSUMER, 0, 1001.0)
    assert light.charged == heavy.charged
    assert shared.debt_ms(1001.0) == pytest.approx(shared.span_ms - 1000.0)


def test_who_leaves_a_shared_sensor_takes_no_debt_of_others_along():
    shared = Rule(client_id_prefix="c", scope="shared", bounds={CONSUMER: MB})
    world = QuotaWorld(shared)
    heavy, light = world.client_quotas("c-1"), world.client_quotas("c-2")
    heavy.charge(CONSUMER, 100 * MB, 0.0)
    light.charge(CONSUMER, 1000, 0.0)
    world.quotas.update(QuotaManagerSettings(rules=(replace(shared, scope="each"),)))
    assert light.charge(CONSUMER, 1000, 1.0) is None
    assert heavy.charge(CONSUMER, 1000, 1.0) is None, "nobody knows whose the debt is"


def test_a_raise_is_not_made_larger_by_a_pause():
    """Enforced no longer, and again: a credit that a raise does not give is not there either."""
    world = world_at(MB)
    owed = owed_bytes(world)
    world.change_bound(10 * MB)
    rule = Rule(client_id="c", bounds={CONSUMER: 10.0 * MB})
    for enforce in (False, True):
        world.manager.update(QuotaManagerSettings(rules=(rule,), enforce=enforce))
        world.client.charge(CONSUMER, 1, world.now_ms)
    world.run(SETTLED_MS + WINDOW_MS)
    check_windows(world, SETTLED_MS - WINDOW_MS, owed)


def test_a_raised_bound_helps_those_who_wait_at_once():
    world = ClosedLoop(make_manager(1000.0))
    consumers(world, 20, 20_000, batch_bytes=20_000)
    world.run(5000.0)
    before = len(world.holds)
    world.change_bound(10 * MB)
    at_the_bound_ms = 20 * 20_000 / (10 * MB) * 1000
    world.run(5000.0 + at_the_bound_ms)
    assert before < 20 <= len(world.holds)
    assert all(hold_ms <= at_the_bound_ms for _, hold_ms in world.holds[before:20])


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(200, 12_000), st.sampled_from([0.2, 0.5, 0.9, 1.1, 2.0, 5.0, 20.0])),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(list(CLIENTS)),
)
@example([(1000.0, 10.0), (1000.0, 1.0), (1000.0, 10.0)], "50 connections, 1 MiB")
@example([(200.0, 20.0), (200.0, 1.1), (200.0, 0.2)], "1 connection, 16 KiB")
@example([(9400.0, 20.0), (1800.0, 5.0), (1600.0, 0.2)], "1 connection, 16 KiB")
def test_no_sequence_of_bounds_gives_more_than_they_allow(changes, client):
    """And after a raise nobody has less than before, unless earlier answers are worked off."""
    world = world_at(MB, client)
    promised, bound = 0.0, 1.0 * MB
    for length_ms, times in changes:
        before, bound = bound, times * MB
        owed = owed_bytes(world)
        if bound < before:
            promised += owed
        world.change_bound(bound)
        begin_ms = world.now_ms
        world.run(begin_ms + length_ms)
        if bound > before and not promised:
            check_never_below(world, before, begin_ms, world.now_ms)
    world.run(world.now_ms + WINDOW_MS)
    check_windows(world, SETTLED_MS - WINDOW_MS, promised)


def on_and_off(client: str, burst_ms: float, bound: float = MB) -> ClosedLoop:
    """Return a world whose client reads for 7 s and is quiet for 7 s, three times."""
    world = ClosedLoop(make_manager(bound, burst_ms=burst_ms))
    connections, asked, batch_bytes, mutes = CLIENTS[client]
    numbers = itertools.count()
    for round_number in range(3):
        start_ms = 14_000.0 * round_number
        for _ in range(connections):
            ends_ms = start_ms + 7000.0
            if asked:
                ask = Consumer(
                    world, next(numbers), asked, batch_bytes, mutes=mutes, ends_ms=ends_ms
                ).ask
            else:
                ask = Producer(world, batch_bytes, ends_ms=ends_ms).ask
            world.at(start_ms, ask)
    world.run(60_000.0)
    return world


@pytest.mark.parametrize("burst_ms", [0.0, 500.0, 3000.0])
@pytest.mark.parametrize("bound", [MB, 10 * MB])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_burst_that_is_set_is_all_that_passes_at_once(client, bound, burst_ms):
    """Nothing is to be worked off: no answer waits for much longer than it takes by itself."""
    world = on_and_off(client, burst_ms, bound)
    largest = max(size for _, size in world.delivered)
    assert world.most_in(SECOND_MS) <= (LONGEST_WINDOW + burst_ms / 1000) * bound + largest
    assert max(hold_ms for _, hold_ms in world.holds) <= 2000.0 + largest / bound * 1000


def test_a_burst_of_no_key_is_as_with_kafka():
    client = QuotaWorld(Rule(client_id="c", bounds={CONSUMER: MB})).client_quotas()
    assert client.charge(CONSUMER, 10 * MB, 0.0) is None


def test_a_burst_that_is_set_and_unset_at_run_time():
    rule = Rule(client_id="c", bounds={CONSUMER: MB})
    world = QuotaWorld(rule)
    client = world.client_quotas()
    assert client.charge(CONSUMER, 5 * MB, 0.0) is None
    world.quotas.update(QuotaManagerSettings(rules=(rule,), burst_ms=1000.0))
    assert client.charge(CONSUMER, MB, 0.0).delay_ms == 1000, "and the five seconds are forgotten"
    assert client.charge(CONSUMER, 2 * MB, 60_000.0).delay_ms == 1000
    world.quotas.update(QuotaManagerSettings(rules=(rule,)))
    assert client.charge(CONSUMER, 9 * MB, 120_000.0) is not None
    assert client.charge(CONSUMER, 9 * MB, 180_000.0) is None
