"""Clients that share a bound, on virtual time: none of them makes the others wait."""

import itertools
import math
import tracemalloc
from collections import deque

import pytest
from closed_loop import CONSUMER, MB, PRODUCER, Announcer, ClosedLoop, Consumer, Producer
from hypothesis import given
from hypothesis import strategies as st
from parts.quota_world import QuotaWorld

from proxy.quota.client_quotas import ClientQuotas
from proxy.quota.entities import DEFAULT
from proxy.quota.gate import FetchSizes
from proxy.quota.rules import Budget, Rule, Share
from proxy.quota.turns import MOST_KNOWN, NEWCOMER_MS, TURN_BYTES, FairOrder, TurnNode, Turns

END_MS = 60_000.0
SETTLED_MS = 20_000.0
"""What passes at once at the start is worked off by then."""
BATCH = 16_384
ENOUGH, MOST = 0.95, 1.1
"""Of a fair share, and of the bound in 11 s."""
LONGEST_WAIT_MS = 1000.0
GREEDY_CONNECTIONS = 200
LONGEST_FIRST_WAIT_MS = 4000.0
"""Of one that was never there before, among a hundred."""
WAYS = ["delay", "mute", "produce"]
HERE, THERE = "10.0.0.1", "10.0.0.2"
LATER_MS = 2_000.0 + NEWCOMER_MS
"""Who comes then is new."""


class SharedLoop(ClosedLoop):
    """Clients under one rule with scope `shared`."""

    def __init__(
        self, bound: float = MB, *, in_budget: bool = False, by: str = "client_id", **settings
    ) -> None:
        bounds = {CONSUMER: bound, PRODUCER: bound}
        rule = Rule(**{by: DEFAULT}, scope="shared", bounds=bounds)
        if in_budget:
            share = Share(Budget(name="all", bounds=bounds))
            rule = Rule(**{by: DEFAULT}, bounds={}, share=share)
        self.quotas = QuotaWorld(rule, **settings)
        super().__init__(self.quotas.quotas)
        self.numbers = itertools.count()

    def client_of(
        self, client_id: str, user: str | None = None, address: str | None = None
    ) -> ClientQuotas:
        return self.quotas.client_quotas(client_id, user, "l", address)

    def consumer(
        self, client: ClientQuotas, asked_bytes: int = MB, start_ms: float = 0.0, **options
    ) -> Consumer:
        consumer = Consumer(self, next(self.numbers), asked_bytes, BATCH, client=client, **options)
        self.at(start_ms + 0.1 * consumer.number, consumer.ask)
        return consumer

    def producer(self, client: ClientQuotas, start_ms: float = 0.0, **options) -> Producer:
        producer = Producer(self, BATCH, client=client, **options)
        self.at(start_ms + 0.1 * next(self.numbers), producer.ask)
        return producer

    def connect(self, way: str, client: ClientQuotas, **options) -> Consumer | Producer:
        if way == "produce":
            return self.producer(client, **options)
        return self.consumer(client, mutes=way == "mute", **options)


class OneRequest(Announcer):
    """A connection that is closed by its client behind one request."""

    def ask(self) -> None:
        if self.finished:
            self.client.close()
        else:
            super().ask()


def got(
    *connections: Consumer | Producer, from_ms: float = SETTLED_MS, until_ms: float = END_MS
) -> float:
    """Bytes per second, where nothing else is said once the start is over."""
    answers = itertools.chain.from_iterable(connection.got for connection in connections)
    total = sum(size for _, at_ms, size in answers if from_ms < at_ms <= until_ms)
    return total / (until_ms - from_ms) * 1000


def waits_ms(world: ClosedLoop, connection: Consumer | Producer) -> list[float]:
    waits = [at_ms - asked_ms for asked_ms, at_ms, _ in connection.got]
    if isinstance(connection, Consumer) and connection.number in world.under_way:
        waits.append(world.now_ms - world.under_way[connection.number])
    return waits


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("greedy_clients", [1, 20, 100])
def test_a_client_that_wants_less_than_its_share_gets_it_soon(greedy_clients, way):
    """Each greedy client has as many connections as there is room for."""
    world = SharedLoop()
    for number in range(GREEDY_CONNECTIONS):
        world.connect(way, world.client_of(f"greedy-{number % greedy_clients}"))
    wanted = 0.9 * min(MB / (greedy_clients + 1), 0.05 * MB)
    every_ms = BATCH / wanted * 1000
    options = {} if way == "produce" else {"asked_bytes": BATCH}
    modest = world.connect(
        way, world.client_of("modest"), start_ms=SETTLED_MS, think_ms=every_ms, **options
    )
    world.run(END_MS)
    first_ms, *later_ms = waits_ms(world, modest)
    assert first_ms < LONGEST_FIRST_WAIT_MS
    assert max(later_ms) < LONGEST_WAIT_MS
    # It asks again so long after each answer.
    assert len(later_ms) >= (END_MS - SETTLED_MS - first_ms) / (every_ms + LONGEST_WAIT_MS / 2) - 1
    assert world.rate(SETTLED_MS, END_MS) == pytest.approx(MB, rel=0.02)


