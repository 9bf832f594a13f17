"""Clients of another member: where they are told to go, and how they are let go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from struct import pack
from typing import Any

import pytest
from parts.interceptors import AllShown
from parts.two_members import MapSteering, member_at, moved
from relaylab import frames
from relaylab.lab import (
    LISTENER,
    End,
    Lab,
    fast_client,
    open_lab,
    slow_client,
    turns,
    until,
)

from proxy.quota.entities import QuotaKind
from proxy.relay import connection
from proxy.relay.interceptor import NotOwnerError
from proxy.relay.steering import MemberAddresses
from proxy.tier.slot_map import SLOTS, SlotMap
from proxy.wire.apis import LIST_OFFSETS
from proxy.wire.rewrite import FALLBACK_NODE_ID

NODE = 5
SASL_HANDSHAKE, SASL_AUTHENTICATE = 17, 36
BIG_BYTES = 2 << 20
TIMER_SLACK_S = 0.05
"""A timer of uvloop counts whole milliseconds from when the loop last woke."""


@dataclass
class Pair:
    """Two relays, `a` and `b`, each before its own scripted broker, which is broker 5."""

    a: Lab
    b: Lab

    def move(self, owner: str) -> None:
        """Have one of them own all clients."""
        for lab in (self.a, self.b):
            steering = lab.services.steering
            assert isinstance(steering, MapSteering)
            steering.follow(moved(steering.map, owner, self.members))

    @property
    def members(self) -> tuple[Any, ...]:
        return tuple(
            member_at(name, LISTENER, lab.port, {NODE: port_of(lab)})
            for name, lab in (("a", self.a), ("b", self.b))
        )

    def visits(self) -> list[tuple[QuotaKind, float]]:
        steering = self.a.services.steering
        assert isinstance(steering, MapSteering)
        return [(each.kind, each.amount) for each in steering.visits]


def port_of(lab: Lab) -> int:
    address = lab.relay.listeners[LISTENER].address_of(NODE)
    assert address is not None
    return address[1]


def steered(lab: Lab) -> float:
    return lab.count("steered_connections_total")


async def at_broker_port(lab: Lab, first: bytes) -> tuple[End, End]:
    """As `pair`, through the port of broker 5."""
    client = await lab.client(port_of(lab))
    await client.send(first)
    broker = await lab.broker()
    assert await broker.frame() == first
    return client, broker


@asynccontextmanager
async def open_pair(owner: str, **settings: Any) -> AsyncIterator[Pair]:
    """Relays whose clients all belong to one of them."""
    first, second = MapSteering.pair(owner)
    async with (
        open_lab(steering=first, **settings) as a,
        open_lab(steering=second, is_inner=True) as b,
    ):
        pair = Pair(a, b)
        pair.move(owner)
        yield pair


@pytest.fixture
def soon(monkeypatch):
    """Visitors go at once."""
    monkeypatch.setattr(connection, "MIN_VISIT_S", 0.0)


@pytest.mark.parametrize("owner", ["a", "b"])
async def test_clients_are_told_the_owners_addresses(owner):
    async with open_pair(owner) as pair:
        for lab in (pair.a, pair.b):
            client, broker = await lab.pair(frames.metadata_request(1))
            await broker.send(frames.metadata_response(1, {NODE: ("real", 9092)}))
            told = frames.metadata_brokers(await client.frame())
            home, other = (pair.a, pair.b) if owner == "a" else (pair.b, pair.a)
            assert told.pop(NODE)[1] == port_of(home)
            assert told == {FALLBACK_NODE_ID: ("127.0.0.1", other.port)}


async def test_without_a_port_at_the_owner_the_client_is_served_here(soon):
    async with open_pair("b") as pair:
        client, broker = await pair.a.pair(frames.metadata_request(1))
        await broker.send(frames.metadata_response(1, {9: ("real", 9092)}))
        told = frames.metadata_brokers(await client.frame())
        assert told[9] == pair.a.relay.listeners[LISTENER].address_of(9)
        assert pair.a.relay.brokers.addresses[9] == ("real", 9092)
        visitor = await pair.a.client(told[9][1])
        await visitor.send(frames.fetch_request(1))
        pair.a.brokers.learn(9, "127.0.0.1", 1)
        at_broker = await pair.a.broker()
        await at_broker.frame()
        await asyncio.sleep(0.02)
        await at_broker.send(frames.fetch_response(1, 100))
        await visitor.frame()
        await visitor.send(frames.fetch_request(2))
        await at_broker.frame()
        assert not steered(pair.a)


@pytest.mark.parametrize("is_bounded", [False, True])
async def test_a_visitor_is_let_go_and_gets_data_only_where_no_rule_bounds_it(is_bounded):
    """All members at once would give it a burst each."""
    rules = (fast_client(),) if is_bounded else ()
    async with open_pair("b", rules=rules) as pair:
        began_s = asyncio.get_running_loop().time()
        client = await pair.a.client(port_of(pair.a))
        await client.send(frames.fetch_request(1))
        broker = await pair.a.broker()
        if not is_bounded:
            assert await broker.frame() == frames.fetch_request(1)
            await broker.send(frames.fetch_response(1, 1000))
            assert await client.frame() == frames.fetch_response(1, 1000)
        assert await client.ended() == b""
        assert asyncio.get_running_loop().time() - began_s >= connection.MIN_VISIT_S - TIMER_SLACK_S
        await client.close()
        assert steered(pair.a) == 1
        size = 0 if is_bounded else len(frames.fetch_response(1, 1000))
        assert pair.a.count("visits_bytes_total") == size


async def test_what_is_in_flight_at_a_move_is_a_visit(soon):
    async with open_pair("a", rules=(fast_client(),)) as pair:
        client, broker = await at_broker_port(pair.a, frames.fetch_request(1))
        pair.move("b")
        await until(lambda: steered(pair.a))
        response = frames.fetch_response(1, 1000)
        await broker.send(response)
        assert await client.ended() == response
        await client.close()
        assert (QuotaKind.CONSUMER_BYTE_RATE, len(response)) in pair.visits()
        assert pair.a.count("visits_bytes_total") == len(response)


class SendingOn(AllShown):
    """Sends all clients on that look up offsets, as an interceptor."""

    def wants(self, api_key, _now_ms):
        return api_key == LIST_OFFSETS

    def request(self, _head, _frame, _now_ms):
        raise NotOwnerError


@pytest.mark.parametrize("owner", ["a", "b"])
@pytest.mark.parametrize("parts", [1, 2])
async def test_who_is_sent_on_gets_what_is_in_flight_and_no_answer(soon, owner, parts):
    async with open_pair(owner) as pair:
        pair.a.services.interceptor = lambda *_: SendingOn()
        client, broker = await at_broker_port(pair.a, frames.fetch_request(1))
        asked = frames.request(LIST_OFFSETS, 7, 2, b"anything") + frames.fetch_request(3)
        await client.send(asked[: len(asked) // parts])
        await asyncio.sleep(0.02)
        await client.send(asked[len(asked) // parts :])
        await broker.send(frames.fetch_response(1, 1000))
        assert await client.frame() == frames.fetch_response(1, 1000)
        await client.ended()
        await client.close()
        await broker.ended()
        assert steered(pair.a) == 1


async def test_those_of_the_owner_stay(soon):
    async with open_pair("a") as pair:
        client, broker = await at_broker_port(pair.a, frames.fetch_request(1))
        for number in (1, 2, 3):
            await broker.send(frames.fetch_response(number, 10))
            await client.frame()
            await asyncio.sleep(0.01)
            await client.send(frames.fetch_request(number + 1))
            await broker.frame()
        assert not pair.visits()


async def test_who_came_before_there_was_a_fallback_asks_for_its_addresses_anew(soon):
    """It would have nowhere to go if its owner died."""
    alone = MapSteering("a", SlotMap({"a": MemberAddresses("a", {})}, ["a"] * SLOTS))
    async with open_lab(steering=alone) as lab:
        client, broker = await at_broker_port(lab, frames.fetch_request(1))
        members = [member_at(name, LISTENER, lab.port, {NODE: port_of(lab)}) for name in "ab"]
        alone.follow(moved(alone.map, "a", (members[0],)))
        await asyncio.sleep(0.02)
        assert not steered(lab)
        alone.follow(moved(alone.map, "a", (members[1],)))
        await until(lambda: steered(lab))
        await broker.send(frames.fetch_response(1, 1000))
        assert await client.ended() == frames.fetch_response(1, 1000)
        await client.close()
        again, broker = await at_broker_port(lab, frames.fetch_request(2))
        alone.follow(moved(alone.map, "a"))
        await broker.send(frames.fetch_response(2, 10))
        assert await again.frame() == frames.fetch_response(2, 10)
        assert steered(lab) == 1


async def test_a_bootstrap_connection_stays_until_it_carries_data(soon):
    async with open_pair("b") as pair:
        client, broker = await pair.a.pair(frames.metadata_request(1))
        await broker.send(frames.metadata_response(1, {NODE: ("real", 9092)}))
        await client.frame()
        await asyncio.sleep(0.02)
        await client.send(frames.fetch_request(2))
        await broker.frame()
        await broker.send(frames.fetch_response(2, 10))
        assert await client.ended() == frames.fetch_response(2, 10)
        await client.close()
        assert steered(pair.a) == 1


async def test_a_move_with_requests_in_flight():
    """Their answers come, the next request is not sent on."""
    async with open_pair("a") as pair:
        client, broker = await at_broker_port(pair.a, frames.produce_request(1, acks=1))
        for number in (2, 3):
            await client.send(frames.produce_request(number, acks=1))
            await broker.frame()
        await asyncio.sleep(connection.MIN_VISIT_S)
        pair.move("b")
        await until(lambda: steered(pair.a))
        await client.send(frames.produce_request(4, acks=1))
        answers = [frames.response(0, 7, number, b"stored") for number in (1, 2, 3)]
        for answer in answers:
            await turns()
            await broker.send(answer)
        assert await client.ended() == b"".join(answers)
        await client.close()
        assert await broker.ended() == b""


async def test_those_that_have_come_stay():
    async with open_pair("b") as pair:
        client, broker = await at_broker_port(pair.a, frames.fetch_request(1))
        pair.move("a")  # before its least time is over, which on a busy machine may be soon
        await asyncio.sleep(connection.MIN_VISIT_S + TIMER_SLACK_S)
        await broker.send(frames.fetch_response(1, 10))
        await client.frame()
        await client.send(frames.fetch_request(2))
        await broker.frame()
        assert not steered(pair.a)


async def test_a_move_while_an_answer_is_held(soon, monkeypatch):
    monkeypatch.setattr(connection, "LAST_HOLD_MS", 100.0)
    async with open_pair("a", rules=(slow_client(),)) as pair:
        client, broker = await at_broker_port(pair.a, frames.fetch_request(1))
        await client.send(frames.fetch_request(2))
        await broker.frame()
        answers = [frames.fetch_response(number, 10_000) for number in (1, 2)]
        await broker.send(b"".join(answers))
        await until(lambda: pair.a.held)
        began_s = asyncio.get_running_loop().time()
        pair.move("b")
        assert await client.ended() == b"".join(answers)
        assert asyncio.get_running_loop().time() - began_s > 0.05
        await client.close()
        assert pair.visits() == [(QuotaKind.CONSUMER_BYTE_RATE, len(answers[1]))]


async def test_a_move_while_the_client_is_muted(soon):
    rules = (slow_client(),)
    async with open_pair("a", rules=rules, holds=False) as pair:
        client, broker = await at_broker_port(pair.a, frames.fetch_request(1))
        await broker.send(frames.fetch_response(1, 10_000))
        await client.frame()
        await client.send(frames.fetch_request(2))
        await turns(20)
        pair.move("b")
        assert await client.ended() == b""
        await client.close()
        assert not broker.unread


@pytest.mark.parametrize("acks", [0, 1])
async def test_a_move_while_requests_wait_at_a_gate(soon, acks):
    """What was read and gets no answer is sent on; what does is left to be sent again."""
    rules = (slow_client(kind=QuotaKind.PRODUCER_BYTE_RATE),)
    async with open_pair("a", rules=rules) as pair:
        client, broker = await at_broker_port(pair.a, frames.produce_request(1, acks=acks))
        (connection,) = pair.a.relay.connections
        waiting = [frames.produce_request(number, acks=acks) for number in (2, 3, 4)]
        waiting.append(frames.produce_request(5, acks=acks, record_bytes=BIG_BYTES))
        sending = asyncio.create_task(client.send(b"".join(waiting)))
        await until(lambda: connection.waiter.gate is not None)
        pair.move("b")
        if acks:
            await until(lambda: steered(pair.a))
            answer = frames.response(0, 7, 1, b"stored")
            await broker.send(answer)
            assert await client.ended() == answer
            sending.cancel()
            client.reset()
            assert await broker.ended() == b""
        else:
            assert await broker.receive(len(b"".join(waiting))) == b"".join(waiting)
            await sending
            await client.ended()
            await client.close()
            assert await broker.ended() == b""


@pytest.mark.parametrize("acks", [0, 1])
async def test_a_move_within_a_request(soon, acks):
    async with open_pair("a") as pair:
        client, broker = await at_broker_port(pair.a, frames.produce_request(1, acks=0))
        big = frames.produce_request(2, acks=acks, record_bytes=BIG_BYTES)
        await client.send(big[:200_000])
        start = await broker.receive(200_000)
        pair.move("b")
        await until(lambda: steered(pair.a))
        sending = asyncio.create_task(client.send(big[200_000:]))
        assert start + await broker.receive(len(big) - 200_000) == big
        await sending
        if acks:
            await broker.send(frames.response(0, 7, 2, b"stored"))
            assert await client.frame() == frames.response(0, 7, 2, b"stored")
        assert await client.ended() == b""
        await client.close()


async def log_in(client: End, broker: End, user: str) -> None:
    name = user.encode()
    handshake = frames.request(SASL_HANDSHAKE, 1, 2, b"\0\5PLAIN")
    await client.send(handshake)
    assert await broker.frame() == handshake
    await broker.send(frames.response(SASL_HANDSHAKE, 1, 2, b"\0\0" + pack(">i", 1) + b"\0\5PLAIN"))
    await client.frame()
    token = b"\0" + name + b"\0secret"
    await client.send(frames.request(SASL_AUTHENTICATE, 0, 3, pack(">i", len(token)) + token))
    await broker.frame()
    await broker.send(frames.response(SASL_AUTHENTICATE, 0, 3, b"\0\0\xff\xff" + pack(">i", 0)))
    await client.frame()


async def test_who_logs_in_belongs_to_the_owner_of_the_user(soon):
    """Before the login nobody is let go, whoever owns the anonymous."""
    for owner in ("a", "b"):
        async with open_pair(owner) as pair:
            versions = frames.request(18, 0, 1)
            client, broker = await at_broker_port(pair.a, versions)
            answer = frames.response(18, 0, 1, b"\0\0" + pack(">i", 0))
            await broker.send(answer)
            assert await client.frame() == answer
            await asyncio.sleep(0.02)
            await log_in(client, broker, "alice")
            await asyncio.sleep(0.02)
            assert not steered(pair.a)
            await client.send(frames.fetch_request(4))
            await broker.frame()
            await broker.send(frames.fetch_response(4, 10))
            assert await client.frame() == frames.fetch_response(4, 10)
            if owner == "b":
                assert await client.ended() == b""
                await client.close()
            assert steered(pair.a) == (owner == "b")
