"""Requests that an interceptor answers do not reach the broker; their answers come in order."""

import asyncio
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parts.interceptors import AllShown
from relaylab import frames
from relaylab.lab import (
    LIMIT_S,
    LISTENER,
    fast_client,
    open_lab,
    slow_client,
    turns,
    until,
)

from proxy.relay.interceptor import InterceptedRequest
from proxy.relay.services import Limits
from proxy.wire.apis import FETCH, LIST_OFFSETS

VERSION = 7
FETCH_VERSION = 15
BIG_BYTES = 300_000
MANY = 200
"""Answers: more than a flow handles in one turn."""

FOR_BROKER = b"for the broker"
FOR_LONG_ANSWER = b"for a long answer"
LONG_BYTES = 16 << 20
"""More than sockets take."""


class WalkedFetch(InterceptedRequest):
    """A Fetch whose response is read as it passes."""

    takes_whole = False

    def observer(self, _now_ms):
        return self

    def session(self, error_code, session_id):
        pass

    def partitions(self, topic, fetched):
        pass

    def ended(self):
        pass


class AnsweredRequest(InterceptedRequest):
    def __init__(self, answer):
        self.answer = answer


class AnsweringInterceptor(AllShown):
    """Answers look-ups, but for those that are `FOR_BROKER`; Fetches are walked."""

    def request(self, head, frame, _now_ms):
        if head.api_key == FETCH:
            return WalkedFetch()
        if frame[head.header_end :] == FOR_BROKER:
            return InterceptedRequest()
        if frame[head.header_end :] == FOR_LONG_ANSWER:
            return AnsweredRequest(long(head.correlation_id))
        return AnsweredRequest(own(head.correlation_id))


@asynccontextmanager
async def answering_lab(**options):
    async with open_lab(**options) as lab:
        lab.services.interceptor = lambda *_: AnsweringInterceptor()
        yield lab


def fetch(correlation_id):
    return frames.fetch_request(correlation_id, version=FETCH_VERSION)


def fetched(correlation_id, *sizes):
    """What a broker sends, which is what a client sees."""
    return frames.fetch_partitions(correlation_id, [bytes(size) for size in sizes])


def lookup(correlation_id, body=b"anything"):
    return frames.request(LIST_OFFSETS, VERSION, correlation_id, body)


def own(correlation_id):
    """So long that sockets do not take thousands of them."""
    return frames.response(LIST_OFFSETS, VERSION, correlation_id, b"by the interceptor" * 50)


def long(correlation_id):
    return frames.response(LIST_OFFSETS, VERSION, correlation_id, bytes(LONG_BYTES))


def by_broker(correlation_id):
    return frames.response(LIST_OFFSETS, VERSION, correlation_id, b"by the broker")


def taken(lab):
    """How many look-ups were read."""
    return lab.count("requests_total", api="ListOffsets", version=str(VERSION))


async def test_at_once_when_nothing_is_in_flight():
    async with answering_lab() as lab:
        client, broker = await lab.pair(fetch(1))
        await broker.send(fetched(1, 10))
        assert await client.frame() == fetched(1, 10)
        await client.send(lookup(2))
        assert await client.frame() == own(2)
        await client.send(lookup(3, FOR_BROKER))
        assert await broker.frame() == lookup(3, FOR_BROKER)
        await broker.send(by_broker(3))
        assert await client.frame() == by_broker(3)


async def test_as_the_first_request_of_a_connection():
    async with answering_lab() as lab:
        client = await lab.client()
        await client.send(lookup(1))
        assert await client.frame() == own(1)


async def test_more_than_the_client_takes_at_once():
    async with answering_lab() as lab:
        client, broker = await lab.pair(fetch(1))
        await broker.send(fetched(1, 10))
        await client.frame()
        await client.send(lookup(2, FOR_LONG_ANSWER))
        assert await client.frame() == long(2)
        await client.send(fetch(3), lookup(4, FOR_LONG_ANSWER))
        await broker.frame()
        await broker.send(fetched(3, 10))
        assert await client.frame() == fetched(3, 10)
        assert await client.frame() == long(4)


async def test_it_counts_like_any_other():
    async with answering_lab(rules=(fast_client(),)) as lab:
        client = await lab.client()
        await client.send(lookup(1))
        await client.frame()
        assert taken(lab) == 1
        labels = {"listener": LISTENER, "user": "", "client_id": "test", "api": "ListOffsets"}
        assert lab.count("bytes_total", **labels) == len(lookup(1) + own(1))


@pytest.mark.parametrize("path", ["splice", "copy", "tls"])
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    sizes=st.lists(st.sampled_from([0, 10, 5_000, 70_000, 150_000]), min_size=1, max_size=3),
    asked_early=st.booleans(),
    cuts=st.lists(st.floats(0, 1), max_size=6),
    places=st.lists(st.integers(0, 120), max_size=6),
)
def test_in_turn_at_any_split(path, certificates, sizes, asked_early, cuts, places):
    """Behind a Fetch in flight, also where that is under way already, and before the next frame."""
    asked = [fetch(2), lookup(3), lookup(4), lookup(5, FOR_BROKER), lookup(6), fetch(7), lookup(8)]
    answers = [fetched(2, *sizes), by_broker(5), fetched(7, *sizes)]
    expected = [answers[0], own(3), own(4), answers[1], own(6), answers[2], own(8)]
    sent = b"".join(answers)
    borders = {int(cut * len(sent)) for cut in cuts} | set(places)
    pieces = [sent[a:b] for a, b in pairwise(sorted({0, len(sent), *borders}))]

    async def relay() -> None:
        tls = {"client_tls": certificates, "upstream_tls": certificates} if path == "tls" else {}
        async with answering_lab(splice=path != "copy", **tls) as lab:
            client, broker = await lab.pair(fetch(1))
            await broker.send(fetched(1, 10))
            await client.frame()
            if asked_early:
                await client.send(*asked)
                sending = asyncio.create_task(broker.send(*pieces))
            else:  # the broker's answers are under way meanwhile
                await client.send(asked[0], asked[3], asked[5])
                assert [await broker.frame() for _ in range(3)] == [asked[0], asked[3], asked[5]]
                sending = asyncio.create_task(broker.send(*pieces))
                await client.send(asked[1])
                received = [await client.frame() for _ in range(4)]
                assert sorted(received) == sorted([*answers, own(3)])
                await sending
                return
            assert [await client.frame() for _ in expected] == expected
            await sending
            assert [await broker.frame() for _ in range(3)] == [asked[0], asked[3], asked[5]]

    asyncio.run(relay())


