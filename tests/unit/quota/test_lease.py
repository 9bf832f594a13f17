"""What a lease lets pass is charged as it would have been one by one, and never held."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parts.quota_world import QuotaWorld, figures_of, taken

from proxy.quota.entities import DEFAULT, QuotaKind
from proxy.quota.gate import GRANT_MS, FetchSizes, GateWaiter, InFlightFetch
from proxy.quota.meter import AdaptedBound
from proxy.quota.rules import AdaptiveSettings, QuotaManagerSettings, Rule
from proxy.quota.values import MAX_SIZE_BYTES

CONSUMER = QuotaKind.CONSUMER_BYTE_RATE
REQUEST = QuotaKind.REQUEST_PERCENTAGE
BOUND = 1e6
CONNECTIONS = 3
ASKED_BYTES = 100_000
HOUR_MS = 3_600_000.0
WINDOWS_MS = 10_000.0


class FetchWorld(QuotaWorld):
    """Connections of one client that fetch, and all that the quotas say to it.

    With `leases` an answer is taken from a lease that is large enough. `holds`: responses are held.
    """

    def __init__(self, *, leases: bool, holds: bool = True) -> None:
        super().__init__(rule(BOUND))
        self.leases, self.holds = leases, holds
        self.client = self.client_quotas()
        self.woken: list[tuple[int, float]] = []
        self.waiters = [
            GateWaiter(lambda at_ms, number=number: self.woken.append((number, at_ms)))
            for number in range(CONNECTIONS)
        ]
        self.in_flight = [deque() for _ in self.waiters]
        self.sizes = FetchSizes(0)
        self.passed = 0

    def ask(self, number: int, asked_bytes: int, now_ms: float) -> object:
        waiter, client, holds = self.waiters[number], self.client, self.holds
        if self.leases and client.lends(CONSUMER, waiter, now_ms):
            self.passed += 1
            granted_bytes, expected = self.grant(asked_bytes, now_ms)
            self.in_flight[number].append(expected)
            return granted_bytes
        if not client.admit(CONSUMER, waiter, None, now_ms, holds=holds):
            return "waits"
        waiter.since_ms = None
        granted_bytes, expected = self.grant(asked_bytes, now_ms)
        self.in_flight[number].append(expected)
        return granted_bytes

    def grant(self, asked_bytes: int, now_ms: float) -> tuple[int, InFlightFetch | None]:
        return self.client.grant(asked_bytes, self.sizes, now_ms, holds=self.holds)

    def answer(self, number: int, size: int, now_ms: float) -> object:
        """Also where nothing was asked for, so that much can be charged at once."""
        expected = self.in_flight[number].popleft() if self.in_flight[number] else None
        if expected is not None:
            expected.answered(size)
        if self.leases and self.takes(number, size, now_ms):
            self.passed += 1
            self.quotas.take_back(now_ms, are_all=True)
            return None
        return self.client.charge(CONSUMER, size, now_ms)

    def takes(self, number: int, size: int, now_ms: float) -> bool:
        """Take an answer from the lease if that is large enough."""
        if not self.client.lends(CONSUMER, self.waiters[number], now_ms):
            return False
        lease = self.client.lease(CONSUMER)
        return lease is None or taken(lease, size, now_ms)


def rule(consumer: float | None, *, timed: bool = False, adaptive: bool = False) -> Rule:
    bounds = {CONSUMER: consumer, REQUEST: 1e6 if timed else None}
    return Rule(
        client_id=DEFAULT,
        bounds={kind: bound for kind, bound in bounds.items() if bound is not None},
        scope="each",
        adaptive=AdaptiveSettings(batch_interval_ms=1000.0) if adaptive else None,
    )


CHANGES = {
    "lower": (rule(BOUND / 100),),
    "higher": (rule(BOUND * 100),),
    "same": (rule(BOUND),),
    "timed": (rule(BOUND, timed=True),),
    "adaptive": (rule(BOUND, adaptive=True),),
    "no rule": (),
}
STEPS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.4, 90.0, 1000.0, 12_000.0, HOUR_MS]),
        st.sampled_from(["ask", "answer", "answer", "ask", "change", "adapt", "expire"]),
        st.integers(0, CONNECTIONS - 1),
        st.sampled_from([100, 200_000, 3_000_000, 30_000_000]),
        st.sampled_from(sorted(CHANGES)),
    ),
    max_size=40,
)


@settings(max_examples=500)
@given(
    steps=STEPS,
    first=st.sampled_from(sorted(CHANGES)),
    holds=st.booleans(),
    burst_ms=st.sampled_from([None, 0.0, 500.0]),
)
def test_the_same_is_charged_by_lease_and_one_by_one(steps, first, holds, burst_ms):
    before, after = worlds = [FetchWorld(leases=each, holds=holds) for each in (False, True)]
    for world in worlds:
        world.quotas.update(QuotaManagerSettings(rules=CHANGES[first], burst_ms=burst_ms))
    now_ms = 0.0
    for pause_ms, what, number, size, change in steps:
        now_ms += pause_ms
        if what == "ask":
            came = [world.ask(number, size, now_ms) for world in worlds]
        elif what == "answer":
            came = [figures_of(world.answer(number, size, now_ms)) for world in worlds]
        else:
            came = [None, None]
            for world in worlds:
                if what == "adapt":
                    world.quotas.adapt(
                        CONSUMER, "client-id=c", AdaptedBound(float(size), "slow"), now_ms
                    )
                elif what == "expire":
                    list(world.quotas.expiring(now_ms))
                else:
                    world.quotas.update(
                        QuotaManagerSettings(rules=CHANGES[change], burst_ms=burst_ms)
                    )
        assert came[0] == came[1]
        assert before.woken == after.woken
        if came[0] is None:
            assert before.rows(now_ms) == after.rows(now_ms)
    assert before.rows(now_ms) == after.rows(now_ms)


def test_a_client_far_below_its_bound_always_passes():
    world, now_ms = FetchWorld(leases=True), 0.0
    assert world.ask(0, ASKED_BYTES, now_ms) == ASKED_BYTES
    assert world.answer(0, 1000, now_ms) is None
    before = world.passed
    for _ in range(100):
        now_ms += 5.0
        assert world.ask(0, ASKED_BYTES, now_ms) == ASKED_BYTES
        assert world.answer(0, 1000, now_ms) is None
    assert world.passed == before + 200


@pytest.mark.parametrize("burst_ms", [None, 60_000.0])
def test_a_bound_as_large_as_sizes_go_lends_what_can_be_counted(burst_ms):
    largest = Rule(client_id="c", bounds={CONSUMER: MAX_SIZE_BYTES})
    world = FetchWorld(leases=True)
    world.quotas.update(QuotaManagerSettings(rules=(largest,), burst_ms=burst_ms))
    world.client.charge(CONSUMER, 1000, 0.0)
    assert world.takes(0, 1000, HOUR_MS)
    assert world.client.charge(CONSUMER, 1000, HOUR_MS) is None


def test_who_may_take_little_at_once_passes_far_below_its_bound():
    world = FetchWorld(leases=True)
    world.quotas.update(QuotaManagerSettings(rules=(rule(BOUND),), burst_ms=500.0))
    world.client.charge(CONSUMER, 1000, 0.0)
    assert world.takes(0, 1000, 1000.0)
    assert not world.takes(0, int(BOUND / 2), 1000.0), "as much as it may take at once"
    assert world.client.charge(CONSUMER, BOUND, 1000.0) is not None
    assert not world.takes(0, 1, 1001.0)


def test_many_connections_are_lent_no_more_than_one():
    """Each may ask for its part of what is free, and all together for no more than that."""
    count, asked = 300, 50_000_000
    world = FetchWorld(leases=True)
    client = world.client
    client.charge(CONSUMER, 1000, 0.0)
    lent: list[InFlightFetch | None] = [None] * count
    for turn in range(3):
        granted = []
        for number, before in enumerate(lent):
            if before is not None:
                before.cancel()
            assert client.lends(CONSUMER, GateWaiter(print), 1.0)
            size, lent[number] = client.lend_fetches(asked, FetchSizes(), 1.0, holds=True)
            granted.append(size)
        if not turn:
            assert granted[0] == BOUND * GRANT_MS / 1000
            assert min(granted) == 0, "the rest goes by the gate"
        assert sum(granted) <= client.lease(CONSUMER).cells[0]
    for each in lent:
        if each is not None:
            each.cancel()
    assert client.lend_fetches(asked, FetchSizes(), 1.0, holds=True)[0] == BOUND * GRANT_MS / 1000


def test_nothing_is_lent_to_a_client_at_its_bound():
    world = FetchWorld(leases=True)
    assert not world.takes(0, 1, 0.0), "nothing was measured yet"
    world.client.charge(CONSUMER, 1000, 0.0)
    assert world.takes(0, 1000, 1.0)
    assert not world.takes(0, 11 * int(BOUND), 1.0)
    assert world.client.charge(CONSUMER, 11 * BOUND, 1.0) is not None
    assert not world.takes(0, 1, 2.0)


@pytest.mark.parametrize("change", ["timed", "lower", "adaptive", "no rule"])
def test_a_lease_ends_with_changed_rules(change):
    world = FetchWorld(leases=True)
    world.client.charge(CONSUMER, 1000, 0.0)
    assert world.takes(0, 1000, 1.0)
    lease = world.client.lease(CONSUMER)
    world.quotas.update(QuotaManagerSettings(rules=CHANGES[change]))
    assert not taken(lease, 1, 1.0)
    assert not world.client.lends(CONSUMER, world.waiters[0], 1.0), "before they are looked up"
    assert not world.client.lends(None, world.waiters[0], 1.0)


def test_nothing_is_lent_to_a_query_that_is_slowed_down():
    world = FetchWorld(leases=True)
    world.quotas.update(QuotaManagerSettings(rules=CHANGES["adaptive"]))
    world.client.charge(CONSUMER, 1, 0.0)
    world.quotas.adapt(CONSUMER, "client-id=c", AdaptedBound(1000.0, "slow"), 0.0)
    charges = [world.answer(0, 1000, now_ms) for now_ms in range(8)]
    assert charges[0] is None
    assert charges[-1] is not None, "by its batches, and still within the measured bound"
    assert not world.takes(0, 1, 8.0)


def test_who_charges_another_connection_sees_what_was_taken():
    world = FetchWorld(leases=True)
    world.client.charge(CONSUMER, 1000, 0.0)
    assert world.takes(0, 6_000_000, 1.0)
    assert world.client.charge(CONSUMER, 5_000_000, 1.0) is not None


def test_nothing_is_lent_while_others_wait_at_the_gate():
    world = FetchWorld(leases=True)
    world.client.charge(CONSUMER, 1000, 0.0)
    lease = world.takes(0, 1, 1.0) and world.client.lease(CONSUMER)
    world.client.charge(CONSUMER, 50 * BOUND, 1.0)
    assert world.ask(1, ASKED_BYTES, 2.0) == "waits"
    assert not taken(lease, 1, 2.0)
    assert not world.takes(0, 1, 2.0)


@settings(max_examples=300)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 7.0, 60.0, 900.0]),
            st.sampled_from([True, True, True, False]),
            st.integers(0, 400_000),
        ),
        max_size=60,
    )
)
def test_what_is_taken_back_late_is_all_there_and_within_the_bound(steps):
    world, now_ms, passed = FetchWorld(leases=True), 0.0, 0
    for pause_ms, by_lease, size in steps:
        now_ms += pause_ms
        world.quotas.take_back(now_ms)
        if not (by_lease and world.takes(0, size, now_ms)):
            assert world.client.owed_ms(CONSUMER, now_ms) == 0
            if world.client.charge(CONSUMER, size, now_ms) is not None:
                return
        passed += size
        for row in world.rows(now_ms):
            assert row.rate <= BOUND
            if now_ms < WINDOWS_MS:
                assert row.rate * row.window_ms / 1000 == pytest.approx(passed)
