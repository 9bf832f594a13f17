"""Connections come and go a few at a time: in order, all of them, and others run in between."""

import asyncio
import gc
import ssl
import weakref
from contextlib import suppress

import pytest
from relaylab.busy_round import BusyRound
from relaylab.frames import fetch_request, fetch_response, metadata_request, metadata_response
from relaylab.lab import LIMIT_S, open_lab, turns, until

from proxy.relay.frame_flow import TURNS_OF_NEW
from proxy.relay.paced_steps import LONGEST_TURN_S, MOST_S, ROUND_S, PacedStepScheduler

PIPELINING, PIPELINED = 10, 20
MOST_IN_A_ROUND = 8
"""Of their pieces: what fits into MOST_S, and one that was begun before a round ended."""


class Work:
    """Steps that take a time which the test says, on a clock of their own."""

    def __init__(self):
        self.now_s = 0.0
        self.done = []
        self.steps = PacedStepScheduler(asyncio.get_running_loop(), lambda: self.now_s)

    def add(self, name, takes_s, address=""):
        def step():
            self.now_s += takes_s
            self.done.append(name)

        self.steps.add(step, address)


async def test_few_steps_run_at_once():
    work = Work()
    for number in range(4):
        work.add(number, MOST_S / 4)
    assert work.done == [0, 1, 2, 3]
    await turns()
    work.add(4, MOST_S)
    assert work.done[-1] == 4


async def test_what_takes_longer_waits_for_later_rounds_in_order():
    work = Work()
    for number in range(10):
        work.add(number, MOST_S / 2)
    assert work.done == [0, 1]
    assert len(work.steps) == 8
    for rounds in range(1, 5):
        work.add(f"late {rounds}", 0.0)  # behind all that wait
        await turns(1)
        assert work.done == list(range(2 + 2 * rounds))
    await turns()
    assert work.done[10:] == [f"late {rounds}" for rounds in range(1, 5)]
    assert not len(work.steps)


async def test_addresses_take_turns():
    """Who asks for much at once delays mostly itself."""
    work = Work()
    for number in range(5):
        work.add(f"much {number}", MOST_S, "stranger")
    for name in ("first", "second"):
        work.add(name, MOST_S, "friend")
    assert len(work.steps) == 6
    await turns(6)
    assert work.done == ["much 0", "much 1", "first", "much 2", "second", "much 3", "much 4"]
    assert not len(work.steps)


async def test_a_long_step_has_a_round_to_itself():
    work = Work()
    for number in range(3):
        work.add(number, 10 * MOST_S)
    assert work.done == [0]
    await turns(1)
    assert work.done == [0, 1]


async def test_fewer_of_them_run_in_a_round_while_rounds_take_long():
    work = Work()
    for number in range(40):
        work.add(number, MOST_S / 4 + ROUND_S / 1000)
    counts = []
    for _ in range(4):
        work.now_s += 100 * ROUND_S  # what else there is in a round
        before = len(work.done)
        await turns(1)
        counts.append(len(work.done) - before)
    assert counts == [2, 1, 1, 1]
    while len(work.steps):
        before = len(work.done)
        await turns(1)
        counts.append(len(work.done) - before)
    assert max(counts[4:]) == 4
    assert work.done == list(range(40))


async def test_what_goes_on_in_pieces_shares_the_time_of_a_round():
    work = Work()

    def pieces(name):
        while True:
            work.now_s += MOST_S / 2
            work.done.append(name)
            yield

    first, second = pieces("first"), pieces("second")
    while work.steps.may_go_on:
        assert work.steps.go_on(first)
    assert work.done == ["first", "first"]

    def turn():
        while work.steps.may_go_on:
            work.steps.go_on(second)
        if len(work.done) < 7:
            work.steps.queue(turn)

    work.steps.queue(turn)
    work.add("newcomer", 0.0)
    await turns(1)
    assert work.done[2:] == ["second", "newcomer", "second"]
    await turns(1)
    assert work.done[5:] == ["second", "second"]