@pytest.mark.parametrize("way", WAYS)
def test_clients_that_all_want_more_get_equal_shares(way):
    world = SharedLoop()
    clients = {
        count: [world.connect(way, world.client_of(f"c-{count}")) for _ in range(count)]
        for count in (5, 20, 100)
    }
    world.run(END_MS)
    shares = [got(*connections) / MB for connections in clients.values()]
    assert shares == pytest.approx([1 / len(clients)] * len(clients), rel=0.05)


@pytest.mark.parametrize("batch_bytes", [1000, BATCH, 100_000, MB])
@pytest.mark.parametrize("way", ["delay", "mute"])
def test_a_client_with_one_connection_has_its_share_beside_one_with_many(way, batch_bytes):
    """It asks for enough at a time: how many the other one has does not make that less.

    Nor do large turns of the other one, which come while it is being answered.
    """
    world = SharedLoop(4 * MB, burst_ms=500.0)
    many = [world.connect(way, world.client_of("many"), asked_bytes=50 * MB) for _ in range(50)]
    for each in many:
        each.batch_bytes = batch_bytes
    one = world.connect(way, world.client_of("one"))
    world.run(END_MS)
    assert got(one) >= ENOUGH * 4 * MB / 2
    assert world.rate(SETTLED_MS, END_MS) == pytest.approx(4 * MB, rel=0.02)


@pytest.mark.parametrize("size", [50_000, 100_000, MB])
@pytest.mark.parametrize("large", [100_000, 900_000])
def test_a_producer_with_one_connection_has_its_share_beside_one_with_many(large, size):
    """While its bytes flow at the bound it sends more: its answer does not wait for them."""
    world = SharedLoop(4 * MB, burst_ms=500.0)
    many = [world.connect("produce", world.client_of("many"), think_ms=2.0) for _ in range(50)]
    for each in many:
        each.size = large
    one = world.connect("produce", world.client_of("one"), think_ms=2.0)
    one.size = size
    world.run(END_MS)
    assert got(one) >= ENOUGH * 4 * MB / 2
    assert world.rate(SETTLED_MS, END_MS) == pytest.approx(4 * MB, rel=0.02)
    assert world.most_in() <= MOST * 4 * MB * 11


@pytest.mark.parametrize("size", [50_000, 100_000, MB])
@pytest.mark.parametrize("way", ["delay", "mute"])
def test_a_consumer_with_one_connection_has_its_share_of_large_batches_of_others(way, size):
    """It may ask for little at a time: the others' batches come whole."""
    world = SharedLoop(4 * MB)
    options = {"think_ms": 2.0, "by_lane": False}
    for _ in range(50):
        each = world.connect(way, world.client_of("many"), asked_bytes=50 * MB, **options)
        each.batch_bytes = 900_000
    one = world.connect(way, world.client_of("one"), asked_bytes=size, think_ms=2.0)
    world.run(END_MS)
    assert got(one) >= ENOUGH * 4 * MB / 2
    assert world.most_in() <= MOST * 4 * MB * 11


@pytest.mark.parametrize("begin_ms", [100.0, 3_000.0])
def test_who_had_a_large_answer_first_does_not_fall_behind(begin_ms):
    """It had turns that were expected to bring as much, when others had come."""
    world = SharedLoop(2 * MB, burst_ms=500.0)
    first, *_ = [
        [
            world.consumer(world.client_of(f"c-{at}"), 50 * MB, start_ms=at and begin_ms)
            for _ in range(4)
        ]
        for at in range(4)
    ]
    world.run(begin_ms + 7_000.0)
    answers = itertools.chain.from_iterable(each.got for each in first)
    later = sum(size for _, at_ms, size in answers if at_ms > begin_ms + 1_000.0)
    assert later / 6 >= 0.85 * 2 * MB / 4


@pytest.mark.parametrize("way", WAYS)
def test_a_user_gains_nothing_by_many_client_ids(way):
    world = SharedLoop()
    many = [world.connect(way, world.client_of(f"c-{at % 50}", "alice")) for at in range(100)]
    one = [world.connect(way, world.client_of("one", "bob")) for _ in range(20)]
    world.run(END_MS)
    assert got(*many) == pytest.approx(MB / 2, rel=0.05)
    assert got(*one) == pytest.approx(MB / 2, rel=0.05)


