"""Who may send on a request, and when who waits is told to ask again."""

import math

import pytest

from proxy.quota.gate import (
    BATCH_KNOWN_MS,
    EXPECTED_MS,
    FEW_BATCHES,
    GRANT_MS,
    LEAST_GRANT_BYTES,
    ROUND_GROWTH,
    TURNS_ROUND_MS,
    UNDER_WAY_MS,
    USEFUL_GRANT_BYTES,
    FetchSizes,
    Gate,
    GateWaiter,
    InFlightFetch,
)
from proxy.quota.pacer import LARGE_DEBT_MS, REPAYING_SHARE, Pacer

BOUND = 1_000_000.0
BYTES_PER_MS = BOUND / 1000
ASKED = 50_000_000
AHEAD_MS = 1000.0


class GateWorld:
    """A gate whose client owes so many milliseconds at time 0."""

    def __init__(
        self, owed_ms: float = 0.0, bound: float = BOUND, allowance_ms: float = 0.0
    ) -> None:
        self.pacer = Pacer(bound, 0.0)
        if owed_ms:
            self.pacer.charge(0, owed_ms, 0.0)
        self.gate = Gate(self.pacer, lambda _: allowance_ms)
        self.woken: list[tuple[str, float]] = []

    def waiter(self, name: str) -> GateWaiter:
        return GateWaiter(lambda at_ms: self.woken.append((name, at_ms)))

    def expect(self, last_bytes: int | None = None, granted: int = 0) -> InFlightFetch:
        return self.gate.expect(FetchSizes(last_bytes), 0.0, granted, holds=False)

    def waits(self, waiter: GateWaiter, now_ms: float, ahead_ms: float = AHEAD_MS) -> bool:
        if self.gate.lets(waiter, ahead_ms, now_ms):
            waiter.leave(now_ms)
            return False
        self.gate.join(waiter, ahead_ms, now_ms)
        return True


def test_who_owes_little_is_let_through():
    world = GateWorld(owed_ms=AHEAD_MS)
    assert not world.waits(world.waiter("a"), 0.0)
    assert world.waits(world.waiter("b"), 0.0, ahead_ms=0.0)


def test_they_are_let_through_in_turn():
    world = GateWorld(owed_ms=3000.0)
    a, b, c = (world.waiter(name) for name in "abc")
    for waiter in (a, b, c):
        assert world.waits(waiter, 0.0)
    assert world.woken == [("a", 2000.0)]
    assert world.waits(b, 2000.0), "it is the turn of a"
    assert not world.waits(a, 2000.0)
    assert world.woken[1:] == [("b", 2000.0)]
    b.leave(2000.0)
    assert world.woken[2:] == [("c", 2000.0)]
    assert world.gate.waiting == 1


def test_since_when_it_waits_is_kept_until_the_owner_sets_it_back():
    world = GateWorld(owed_ms=3000.0)
    waiter = world.waiter("a")
    world.waits(waiter, 10.0)
    world.waits(waiter, 500.0)
    world.gate.open()
    world.waits(waiter, 700.0)
    assert waiter.since_ms == 10.0


def test_all_ask_again_when_the_bound_changes():
    world = GateWorld(owed_ms=3000.0)
    for name in "abc":
        world.waits(world.waiter(name), 0.0)
    world.woken.clear()
    world.gate.open()
    assert world.woken == [(name, -math.inf) for name in "abc"]
    assert world.gate.waiting == 0


def test_a_fetch_under_way_counts_with_what_is_expected_until_its_response_comes():
    world = GateWorld(owed_ms=500.0)
    expected = world.expect(int(BYTES_PER_MS * 600), granted=ASKED)
    waiter = world.waiter("a")
    assert world.waits(waiter, 0.0)
    assert world.woken == [("a", 100.0)]
    expected.answered(0)
    assert not world.waits(waiter, 1.0)


def test_one_that_takes_long_counts_no_more():
    world = GateWorld(owed_ms=500.0)
    world.expect(int(BYTES_PER_MS * 9000), granted=ASKED)
    waiter = world.waiter("a")
    assert world.waits(waiter, 0.0)
    assert world.woken == [("a", EXPECTED_MS)]
    assert not world.waits(waiter, EXPECTED_MS)


def test_what_the_formula_lets_pass_may_be_under_way():
    world = GateWorld(bound=BOUND / 10, allowance_ms=1000.0)
    world.expect(USEFUL_GRANT_BYTES)
    assert not world.waits(world.waiter("a"), 0.0)
    world.expect(USEFUL_GRANT_BYTES)
    assert world.waits(world.waiter("b"), 0.0)


def test_what_a_first_fetch_brings_may_be_a_large_batch():
    world = GateWorld(allowance_ms=2000.0)
    world.expect()
    assert not world.waits(world.waiter("a"), 0.0)
    world.expect()
    assert world.waits(world.waiter("b"), 0.0)


def test_who_has_no_allowance_left_has_one_large_fetch_under_way():
    world = GateWorld(bound=BOUND / 10)
    a, b = world.waiter("a"), world.waiter("b")
    assert not world.waits(a, 0.0)
    expected = world.expect()
    assert world.waits(b, 0.0)
    expected.answered(16_000)
    assert not world.waits(b, 1.0)