async def test_not_within_a_response_that_is_under_way():
    """The request of that response is in flight no more, and its rest is yet to come."""
    whole = fetched(2, 100, BIG_BYTES, 100)
    for place in (10, 30, 200, BIG_BYTES // 2, len(whole) - 100, len(whole) - 1):
        async with answering_lab() as lab:
            client, broker = await lab.pair(fetch(1))
            await broker.send(fetched(1, 10))
            await client.frame()
            await client.send(fetch(2))
            await broker.frame()
            await broker.send(whole[:place])
            await turns(20)
            await client.send(lookup(3))
            await turns(20)
            await broker.send(whole[place:])
            assert await client.frame() == whole
            assert await client.frame() == own(3)


async def test_with_equal_correlation_ids():
    async with answering_lab() as lab:
        client, broker = await lab.pair(fetch(1))
        await client.send(lookup(1) + fetch(1) + lookup(1))
        await broker.frame()
        await broker.send(fetched(1, 10) + fetched(1, 20))
        expected = [fetched(1, 10), own(1), fetched(1, 20), own(1)]
        assert [await client.frame() for _ in expected] == expected


async def test_a_request_in_pieces():
    async with answering_lab() as lab:
        client, broker = await lab.pair(fetch(1))
        long = lookup(2, bytes(10_000))
        await client.send(*(long[at : at + 3_000] for at in range(0, len(long), 3_000)))
        await broker.send(fetched(1, 10))
        assert [await client.frame() for _ in range(2)] == [fetched(1, 10), own(2)]


@pytest.mark.parametrize("most", [1, 2, 3])
async def test_no_more_are_taken_than_may_be_in_flight(most):
    """Those that are read as others are answered do not wait for the broker to send anything."""
    async with answering_lab(limits=Limits(max_in_flight_requests=most)) as lab:
        client, broker = await lab.pair(fetch(1))
        await client.send(b"".join(map(lookup, range(2, MANY))) + lookup(MANY, FOR_BROKER))
        await turns(20)
        await broker.send(fetched(1, 10))
        assert await client.frame() == fetched(1, 10)
        for number in range(2, MANY):
            assert await client.frame() == own(number)
        await broker.frame()
        await broker.send(by_broker(MANY))
        assert await client.frame() == by_broker(MANY)


async def test_behind_a_response_that_a_quota_holds():
    async with answering_lab(rules=(slow_client(),)) as lab:
        client, broker = await lab.pair(fetch(1))
        await client.send(lookup(2))
        await broker.send(fetched(1, 10_000))
        await until(lambda: lab.held)
        await turns(20)
        assert not client.unread
        lab.services.reapers.release_all()
        assert [await client.frame() for _ in range(2)] == [fetched(1, 10_000), own(2)]


async def test_a_muted_client_is_not_read_from():
    async with answering_lab(rules=(slow_client(),), holds=False) as lab:
        client, broker = await lab.pair(fetch(1))
        await broker.send(fetched(1, 10_000))
        await client.frame()
        await client.send(lookup(2))
        await turns(20)
        assert not client.unread
        lab.services.reapers.release_all()
        assert await client.frame() == own(2)


async def test_a_drain_lets_them_out():
    async with answering_lab() as lab:
        client, broker = await lab.pair(fetch(1))
        await client.send(lookup(2), lookup(3))
        await until(lambda: taken(lab) == 2)
        draining = asyncio.create_task(lab.relay.drain())
        await broker.send(fetched(1, BIG_BYTES))
        assert await client.ended() == fetched(1, BIG_BYTES) + own(2) + own(3)
        await client.close()
        await draining


@pytest.mark.parametrize("who", ["client", "broker"])
async def test_either_side_leaves_while_one_waits(who):
    async with answering_lab() as lab:
        client, broker = await lab.pair(fetch(1))
        await client.send(lookup(2))
        await until(lambda: taken(lab))
        (client if who == "client" else broker).reset()
        await until(lambda: lab.relay.connected == 0)


async def test_a_client_that_does_not_read():
    """Its answers are bounded by what may be in flight, and it loses none."""
    async with answering_lab(limits=Limits(max_in_flight_requests=4)) as lab:
        sock = await lab.silent_client()
        loop = asyncio.get_running_loop()
        count = 4_000
        asked = b"".join(map(lookup, range(count)))
        sending = asyncio.create_task(loop.sock_sendall(sock, asked))
        await turns(2_000)
        assert taken(lab) < count
        expected = b"".join(map(own, range(count)))
        received = bytearray()
        async with asyncio.timeout(LIMIT_S):
            while len(received) < len(expected):
                received += await loop.sock_recv(sock, 1 << 16)
        assert received == expected
        await sending