@pytest.mark.parametrize("user", [None, "mallory"])
@pytest.mark.parametrize("way", WAYS)
def test_a_client_with_a_new_name_for_each_request_starves_nobody(way, user):
    """With so many requests at a time it is so many clients, or one where its user is known."""
    at_once = 20
    world = SharedLoop()
    names = itertools.count()
    for _ in range(at_once):
        cheat = world.connect(way, world.client_of("cheat", user))

        def ask_anew(cheat: Consumer | Producer = cheat, ask=cheat.ask) -> None:
            cheat.client = world.client_of(f"cheat-{next(names)}", user)
            cheat.sizes = FetchSizes()
            ask()

        cheat.ask = ask_anew  # type: ignore[method-assign]
    honest = [world.connect(way, world.client_of("honest", user and "bob")) for _ in range(5)]
    world.run(END_MS)
    share = 1 / 2 if user else 1 / (at_once + 1)
    assert got(*honest) >= ENOUGH * share * MB
    assert next(names) > END_MS / 1000


@pytest.mark.parametrize("address", [HERE, THERE])
@pytest.mark.parametrize("in_budget", [False, True], ids=["shared", "budget"])
def test_names_made_up_for_each_request_are_one_client_where_they_come_from(in_budget, address):
    """Those of connections that were closed wait as well, and so more and more of them."""
    world = SharedLoop(4 * MB, in_budget=in_budget, burst_ms=500.0)
    honest = [
        world.producer(world.client_of("honest", address=HERE), think_ms=2.0) for _ in range(4)
    ]
    for each in honest:
        each.size = 100_000
    names = itertools.count()

    def come() -> None:
        client = world.client_of(f"cheat-{next(names)}", address=address)
        OneRequest(world, 900_000, client=client).ask()
        world.at(world.now_ms + 50.0, come)

    world.at(LATER_MS, come)
    world.run(END_MS)
    share, total = got(*honest), world.rate(SETTLED_MS, END_MS)
    assert share >= ENOUGH * 4 * MB / 2
    assert total == pytest.approx(4 * MB, rel=0.02)


@pytest.mark.parametrize("in_budget", [False, True], ids=["shared", "budget"])
@pytest.mark.parametrize("way", WAYS)
def test_a_new_client_has_a_share_of_its_own_once_it_was_there_for_a_while(in_budget, way):
    world = SharedLoop(in_budget=in_budget, burst_ms=500.0)

    def connections(name: str, address: str, start_ms: float) -> list[Consumer | Producer]:
        client = world.client_of(name, address=address)
        return [world.connect(way, client, start_ms=start_ms) for _ in range(4)]

    before = connections("old", HERE, 0.0)
    new = [connections(name, HERE, LATER_MS) for name in ("new-1", "new-2")]
    alone = connections("alone", THERE, LATER_MS)
    world.run(END_MS)
    soon = {"from_ms": LATER_MS + 1_000.0, "until_ms": LATER_MS + NEWCOMER_MS}
    shares = [got(*each, **soon) / MB for each in (before, [*new[0], *new[1]], alone)]
    assert shares == pytest.approx([1 / 3] * 3, rel=0.1)
    shares = [got(*each, from_ms=LATER_MS + 12_000.0) / MB for each in (before, *new, alone)]
    assert shares == pytest.approx([1 / 4] * 4, rel=0.05)


@pytest.mark.parametrize("in_budget", [False, True], ids=["shared", "budget"])
def test_who_is_new_no_more_has_one_share_with_all_that_waits(in_budget):
    """Connections that wait under the name of the address go on under the client's own."""
    world = SharedLoop(4 * MB, in_budget=in_budget, burst_ms=500.0)
    before = world.client_of("before", address=THERE)
    honest = [world.producer(before, think_ms=2.0) for _ in range(4)]
    new = world.client_of("new", address=HERE)
    many = [world.producer(new, start_ms=LATER_MS) for _ in range(50)]
    for each in honest:
        each.size = 100_000
    for each in many:
        each.size = 300_000
    world.run(END_MS)
    soon = {"from_ms": LATER_MS + NEWCOMER_MS, "until_ms": LATER_MS + 2 * NEWCOMER_MS}
    assert got(*honest, **soon) >= ENOUGH * 2 * MB


@pytest.mark.parametrize("in_budget", [False, True], ids=["shared", "budget"])
def test_a_new_user_has_a_share_of_its_own_at_once(in_budget):
    world = SharedLoop(in_budget=in_budget, by="user", burst_ms=500.0)
    users = [
        [world.producer(world.client_of("c", user, THERE), start_ms) for _ in range(4)]
        for user, start_ms in (("old", 0.0), ("new-1", LATER_MS), ("new-2", LATER_MS))
    ]
    world.run(LATER_MS + NEWCOMER_MS)
    soon = {"from_ms": LATER_MS + 1_000.0, "until_ms": LATER_MS + NEWCOMER_MS}
    shares = [got(*each, **soon) / MB for each in users]
    assert shares == pytest.approx([1 / 3] * 3, rel=0.05)