@pytest.mark.parametrize(
    ("bound", "under_way", "owed_ms", "granted"),
    [
        pytest.param(BOUND, 0, 0, GRANT_MS * BYTES_PER_MS, id="one connection"),
        pytest.param(
            10 * BOUND, 99, 0, TURNS_ROUND_MS / 100 * 10 * BYTES_PER_MS, id="100: a part each"
        ),
        pytest.param(BOUND, 31, 0, USEFUL_GRANT_BYTES, id="32: no less than is of use"),
        pytest.param(BOUND, 199, 0, 40_000, id="200: a round takes eight seconds"),
        pytest.param(
            BOUND,
            0,
            LARGE_DEBT_MS + 1,
            GRANT_MS * BYTES_PER_MS * REPAYING_SHARE,
            id="while much is owed",
        ),
        pytest.param(1000.0, 99, 0, LEAST_GRANT_BYTES, id="never less than that"),
    ],
)
def test_what_a_fetch_is_granted(bound, under_way, owed_ms, granted):
    world = GateWorld(owed_ms, bound)
    for _ in range(under_way):
        world.expect(1)
    assert world.gate.grant(ASKED, 0.0) == granted
    assert world.gate.grant(100, 0.0) == 100


UNDER_WAY = int(UNDER_WAY_MS * BYTES_PER_MS)
NEAR_MS = TURNS_ROUND_MS - 1
SMALL = 5000


@pytest.mark.parametrize(
    ("allowance_ms", "in_flight", "last_bytes", "granted"),
    [
        pytest.param(TURNS_ROUND_MS, 0, None, ASKED, id="far below: no less than before"),
        pytest.param(TURNS_ROUND_MS, 1, ASKED, NEAR_MS * BYTES_PER_MS, id="what may still pass"),
        pytest.param(NEAR_MS, 0, None, LEAST_GRANT_BYTES, id="a new connection"),
        pytest.param(NEAR_MS, 0, SMALL, ROUND_GROWTH * SMALL, id="one that got little"),
        pytest.param(0, 0, ASKED, UNDER_WAY, id="one response may always be under way"),
        pytest.param(0, UNDER_WAY, ASKED, LEAST_GRANT_BYTES, id="and of each more a record batch"),
    ],
)
def test_a_response_that_is_not_held_is_limited_near_the_bound(
    allowance_ms, in_flight, last_bytes, granted
):
    world = GateWorld(allowance_ms=allowance_ms)
    world.expect(granted=in_flight)
    assert world.gate.limit(ASKED, last_bytes, 0.0) == pytest.approx(granted, abs=BYTES_PER_MS)
    assert world.gate.limit(100, last_bytes, 0.0) == 100


def test_while_the_schedule_decides_what_the_formula_lets_pass_does_not_count():
    world = GateWorld(owed_ms=1.0, allowance_ms=2 * TURNS_ROUND_MS)
    assert world.gate.limit(ASKED, ASKED, 0.0) == UNDER_WAY


def test_one_that_asks_for_less_than_nothing_leaves_others_no_more():
    world = GateWorld(owed_ms=1.0)
    for asked in (-(2**31), UNDER_WAY, UNDER_WAY):
        granted = world.gate.limit(world.gate.grant(asked, 0.0), ASKED, 0.0)
        world.expect(granted=granted)
    assert granted == LEAST_GRANT_BYTES
    assert world.gate.granted_size == UNDER_WAY + LEAST_GRANT_BYTES


@pytest.mark.parametrize("end", ["answered", "cancelled", "takes long"])
def test_a_grant_counts_until_its_response_and_not_for_long(end):
    world = GateWorld(owed_ms=1.0)
    fetch = world.expect(granted=UNDER_WAY)
    now_ms = EXPECTED_MS - 1
    world.gate.grant(ASKED, now_ms)
    assert world.gate.limit(ASKED, ASKED, now_ms) == LEAST_GRANT_BYTES
    if end == "answered":
        fetch.answered(0)
    elif end == "cancelled":
        fetch.cancel()
        fetch.cancel()
    else:
        now_ms += 1
    world.gate.grant(ASKED, now_ms)
    assert world.gate.limit(ASKED, ASKED, now_ms) == UNDER_WAY
    assert world.gate.granted_size == 0


BATCH = 30_000
ONE = LEAST_GRANT_BYTES


@pytest.mark.parametrize(
    ("batch_bytes", "granted"),
    [
        pytest.param(BATCH, ONE, id="few fit"),
        pytest.param(UNDER_WAY // FEW_BATCHES, UNDER_WAY, id="many fit"),
        pytest.param(None, ONE, id="not known"),
    ],
)
@pytest.mark.parametrize("holds", [True, False], ids=["delay", "mute"])
def test_a_fetch_that_few_batches_fit_into_brings_one(batch_bytes, granted, holds):
    world = GateWorld(owed_ms=BATCH_KNOWN_MS)
    sizes = FetchSizes()
    if batch_bytes is not None:
        world.gate.expect(sizes, 0.0, ONE, holds=holds).answered(batch_bytes)
    assert world.gate.whole(UNDER_WAY, sizes, 0.0) == granted
    assert world.gate.whole(UNDER_WAY, sizes, BATCH_KNOWN_MS) == ONE, "it is asked for again"
    assert world.gate.whole(100, sizes, 0.0) == 100


def test_batches_of_many_sizes_count_as_large_ones():
    sizes = FetchSizes()
    for size in (BATCH, 100, 100):
        sizes.learn(size, 0.0)
    assert 0.8 * BATCH < sizes.batch_bytes < BATCH


def test_a_client_that_lags_behind_its_bound_is_not_limited_to_one_batch():
    """From a broker far away one batch at a time may be less than the bound."""
    world = GateWorld(owed_ms=1.0)
    world.pacer.burst_ms = 500.0
    assert world.gate.whole(UNDER_WAY, FetchSizes(), 251.0) == ONE
    assert world.gate.whole(UNDER_WAY, FetchSizes(), 252.0) == UNDER_WAY
    world.expect(UNDER_WAY)
    assert world.gate.whole(UNDER_WAY, FetchSizes(), 252.0) == ONE, "that is under way"
    assert GateWorld().gate.whole(UNDER_WAY, FetchSizes(), 0.0) == UNDER_WAY, "not held"