async def test_pieces_end_as_they_will():
    work = Work()
    assert not work.steps.go_on(iter(()))

    def broken():
        yield
        raise ValueError("broken")

    pieces = broken()
    assert work.steps.go_on(pieces)
    with pytest.raises(ValueError, match="broken"):
        work.steps.go_on(pieces)
    await turns()
    assert work.steps.may_go_on


async def test_an_operation_has_its_turn_and_its_result():
    work = Work()
    for number in range(3):
        work.add(number, MOST_S)
    turns_of = [asyncio.create_task(work.steps.turn("", each)) for each in (dict, [].pop, set)]
    await turns(1)
    turns_of[2].cancel()
    results = await asyncio.gather(*turns_of, return_exceptions=True)
    assert [type(each) for each in results] == [dict, IndexError, asyncio.CancelledError]
    await until(lambda: not len(work.steps))


async def test_an_operation_that_fails_leaves_nothing_to_the_garbage_collector():
    class Failing:
        def fail(self):
            raise ValueError("failed")

    failing = Failing()
    gone = weakref.ref(failing)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="failed") as raised:
            await Work().steps.turn("", failing.fail)
        del failing, raised
        assert gone() is None
    finally:
        gc.enable()


async def test_all_can_be_run_now():
    work = Work()
    for number in range(10):
        work.add(number, MOST_S)
    work.steps.run_all()
    assert work.done == list(range(10))
    await turns()
    assert work.done == list(range(10))


async def test_all_who_ask_for_much_at_once_share_the_time_of_a_round():
    """Each piece takes a millisecond here."""
    async with open_lab() as lab:
        loop, clock_s = asyncio.get_running_loop(), 0.0

        def clock():
            nonlocal clock_s
            clock_s += MOST_S / 4
            return clock_s

        lab.services.paced_steps = steps = PacedStepScheduler(loop, clock)
        pairs = [await lab.pair(fetch_request(0)) for _ in range(PIPELINING)]
        rounds, go_on = [0], steps.go_on

        def next_round():
            rounds.append(0)
            ticking[0] = loop.call_soon(next_round)

        def counted(work):
            rounds[-1] += 1
            return go_on(work)

        steps.go_on = counted
        ticking = [loop.call_soon(next_round)]
        asked = [metadata_request(number) for number in range(1, PIPELINED + 1)]
        answers = [metadata_response(number, {}) for number in range(1, PIPELINED + 1)]
        for client, broker in pairs:
            await client.send(b"".join(asked))
            await broker.send(fetch_response(0, 10), b"".join(answers))
        for client, _ in pairs:
            assert await client.frame() == fetch_response(0, 10)
            assert [await client.frame() for _ in answers] == answers
        ticking[0].cancel()
        assert sum(rounds) == PIPELINING * PIPELINED
        assert max(rounds) <= MOST_IN_A_ROUND


async def test_many_that_connect_at_once_are_all_served_and_leave_nothing():
    async with open_lab() as lab:
        clients = await asyncio.gather(*(lab.client() for _ in range(150)))
        await asyncio.gather(*(client.send(fetch_request(1)) for client in clients))

        async def answer():
            for _ in clients:
                broker = await lab.broker()
                await broker.frame()
                await broker.send(fetch_response(1, 1000))

        answering = asyncio.create_task(answer())
        for client in clients:
            assert await client.frame() == fetch_response(1, 1000)
        await asyncio.wait_for(answering, LIMIT_S)
        assert lab.relay.connected == 150
        for client in clients:
            client.reset()
        await until(lambda: not lab.relay.connected)


