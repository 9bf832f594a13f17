"""Connections in closed loops on virtual time: what comes out is the bound, whatever they do."""

import itertools

import pytest
from closed_loop import (
    CONSUMER,
    MB,
    PRODUCER,
    WINDOW_MS,
    Announcer,
    ClosedLoop,
    Consumer,
    Producer,
    consumers,
    make_manager,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.quota.gate import UNDER_WAY_MS, InFlightFetch
from proxy.quota.rules import QuotaManagerSettings, Rule

END_MS = 60_000.0
SETTLED_MS = 20_000.0
REQUEST_TIMEOUT_MS = 30_000.0
TOLERANCE = 0.02
LONGEST_WINDOW = 1.1
MOST_OF_NEW = 1.15
"""In `mute`, of connections of which nothing is known: what is under way is let through."""
LONGEST_HOLD_MS = 2500.0
"""Longer ones come only while the burst of the first seconds is worked off."""

SMALL_BATCH = 1000
SMALL_ANSWER = 20_000
SMALLEST_ANSWER = 60
"""Without data."""


def world_of(bound: float = MB, **more) -> ClosedLoop:
    return ClosedLoop(make_manager(bound, **more))


def check_bound(world: ClosedLoop, bound: float, largest: int = 0) -> None:
    assert world.rate(SETTLED_MS, END_MS) == pytest.approx(bound, rel=TOLERANCE)
    seconds = WINDOW_MS / 1000
    assert world.most_in() <= LONGEST_WINDOW * bound * seconds + largest
    assert world.longest_latency_ms < REQUEST_TIMEOUT_MS


@pytest.mark.parametrize("mutes", [False, True], ids=["delay", "mute"])
@pytest.mark.parametrize("asked", [50_000, 1 << 20, 50 * MB])
@pytest.mark.parametrize("bound", [0.1 * MB, 1 * MB, 10 * MB])
@pytest.mark.parametrize("connections", [1, 4, 32, 200])
def test_consumers_get_their_bound_and_no_more(connections, bound, asked, mutes):
    world = world_of(bound)
    consumers(world, connections, asked, batch_bytes=SMALL_BATCH, mutes=mutes)
    world.run(END_MS)
    check_bound(world, bound)
    assert max(hold_ms for at_ms, hold_ms in world.holds if at_ms > SETTLED_MS) <= LONGEST_HOLD_MS


BATCHES = {
    "32 tasks of 1 MiB": (32, 1 << 20, 1 << 20, 16_384),
    "100 tasks of 1 MiB": (100, 1 << 20, 1 << 20, 16_384),
    "32 connections, 2 MB": (32, 2 * MB, MB, 16_384),
    "100 connections, 10 MiB": (100, 10 << 20, 1 << 20, 16_384),
    "one connection, 50 MB": (1, 50 * MB, MB, 16_384),
    "a group at 250 kB/s": (3, 50 * MB, 0.25 * MB, 16_384),
    "batches of half a second": (8, 50 * MB, MB, 500_000),
    "batches larger than what is granted": (4, 50 * MB, MB, 1 << 20),
}


@pytest.mark.parametrize("case", BATCHES)
def test_with_the_batches_of_real_producers(case):
    connections, asked, bound, batch_bytes = BATCHES[case]
    world = world_of(bound)
    consumers(world, connections, asked, batch_bytes=batch_bytes)
    world.run(END_MS)
    check_bound(world, bound, batch_bytes)


@pytest.mark.parametrize("size", [10_000, 100_000, 500_000])
@pytest.mark.parametrize("reads", [True, False], ids=["waits for answers", "never reads them"])
@pytest.mark.parametrize("connections", [1, 5, 50])
def test_producers_get_their_bound_and_no_more(connections, size, reads):
    world = world_of()
    for number in range(connections):
        world.at(number * 0.1, Producer(world, size, reads).ask)
    world.run(END_MS)
    check_bound(world, MB, size)


@pytest.mark.parametrize("later_ms", [0.0, 5000.0], ids=["at once", "all announced before"])
@pytest.mark.parametrize("size", [200_000, MB])
@pytest.mark.parametrize("connections", [1, 20, 200])
def test_who_announces_before_it_sends_gains_nothing(connections, size, later_ms):
    world = world_of()
    announcers = [Announcer(world, size, later_ms) for _ in range(connections)]
    for number, each in enumerate(announcers):
        world.at(number * 0.1, each.ask)
    world.run(END_MS)
    assert world.most_in() <= LONGEST_WINDOW * MB * WINDOW_MS / 1000 + size
    if not later_ms:
        of_one = size / (END_MS - SETTLED_MS) * 1000  # which comes at once
        assert world.rate(SETTLED_MS, END_MS) == pytest.approx(MB, abs=TOLERANCE * MB + of_one)
    finished = sum(each.finished for each in announcers)
    sent = sum(size for _, size in world.delivered)
    assert finished * size >= 0.9 * sent, "what is begun is finished before others go on"


def test_who_only_announces_takes_nothing_from_others():
    world = world_of()
    for number in range(200):
        world.at(number * 100.0, Announcer(world, 100 * MB, later_ms=2 * END_MS).ask)
    world.at(0.0, Producer(world, 100_000).ask)
    world.run(END_MS)
    check_bound(world, MB, 100_000)


@pytest.mark.parametrize("mutes", [False, True], ids=["delay", "mute"])
def test_a_client_that_always_reconnects_gains_nothing(mutes):
    """Each connection asks once and is gone before its answer is held, or its wait begins."""
    world = world_of()
    numbers = itertools.count()

    def connect() -> None:
        consumer = Consumer(world, next(numbers), 50 * MB, batch_bytes=16_384, mutes=mutes)
        consumer.again = lambda: None  # type: ignore[method-assign]
        consumer.ask()
        consumer.ends_ms = world.now_ms
        world.at(world.now_ms + 5.0, connect)

    connect()
    world.run(END_MS)
    total = sum(size for at_ms, size in world.delivered if at_ms >= SETTLED_MS)
    # Each of its connections has a record batch at most beyond what the schedule allows.
    assert total <= LONGEST_WINDOW * MB * (END_MS - SETTLED_MS) / 1000


def test_idle_connections_do_not_slow_the_one_that_reads():
    """They wait in the broker for data, half a second each, and bring nothing."""
    world = world_of()
    for number in range(100):
        idle = Consumer(world, number, 1, batch_bytes=60, broker_ms=500.0)
        world.at(number * 1.0, idle.ask)
    world.at(0.0, Consumer(world, 100, MB, batch_bytes=SMALL_BATCH).ask)
    world.run(END_MS)
    busy = sum(size for at_ms, size in world.delivered if at_ms >= SETTLED_MS and size > 60)
    assert busy >= 0.95 * MB * (END_MS - SETTLED_MS) / 1000


def test_connections_take_turns():
    world = world_of()
    counts = dict.fromkeys(range(8), 0)
    for number in range(8):
        consumer = Consumer(world, number, MB, batch_bytes=SMALL_BATCH)
        answered = consumer.answered

        def count(size, expected, number=number, answered=answered) -> None:
            counts[number] += size if world.now_ms > SETTLED_MS else 0
            answered(size, expected)

        consumer.answered = count  # type: ignore[method-assign]
        world.at(number * 0.1, consumer.ask)
    world.run(END_MS)
    assert max(counts.values()) <= 1.1 * min(counts.values())


@pytest.mark.parametrize("share", [0.3, 0.9, 0.98])
def test_a_client_that_asks_for_less_than_its_bound_is_not_held(share):
    world = world_of()
    held_ms = 0.0
    for number in range(10_000):
        charge = world.client.charge(CONSUMER, 20_000, number * 20 / share)
        held_ms += charge.delay_ms if charge else 0
    assert held_ms == 0


@pytest.mark.parametrize("kind", [CONSUMER, PRODUCER])
def test_a_client_near_its_bound_that_suddenly_wants_more(kind):
    world = world_of()
    while world.now_ms < SETTLED_MS:  # at 95 %
        world.client.charge(kind, 19_000, world.now_ms)
        world.delivered.append((world.now_ms, 19_000))
        world.now_ms += 20
    if kind is CONSUMER:
        consumers(world, 4, MB, start_ms=SETTLED_MS, batch_bytes=SMALL_BATCH)
    else:
        world.at(SETTLED_MS, Producer(world, 100_000).ask)
    world.run(END_MS)
    assert world.most_in() <= LONGEST_WINDOW * MB * WINDOW_MS / 1000 + 100_000


@pytest.mark.parametrize("burst_ms", [0.0, 500.0, 5000.0])
def test_quotas_burst_is_what_may_come_beyond_the_bound(burst_ms):
    world = world_of(burst_ms=burst_ms)
    consumers(world, 4, MB, batch_bytes=SMALL_BATCH)
    world.run(END_MS)
    consumers(world, 4, MB, start_ms=END_MS + 8000, batch_bytes=SMALL_BATCH)
    world.run(2 * END_MS)
    allowed = MB * (WINDOW_MS + burst_ms) / 1000
    assert world.most_in() <= allowed + 0.5 * MB


def test_a_bound_changed_at_run_time_is_kept_from_that_moment():
    world = world_of(10 * MB)
    consumers(world, 4, 50 * MB, batch_bytes=SMALL_BATCH)
    start_ms = 0.0
    for bound in (10, 2, 50, 10):
        rule = Rule(client_id="c", bounds={CONSUMER: bound * MB})
        world.manager.update(QuotaManagerSettings(rules=(rule,)))
        world.run(start_ms + 40_000)
        rate = world.rate(start_ms + SETTLED_MS, start_ms + 40_000)
        assert rate == pytest.approx(bound * MB, rel=0.03), f"bound {bound} MB/s"
        start_ms += 40_000


def check_waves(waves, mutes, batch_bytes) -> None:
    """Run waves of new connections: when they begin, how many, for how long, what they ask for.

    What is under way when the client is found above its bound comes on top, a record batch for
    each connection, and one answer that the end of the window cuts.
    """
    world = world_of()
    numbers = itertools.count()
    most = 1
    for start_ms, count, lasts_ms, asked in waves:
        most = max(most, count)
        for _ in range(count):
            ends_ms = start_ms + lasts_ms
            consumer = Consumer(
                world, next(numbers), asked, batch_bytes, mutes=mutes, ends_ms=ends_ms
            )
            world.at(start_ms, consumer.ask)
    world.run(END_MS)
    together = len(waves) * most * batch_bytes
    allowed = LONGEST_WINDOW * MB * WINDOW_MS / 1000 + MB * UNDER_WAY_MS / 1000
    assert world.most_in() <= allowed + together + SMALL_ANSWER


@pytest.mark.parametrize(
    ("waves", "mutes"),
    [
        ([(0.0, 49, 100.0, 20_000), (0.0, 7, 378.0, MB), (18_303.0, 16, 100.0, MB)], True),
        ([(0.0, 1, 1325.0, MB), (8000.0, 9, 100.0, MB), (17_599.0, 1, 1701.0, 20_000)], False),
        # The answers of new connections are far larger than those before let expect.
        ([(0.0, 13, 100.0, MB), (6769.0, 15, 100.0, MB)], True),
        (
            [
                (1006.0, 11, 100.0, 50 * MB),
                (5322.0, 1, 4025.0, 50 * MB),
                (10_179.0, 40, 1683.0, MB),
                (16_606.0, 13, 12_960.0, 20_000),
            ],
            True,
        ),
        (
            [(695.0, 24, 3809.0, 20_000), (1527.0, 29, 100.0, 20_000), (10_103.0, 40, 100.0, MB)],
            True,
        ),
    ],
)
def test_waves_of_connections(waves, mutes):
    check_waves(waves, mutes, SMALL_BATCH)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 20_000),
            st.integers(1, 40),
            st.floats(100, 15_000),
            st.sampled_from([SMALL_ANSWER, MB, 50 * MB]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
    st.sampled_from([1000, 16_384]),
)
# 13 connections get small answers at last; those of 15 new ones are far larger than these.
@example([(0.0, 13, 100.0, MB), (6769.0, 15, 100.0, MB)], True, 1000)
def test_no_pattern_of_connections_gets_more_in_any_11_seconds(waves, mutes, batch_bytes):
    check_waves(waves, mutes, batch_bytes)


