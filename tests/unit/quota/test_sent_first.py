"""What is sent on before it is charged is let pass and charged as it would have been before."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st
from parts.quota_world import QuotaWorld

from proxy.quota.entities import DEFAULT, QuotaKind
from proxy.quota.gate import FetchSizes, InFlightFetch, Waiter
from proxy.quota.rules import AdaptiveBound, QuotaSettings, Rule

CONSUMER = QuotaKind.CONSUMER_BYTE_RATE
REQUEST = QuotaKind.REQUEST_PERCENTAGE
BOUND = 1e6
CONNECTIONS = 3
ASKED_BYTES = 100_000
HOUR_MS = 3_600_000.0


class FetchWorld(QuotaWorld):
    """Connections of one client that fetch, and all that the quotas say to it.

    With `sends_first` it is asked before whether a frame is certain to pass. `holds`: responses are
    held.
    """

    def __init__(self, *, sends_first: bool, holds: bool = True) -> None:
        super().__init__(rule(BOUND))
        self.sends_first, self.holds = sends_first, holds
        self.client = self.client_quotas()
        self.woken: list[tuple[int, float]] = []
        self.waiters = [
            Waiter(lambda at_ms, number=number: self.woken.append((number, at_ms)))
            for number in range(CONNECTIONS)
        ]
        self.in_flight = [deque() for _ in self.waiters]
        self.sizes = FetchSizes(0)
        self.passed = 0

    def ask(self, number: int, asked_bytes: int, now_ms: float) -> object:
        waiter, client, holds = self.waiters[number], self.client, self.holds
        if self.sends_first and client.admits_at_once(CONSUMER, waiter, now_ms):
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
        is_certain = self.sends_first and self.client.lets_pass(CONSUMER, size, now_ms)
        expected = self.in_flight[number].popleft() if self.in_flight[number] else None
        if expected is not None:
            expected.answered(size)
        charge = self.client.charge(CONSUMER, size, now_ms)
        if is_certain:
            self.passed += 1
            assert charge is None, "it was sent already"
        return charge


def rule(consumer: float | None, *, timed: bool = False, adaptive: bool = False) -> Rule:
    bounds = {CONSUMER: consumer, REQUEST: 1e6 if timed else None}
    return Rule(
        client_id=DEFAULT,
        bounds={kind: bound for kind, bound in bounds.items() if bound is not None},
        scope="each",
        adaptive=AdaptiveBound(batch_interval_ms=1000.0) if adaptive else None,
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
@given(steps=STEPS, first=st.sampled_from(sorted(CHANGES)), holds=st.booleans())
def test_the_same_is_let_pass_and_charged_in_both_orders(steps, first, holds):
    before, after = worlds = [FetchWorld(sends_first=each, holds=holds) for each in (False, True)]
    for world in worlds:
        world.quotas.update(QuotaSettings(rules=CHANGES[first]))
    now_ms = 0.0
    for pause_ms, what, number, size, change in steps:
        now_ms += pause_ms
        if what == "ask":
            came = [world.ask(number, size, now_ms) for world in worlds]
        elif what == "answer":
            came = [world.answer(number, size, now_ms) for world in worlds]
        else:
            came = [None, None]
            for world in worlds:
                if what == "adapt":
                    world.quotas.adapt(CONSUMER, "client-id=c", float(size), "slow", now_ms)
                elif what == "expire":
                    list(world.quotas.expiring(now_ms))
                else:
                    world.quotas.update(QuotaSettings(rules=CHANGES[change]))
        assert came[0] == came[1]
        assert before.woken == after.woken
        if came[0] is None:
            assert before.rows(now_ms) == after.rows(now_ms)
    assert before.rows(now_ms) == after.rows(now_ms)


def test_a_client_far_below_its_bound_always_passes():
    world, now_ms = FetchWorld(sends_first=True), 0.0
    assert world.ask(0, ASKED_BYTES, now_ms) == ASKED_BYTES
    assert world.answer(0, 1000, now_ms) is None
    before = world.passed
    for _ in range(100):
        now_ms += 5.0
        assert world.ask(0, ASKED_BYTES, now_ms) == ASKED_BYTES
        assert world.answer(0, 1000, now_ms) is None
    assert world.passed == before + 200


def test_nothing_is_certain_of_a_client_at_its_bound():
    world = FetchWorld(sends_first=True)
    world.ask(0, ASKED_BYTES, 0.0)
    world.answer(0, 1000, 0.0)
    assert world.client.lets_pass(CONSUMER, 1000, 1.0)
    assert not world.client.lets_pass(CONSUMER, 11 * BOUND, 1.0)
    assert world.client.charge(CONSUMER, 11 * BOUND, 1.0) is not None
    assert not world.client.lets_pass(CONSUMER, 1, 2.0)
    assert not world.client.admits_at_once(CONSUMER, world.waiters[0], 2.0)


def test_nothing_is_certain_before_changed_rules_are_looked_up():
    world = FetchWorld(sends_first=True)
    world.client.charge(CONSUMER, 1000, 0.0)
    for change in ("timed", "lower", "adaptive"):
        world.quotas.update(QuotaSettings(rules=CHANGES["same"]))
        assert not world.client.lets_pass(None, 1000, 1.0)
        world.client.charge(CONSUMER, 1000, 1.0)
        assert world.client.lets_pass(CONSUMER, 1000, 1.0), change
        world.quotas.update(QuotaSettings(rules=CHANGES[change]))
        assert not world.client.lets_pass(CONSUMER, 1000, 1.0), change
        waiter = world.waiters[0]
        assert not world.client.admits_at_once(CONSUMER, waiter, 1.0), change


def test_nothing_is_certain_of_a_query_that_is_slowed_down():
    world = FetchWorld(sends_first=True)
    world.quotas.update(QuotaSettings(rules=CHANGES["adaptive"]))
    world.client.charge(CONSUMER, 1, 0.0)
    world.quotas.adapt(CONSUMER, "client-id=c", 1000.0, "slow", 0.0)
    charges = [world.answer(0, 1000, now_ms) for now_ms in range(8)]
    assert charges[0] is None
    assert charges[-1] is not None, "by its batches, and still within the measured bound"
    assert not world.client.lets_pass(CONSUMER, 1, 8.0)