async def test_a_new_connection_waits_its_turn_and_an_older_one_does_not():
    async with open_lab() as lab:
        busy = BusyRound(lab)
        new, its_broker = await lab.pair(fetch_request(1))
        client, broker = await lab.pair(fetch_request(1))
        for number in range(1, TURNS_OF_NEW + 2):
            await broker.send(fetch_response(number, 1000))
            assert await client.frame() == fetch_response(number, 1000)
            await client.send(fetch_request(number + 1))
            assert await broker.frame() == fetch_request(number + 1)
        busy.begin()
        await new.send(fetch_request(2))
        await until(lambda: len(busy.steps))
        await broker.send(fetch_response(TURNS_OF_NEW + 2, 1000))
        assert await client.frame() == fetch_response(TURNS_OF_NEW + 2, 1000)
        await client.send(fetch_request(TURNS_OF_NEW + 3))
        assert await broker.frame() == fetch_request(TURNS_OF_NEW + 3)
        assert len(busy.steps) == 1
        assert not its_broker.unread
        busy.end()
        assert await its_broker.frame() == fetch_request(2)


async def test_a_tls_handshake_waits_its_turn(certificates):
    """To sign takes a millisecond or more, and thousands may want it at once. Nobody else waits."""
    begun, loop = ssl.MemoryBIO(), asyncio.get_running_loop()
    with suppress(ssl.SSLWantReadError):
        certificates.client().wrap_bio(
            ssl.MemoryBIO(), begun, server_hostname="localhost"
        ).do_handshake()
    async with open_lab(client_tls=certificates) as lab:
        busy = BusyRound(lab, "handshakes")
        other, broker = await lab.pair(metadata_request(1))
        client = await lab.silent_client()
        await until(lambda: lab.relay.connected == 2)
        await turns()
        busy.begin()
        await loop.sock_sendall(client, begun.read())
        await until(lambda: len(busy.steps))
        await broker.send(metadata_response(1, {}))
        assert await other.frame() == metadata_response(1, {})
        with pytest.raises(BlockingIOError):
            client.recv(1)
        busy.end()
        assert await loop.sock_recv(client, 1) == b"\x16"


@pytest.mark.parametrize("is_crowded", [True, False])
async def test_behind_addresses_that_wait_for_long_nobody_waits_for_a_handshake(
    certificates, is_crowded
):
    """Its time would be over before its turn, as that of all others: nobody would be let in."""
    async with open_lab(client_tls=certificates) as lab:
        busy = BusyRound(lab, "handshakes")
        busy.begin()
        first = await lab.silent_client()
        await asyncio.get_running_loop().sock_sendall(first, b"\x16")
        await until(lambda: len(busy.steps) == 1)
        busy.now_s += 1.5 * LONGEST_TURN_S if is_crowded else 0.5 * LONGEST_TURN_S
        connecting = asyncio.create_task(lab.client(address="127.0.0.2"))
        await until(lambda: lab.rejected("tls_handshake") or len(busy.steps) == 2)
        assert lab.rejected("tls_handshake") == is_crowded
        await lab.silent_client()  # its address waits already
        await until(lambda: len(busy.steps) == 3 - is_crowded)
        busy.end()
        if is_crowded:
            with pytest.raises(ConnectionError):
                await connecting
            connecting = asyncio.create_task(lab.client(address="127.0.0.2"))
        await asyncio.wait_for(connecting, LIMIT_S)


@pytest.mark.parametrize("lost", ["client", "broker"])
@pytest.mark.parametrize("is_reset", [True, False], ids=["reset", "ended"])
async def test_those_that_are_lost_wait_for_their_turn_to_be_closed(lost, is_reset):
    async with open_lab() as lab:
        busy = BusyRound(lab)
        client, broker = await lab.pair(fetch_request(1))
        busy.begin()
        end = client if lost == "client" else broker
        end.reset() if is_reset else end.writer.close()
        await until(lambda: len(busy.steps))
        assert lab.relay.connected == 1
        busy.end()
        assert not lab.relay.connected


async def test_those_that_wait_to_begin_are_closed_by_a_drain():
    async with open_lab() as lab:
        busy = BusyRound(lab)
        busy.begin()
        client = await lab.client()
        await until(lambda: len(busy.steps))
        assert not lab.relay.connections
        await lab.relay.drain()
        assert await client.ended() == b""