@pytest.mark.parametrize("broker_ms", [2.0, 200.0])
@pytest.mark.parametrize("new", [0, 60])
def test_connections_that_got_little_and_then_all_get_much(new, broker_ms):
    """From a fast broker or a slow one, in mute: there what is asked for is not held back."""
    bound, count, large_at_ms = 10 * MB, 50, 9000.0
    world = world_of(bound)
    for number in range(count):
        consumer = Consumer(
            world, number, 1, SMALL_BATCH, think_ms=400.0, broker_ms=broker_ms, mutes=True
        )
        world.at(number * 1.0, consumer.ask)

        def want_more(consumer: Consumer = consumer) -> None:
            consumer.asked_bytes, consumer.think_ms = 50 * MB, 0.2

        world.at(large_at_ms, want_more)
    for number in range(count, count + new):
        consumer = Consumer(world, number, 50 * MB, SMALL_BATCH, mutes=True)
        world.at(large_at_ms, consumer.ask)
    before = Consumer(world, -1, MB, SMALL_BATCH, think_ms=90.0, mutes=True, ends_ms=large_at_ms)
    world.at(0.0, before.ask)
    world.run(END_MS)
    most = (LONGEST_WINDOW * WINDOW_MS + UNDER_WAY_MS) * bound / 1000
    assert world.most_in() <= most + (count + new) * SMALL_BATCH
    assert world.rate(SETTLED_MS, END_MS) == pytest.approx(bound, rel=TOLERANCE)


