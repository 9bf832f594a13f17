"""Clients that go to several members: no more than from one, and what they owe goes with them."""

import heapq
import json
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from parts.quota_world import QuotaWorld

from proxy.quota import manager
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.manager import SensorDebt
from proxy.quota.pacer import LARGE_DEBT_MS, MAX_CARRY_MS
from proxy.quota.rules import DEFAULT_BURST_MS as BURST_MS
from proxy.quota.rules import Rule

CONSUMER, PRODUCER, TIME, *_ = QuotaKind
BYTES = (CONSUMER, PRODUCER)
MB = 1_000_000
BOUND = 1.0 * MB
EXCHANGE_MS = 100.0
BROKER_MS = 2.0
SPAN_MS = 11_000.0
CLIENT = ClientIdentity("default", None, "c")


def world(*, paces_new=True, bound=BOUND, kinds=BYTES, **settings):
    rule = Rule(client_id="c", bounds=dict.fromkeys(kinds, bound))
    made = QuotaWorld(rule, **settings)
    made.quotas.paces_new = paces_new
    return made


def flow(members, phases, size, connections):
    """What a client gets that is as greedy as it can be; a list of (time, bytes).

    `phases` are (length in ms, at which members it reads); the first member owns the client, and
    is told each 100 ms what it had at the second.
    """
    owner, visited = (member.quotas for member in members)
    handles = [member.client_quotas() for member in members]
    begin_ms = now_ms = members[0].now_ms
    delivered, visits = [], []
    events = [
        (begin_ms, member * connections + number, member)
        for member in (0, 1)
        for number in range(connections)
    ]
    exchange_ms = begin_ms + EXCHANGE_MS
    for length_ms, used in phases:
        end_ms = now_ms + length_ms
        while now_ms < end_ms:
            at_ms, number, member = events[0]
            now_ms = min(max(at_ms, now_ms), exchange_ms, end_ms)
            if now_ms == exchange_ms:
                exchange_ms += EXCHANGE_MS
                owed_ms = 0.0
                for amount in visits or [0.0]:
                    owed_ms = owner.charge_visit(CLIENT, "ip", CONSUMER, amount, now_ms)
                if visits:
                    visited.owe(CLIENT, CONSUMER, owed_ms, now_ms)
                    visits.clear()
            if at_ms > now_ms:
                continue
            if member not in used:
                heapq.heapreplace(events, (end_ms, number, member))
                continue
            charge = handles[member].charge(CONSUMER, size, now_ms)
            due_ms = charge.due_ms if charge is not None else now_ms
            if member == 1:
                visits.append(size)
            delivered.append((due_ms, size))
            heapq.heapreplace(events, (due_ms + BROKER_MS, number, member))
    return sorted(delivered)


def most_above(delivered):
    """By how many bytes any time carries more than its length at the bound."""
    level = most = 0.0
    before_ms = -math.inf
    for at_ms, size in delivered:
        level = max(level - (at_ms - before_ms) / 1000 * BOUND, 0.0) + size
        most, before_ms = max(most, level), at_ms
    return most


PHASES = st.lists(
    st.tuples(st.sampled_from([100.0, 1000.0, 3000.0]), st.sampled_from([(0,), (1,), (0, 1), ()])),
    min_size=1,
    max_size=8,
)


def longest_away_ms(phases):
    """For how long no member is used that was used before."""
    longest = 0.0
    for member in (0, 1):
        away = -math.inf
        for length_ms, used in phases:
            away = 0.0 if member in used else away + length_ms
            longest = max(longest, away)
    return longest


@given(PHASES, st.sampled_from([1_000, 20_000, 100_000]), st.sampled_from([1, 3]))
def test_both_members_give_no_more_than_one(phases, size, connections):
    """But for the burst, and for what each gives before the other hears of it. Who stays away from
    a member for a window has the formula's credit there again.
    """
    assume(longest_away_ms(phases) < SPAN_MS)
    delivered = flow((world(), world()), phases, size, connections)
    burst = 2 * BURST_MS / 1000 * BOUND
    unheard = 2 * EXCHANGE_MS / 1000 * BOUND + 2 * connections * size
    assert most_above(delivered) <= burst + unheard + 1


def test_the_bound_is_used():
    delivered = flow((world(), world()), [(20_000.0, (0, 1))], 20_000, 2)
    assert sum(size for _, size in delivered) >= 0.95 * 20 * BOUND


def test_a_new_sensor_paces_from_its_first_byte():
    for paces_new, passes in ((True, BURST_MS / 1000 * BOUND), (False, 10 * BOUND)):
        made = world(paces_new=paces_new)
        client = made.client_quotas()
        passed = 0
        while client.charge(CONSUMER, 10_000, made.now_ms) is None:
            passed += 10_000
        assert passed == pytest.approx(passes, rel=0.1)


def test_who_comes_from_another_member_has_no_more_than_its_burst():
    """Its sensor was there before, and has seen nothing since."""
    member = world()
    handle = member.client_quotas()
    handle.charge(CONSUMER, 1.0, member.now_ms)
    member.now_ms += 10 * SPAN_MS
    list(member.quotas.pace_immediately(lambda client: client == CLIENT, lambda: member.now_ms))
    size = 4 * BOUND
    charge = handle.charge(CONSUMER, size, member.now_ms)
    assert charge is not None
    assert charge.due_ms - member.now_ms == pytest.approx(4000.0 - BURST_MS)


def test_by_schedule_a_quiet_client_has_its_burst_and_no_more():
    made = world()
    client = made.client_quotas()
    client.charge(CONSUMER, 1000, made.now_ms)
    made.pass_ms(SPAN_MS / 2)
    assert client.charge(CONSUMER, BOUND, made.now_ms).delay_ms == 1000 - BURST_MS
    made.pass_ms(2 * SPAN_MS)
    assert client.charge(CONSUMER, BOUND, made.now_ms) is None