@pytest.mark.parametrize("in_budget", [False, True], ids=["shared", "budget"])
def test_neither_a_start_nor_new_connections_make_a_client_new(in_budget):
    """All were there at the start, two of them with a connection for each request."""
    world = SharedLoop(in_budget=in_budget, burst_ms=500.0)
    clients = [
        world.producer(world.client_of(name, address=address))
        for name, address in (("lasting", HERE), ("anew-1", THERE), ("anew-2", THERE))
    ]
    for each in clients[1:]:

        def ask_anew(each: Producer = each, ask=each.ask) -> None:
            each.client.close()
            each.client = world.client_of(each.client.identity.client_id or "", address=THERE)
            ask()

        each.ask = ask_anew  # type: ignore[method-assign]
    world.run(END_MS)
    for times in ({"from_ms": 1_000.0, "until_ms": LATER_MS}, {}):
        shares = [got(each, **times) / MB for each in clients]
        assert shares == pytest.approx([1 / 3] * 3, rel=0.05)


CLIENT = TurnNode(None), TurnNode("c")


@given(st.lists(st.tuples(st.sampled_from(["join", "take", "leave"]), st.integers(0, 5))))
def test_connections_of_one_client_take_turns_in_the_order_in_which_they_came(steps):
    turns: Turns[int] = Turns()
    model: deque[int] = deque()
    for step, number in steps:
        if step == "join" and number not in model:
            turns.join(number, CLIENT, BATCH, 0.0)
            model.append(number)
        elif step == "take" and model:
            turns.leave(model.popleft(), CLIENT, 0.0, BATCH)
        elif step == "leave" and number in model:
            turns.leave(number, CLIENT, 0.0)
            model.remove(number)
        assert turns.first(0.0) == (model[0] if model else None)


PATHS = st.tuples(
    st.builds(lambda name: TurnNode(name, 0.5), st.sampled_from([None, "alice", "bob"])),
    st.builds(
        lambda name: TurnNode(name, 2.0, 50.0 if name == "a" else 0.0), st.sampled_from("ab")
    ),
)


@given(st.lists(st.tuples(st.booleans(), PATHS, st.integers(1, MB)), max_size=60))
def test_whoever_waits_has_its_turn(steps):
    turns: Turns[int] = Turns()
    waiting = {}
    for number, (joins, path, size) in enumerate(steps):
        if joins or not waiting:
            turns.join(number, path, size, number)
            waiting[number] = path
        else:
            first = turns.first(number)
            assert first is not None
            turns.leave(first, waiting.pop(first), number, size)
    while waiting:
        first = turns.first(len(steps))
        assert first is not None
        turns.leave(first, waiting.pop(first), len(steps), 1)
    assert turns.first(math.inf) is None


@given(st.lists(st.integers(1, TURN_BYTES), min_size=2, max_size=8), st.integers(100, 300))
def test_who_always_waits_has_no_more_than_a_turn_more_than_others(sizes, rounds):
    order = FairOrder()
    had = dict.fromkeys(range(len(sizes)), 0)
    for key, size in enumerate(sizes):
        order.join(TurnNode(key), size, 0.0)
    for _ in range(rounds):
        key = order.first(0.0)
        order.take(key, sizes[key], 0.0)
        had[key] += sizes[key]
    assert max(had.values()) - min(had.values()) <= 2 * max(sizes)


def test_of_those_that_left_no_more_is_kept_than_there_is_room_for():
    def come_and_go(first, last):
        for key in range(first, last):
            order.join(TurnNode(key, guaranteed=1.0), 1, 0.0)
            if key % 2:
                order.take(key, 1, 0.0)
            order.leave(key)

    order = FairOrder()
    order.join(TurnNode(-1), 0, 0.0)
    tracemalloc.start()
    try:
        come_and_go(0, 5 * MOST_KNOWN)
        before_bytes, _ = tracemalloc.get_traced_memory()
        come_and_go(5 * MOST_KNOWN, 20 * MOST_KNOWN)
        after_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert order.first(0.0) == -1
    assert after_bytes - before_bytes < before_bytes, "15 times as many have come"


def test_a_large_request_counts_as_much_as_it_brings():
    """What follows its head, which took the turn, counts like turns of its own."""
    order = FairOrder()
    for key in "ab":
        order.join(TurnNode(key), TURN_BYTES, 0.0)
    order.take(order.first(0.0), TURN_BYTES, 0.0)
    order.took(TurnNode("a"), 3 * TURN_BYTES)
    turns = []
    for _ in range(5):
        turns.append(order.first(0.0))
        order.take(turns[-1], TURN_BYTES, 0.0)
    assert turns == ["b", "b", "b", "b", "a"]