@pytest.mark.parametrize("broker_ms", [500.0, 10_000.0])
def test_connections_that_wait_for_data_leave_others_the_bound_in_mute(broker_ms):
    """Others get all of it: those that bring nothing take no part of what may be under way."""
    bound = 100 * MB
    world = world_of(bound)
    for number in range(50):
        idle = Consumer(world, number, 50 * MB, broker_ms=broker_ms, mutes=True)

        def answered(_size, expected, answered=idle.answered) -> None:
            answered(SMALLEST_ANSWER, expected)

        idle.answered = answered  # type: ignore[method-assign]
        world.at(number * 3.0, idle.ask)
    for number in (50, 51):
        busy = Consumer(world, number, 50 * MB, 16_384, broker_ms=5.0, mutes=True)
        world.at(0.0, busy.ask)
    world.run(END_MS)
    assert world.rate(SETTLED_MS, END_MS) == pytest.approx(bound, rel=TOLERANCE)


@pytest.mark.parametrize("mutes", [False, True], ids=["delay", "mute"])
@pytest.mark.parametrize("broker_ms", [2.0, 50.0, 200.0])
@pytest.mark.parametrize("first_bytes", [0, 500], ids=["new", "one has got little"])
def test_many_new_connections_take_the_credit_once(first_bytes, broker_ms, mutes):
    """What all of them get is not known before the first answers."""
    world = ClosedLoop(make_manager(MB))
    if first_bytes:
        consumers(world, 1, first_bytes, batch_bytes=first_bytes, ends_ms=300.0, mutes=mutes)
        world.run(WINDOW_MS)
    begin_ms = world.now_ms
    options = {"batch_bytes": MB, "broker_ms": broker_ms, "mutes": mutes}
    consumers(world, 100, 50 * MB, begin_ms, by_lane=False, **options)
    world.run(begin_ms + 40_000.0)
    assert world.most_in() <= 1.1 * 11 * MB + MB
    assert world.rate(begin_ms + 20_000.0, world.now_ms) >= 0.9 * MB