def test_sensors_without_debt_make_room():
    rule = Rule(client_id="<default>", scope="each", bounds={CONSUMER: BOUND})
    made = QuotaWorld(rule, max_client_entities=2)
    made.quotas.paces_new = True
    for number in range(6):
        client = made.client_quotas(f"client-{number}")
        client.charge(CONSUMER, 1000, made.now_ms)
        client.close()
        made.pass_ms(SPAN_MS * 2)
    assert made.quotas.sensors_of(CLIENT) == ()
    assert not any(meter.is_overflow for meter in made.quotas.iter_meters())


def test_who_is_not_bounded_owes_nothing():
    made = world()
    other = ClientIdentity("default", None, "other")
    assert made.quotas.charge_visit(other, "ip", CONSUMER, 1e9, made.now_ms) == 0
    made.quotas.owe(other, CONSUMER, 1000.0, made.now_ms)
    assert made.quotas.debts(lambda _: True, made.now_ms) == []
    assert made.quotas.clients() == []


def test_a_visit_to_an_observed_quota_is_measured():
    rule = Rule(client_id="c", bounds={CONSUMER: BOUND}, enforce=False)
    made = QuotaWorld(rule)
    client = made.client_quotas()
    assert made.quotas.charge_visit(CLIENT, "ip", CONSUMER, 5e6, made.now_ms) == 0
    (meter,) = made.quotas.iter_meters()
    assert meter.rate.measure(made.now_ms) > 0
    assert client.charge(CONSUMER, 1.0, made.now_ms) is None


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("kind", [CONSUMER, PRODUCER, TIME])
def test_debts_go_with_the_client(kind, connected):
    """Whether it is at the new owner already or not; of time as much as is carried."""
    old, new = (world(kinds=(kind,), bound=100.0 if kind.is_time else BOUND) for _ in "12")
    amount = 15_000.0 if kind.is_time else 1.5 * BOUND
    old.client_quotas().charge(kind, amount, old.now_ms)
    (debt,) = old.quotas.debts(lambda _: True, old.now_ms)
    assert debt.owed_ms == pytest.approx(SPAN_MS if kind.is_time else 1000.0, abs=500.0)
    assert old.quotas.debts(lambda _: False, old.now_ms) == []
    assert SensorDebt.of(json.loads(json.dumps(debt.document()))) == debt

    client = new.client_quotas()
    if connected:
        client.charge(kind, 1.0, new.now_ms)
    new.quotas.take_debts([debt], new.now_ms)
    owed_ms = client.owed_ms(kind, new.now_ms)
    expected_ms = debt.held_ms if kind.is_time else debt.owed_ms  # a large debt goes on slowly
    assert owed_ms == pytest.approx(expected_ms, abs=1.0)
    new.pass_ms(owed_ms)
    assert client.owed_ms(kind, new.now_ms) == 0.0


def test_clients_that_left_still_owe():
    made = world()
    client = made.client_quotas()
    client.charge(CONSUMER, 1.5 * BOUND, made.now_ms)
    client.close()
    (debt,) = made.quotas.debts(lambda identity: identity == CLIENT, made.now_ms)
    assert debt.identity == CLIENT
    made.pass_ms(debt.owed_ms)
    assert made.quotas.debts(lambda _: True, made.now_ms) == []


def test_less_than_is_owed_changes_nothing():
    made = world()
    client = made.client_quotas()
    client.charge(CONSUMER, 1.5 * BOUND, made.now_ms)
    owed_ms = client.owed_ms(CONSUMER, made.now_ms)
    made.quotas.owe(CLIENT, CONSUMER, owed_ms / 2, made.now_ms)
    assert client.owed_ms(CONSUMER, made.now_ms) == owed_ms


def test_a_large_debt_is_worked_off_slowly():
    """And never more than an hour of it, or of time what is carried."""
    made = world(kinds=(CONSUMER, TIME))
    client = made.client_quotas()
    for kind in (CONSUMER, TIME):
        client.charge(kind, 1.0, made.now_ms)
        made.quotas.owe(CLIENT, kind, math.inf, made.now_ms)
    meters = {meter.kind: meter for meter in made.quotas.iter_meters()}
    assert meters[CONSUMER].debt_ms(made.now_ms) == MAX_CARRY_MS
    assert meters[TIME].debt_ms(made.now_ms) == meters[TIME].pacer.carry_ms < MAX_CARRY_MS
    assert client.owed_ms(CONSUMER, made.now_ms) < LARGE_DEBT_MS
    assert client.charge(CONSUMER, 10_000, made.now_ms).delay_ms == 10 * 20


def test_debts_that_nobody_comes_for_are_bounded(monkeypatch):
    monkeypatch.setattr(manager, "MAX_PENDING", 3)
    made = world()
    quotas = made.quotas
    for number in range(10):
        quotas.take_debts([SensorDebt(CLIENT, f"entity-{number}", CONSUMER, 1000.0)], made.now_ms)
        assert len(quotas.debts(lambda _: True, made.now_ms)) == min(number + 1, 3)
    made.pass_ms(2000.0)
    quotas.take_debts([SensorDebt(CLIENT, "late", CONSUMER, 1000.0)], made.now_ms)
    assert len(list(quotas.owing(lambda _: True, lambda: made.now_ms))) == 1


@pytest.mark.parametrize("owed_ms", [-1.0, math.nan])
def test_a_debt_that_cannot_be_is_refused(owed_ms):
    made = world()
    with pytest.raises(ValueError, match="must be 0 or more"):
        made.quotas.owe(CLIENT, CONSUMER, owed_ms, made.now_ms)