class NewConsumer(Consumer):
    """Its first Fetch is never sent on by the lane."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.by_lane = False

    def answered(self, size: int, expected: InFlightFetch | None) -> None:
        super().answered(size, expected)
        self.by_lane = True


@pytest.mark.parametrize("broker_ms", [2.0, 50.0, 300.0])
@pytest.mark.parametrize("batch_bytes", [300_000, MB])
@pytest.mark.parametrize("connections", [10, 50, 200])
def test_new_connections_take_little_more_in_mute_than_in_delay(
    connections, batch_bytes, broker_ms
):
    """Each gets a record batch at least, whatever its limit."""
    world = world_of(4 * MB)
    for number in range(connections):
        consumer = NewConsumer(world, number, 50 * MB, batch_bytes, broker_ms=broker_ms, mutes=True)
        world.at(0.1 * number, consumer.ask)
    world.run(END_MS)
    assert world.most_in() <= MOST_OF_NEW * 4 * MB * WINDOW_MS / 1000


@pytest.mark.parametrize("broker_ms", [2.0, 200.0])
def test_new_connections_of_a_client_far_below_its_bound_are_answered_at_once(broker_ms):
    world = ClosedLoop(make_manager(10 * MB))
    consumers(world, 90, SMALL_BATCH, batch_bytes=SMALL_BATCH, think_ms=1000.0, broker_ms=broker_ms)
    world.run(10_000.0)
    assert world.longest_latency_ms == pytest.approx(broker_ms)
