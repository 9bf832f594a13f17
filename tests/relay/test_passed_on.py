"""One small frame at a time: sent on as it is and recorded then, unless something asks for more."""

import asyncio
from struct import unpack_from

import pytest
from parts.sensor_views import sensors_in_use
from relaylab import frames
from relaylab.lab import fast_client, open_lab, slow_client, turns, until

from metrics.clock import clock_ms
from proxy.quota.entities import QuotaKind
from proxy.quota.gate import GRANT_MS
from proxy.quota.rules import QuotaManagerSettings, Rule
from proxy.relay.services import Limits

CONSUMER = QuotaKind.CONSUMER_BYTE_RATE
RECORD_BYTES = 50
MEDIUM_BYTES = 20_000


def bounded(bound: float) -> Rule:
    return Rule(client_id="test", bounds={CONSUMER: bound})


async def fetch(client, broker, number, record_bytes=RECORD_BYTES):
    """Make a round trip; return how many bytes were relayed."""
    request, response = frames.fetch_request(number), frames.fetch_response(number, record_bytes)
    await client.send(request)
    assert await broker.frame() == request
    await broker.send(response)
    assert await client.frame() == response
    return len(request) + len(response)


async def warmed_up(lab):
    """A client whose requests are known, and how far it is below its bound."""
    client, broker = await lab.pair(frames.fetch_request(0))
    await broker.send(frames.fetch_response(0, RECORD_BYTES))
    await client.frame()
    for number in (1, 2):
        await fetch(client, broker, number)
    return client, broker


@pytest.mark.parametrize("rules", [(), (fast_client(),)], ids=["unbounded", "bounded"])
@pytest.mark.parametrize("version", [16, 17, 18])
async def test_a_later_fetch_than_is_offered_is_asked_for_in_the_last_one_that_is(version, rules):
    """So its response names no broker."""
    async with open_lab(rules=rules) as lab:
        client, broker = await lab.client(), None
        for number in range(9):
            await client.send(frames.fetch_request(number, version=version))
            broker = broker or await lab.broker()
            assert await broker.frame() == frames.fetch_request(number, version=15)
            await broker.send(answer := frames.fetch_partitions(number, [b"records"]))
            assert await client.frame() == answer
        assert lab.count("requests_total", api="Fetch", version=str(version)) == 9


@pytest.mark.parametrize("rules", [(), (fast_client(),)], ids=["unbounded", "bounded"])
async def test_it_counts_the_same_whole_and_cut_anywhere(rules):
    async with open_lab(rules=rules) as lab:
        client, broker = await warmed_up(lab)
        number, response_bytes = 2, len(frames.fetch_response(0, RECORD_BYTES))
        for cut in range(1, response_bytes):
            number += 1
            request = frames.fetch_request(number)
            response = frames.fetch_response(number, RECORD_BYTES)
            await client.send(request[:cut], request[cut:])
            assert await broker.frame() == request
            await broker.send(response[:cut], response[cut:])
            assert await client.frame() == response
            number += 1
            each = await fetch(client, broker, number)
        await turns()
        count = number + 1
        assert lab.count("requests_total", api="Fetch", version="11") == count
        labels = {"listener": "default", "user": "", "client_id": "test", "api": "Fetch"}
        assert lab.count("bytes_total", **labels) == count * each
        for row in sensors_in_use(lab.services.quotas, clock_ms):
            measured = row.rate * row.window_ms / 1000
            assert measured == pytest.approx(count * response_bytes)


async def test_what_the_client_does_not_take_follows():
    limits = Limits(max_in_flight_requests=10_000)
    async with open_lab(rules=(fast_client(),), limits=limits) as lab:
        sock = await lab.silent_client()
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, frames.fetch_request(0))
        broker = await lab.broker()
        await broker.frame()
        sent = b""
        (connection,) = lab.relay.connections
        flow = connection.responses
        number = 0
        while not flow.sending_blocked:
            answer = frames.fetch_response(number, MEDIUM_BYTES)
            broker.writer.write(answer)
            sent += answer
            number += 1
            await loop.sock_sendall(sock, frames.fetch_request(number))
            assert await broker.frame() == frames.fetch_request(number)
            await turns(10)
        assert flow.under_way
        received = bytearray()
        while len(received) < len(sent):
            received += await asyncio.wait_for(loop.sock_recv(sock, 1 << 16), 20)
        assert received == sent
        await until(lambda: not flow.mid_frame)


async def test_what_exceeds_the_bound_is_held_whole():
    async with open_lab(rules=(bounded(4_000.0),)) as lab:
        client, broker = await warmed_up(lab)
        await fetch(client, broker, 3, MEDIUM_BYTES)
        request = frames.fetch_request(4)
        await client.send(request)
        assert await broker.frame() == request
        await broker.send(frames.fetch_response(4, 2 * MEDIUM_BYTES))
        await until(lambda: lab.held)
        await turns()
        assert client.unread == b""


async def test_a_bound_that_was_lowered_holds_the_next_one():
    async with open_lab(rules=(fast_client(),)) as lab:
        client, broker = await warmed_up(lab)
        request = frames.fetch_request(3)
        await client.send(request)
        assert await broker.frame() == request
        lab.services.quotas.update(QuotaManagerSettings(rules=(slow_client(),)))
        await broker.send(frames.fetch_response(3, RECORD_BYTES))
        await until(lambda: lab.held)
        assert client.unread == b""


async def test_a_fetch_that_asks_for_more_than_those_before_is_limited():
    bound = 1e6
    async with open_lab(rules=(bounded(bound),)) as lab:
        client, broker = await warmed_up(lab)
        request = frames.fetch_request(3, max_bytes=50_000_000)
        await client.send(request)
        (limit,) = unpack_from(">i", await broker.frame(), len(request) - 4)
        assert limit == bound * GRANT_MS / 1000
        await broker.send(frames.fetch_response(3, RECORD_BYTES))
        await client.frame()
        await fetch(client, broker, 4)


async def test_no_more_requests_than_may_be_in_flight():
    async with open_lab(rules=(fast_client(),), limits=Limits(max_in_flight_requests=2)) as lab:
        client, broker = await warmed_up(lab)
        asked = [frames.fetch_request(number) for number in range(3, 8)]
        for request in asked:
            await client.send(request)
            await turns(10)
        for number, request in enumerate(asked, start=3):
            assert await broker.frame() == request
            (connection,) = lab.relay.connections
            assert len(connection.in_flight) <= 2
            await broker.send(frames.fetch_response(number, RECORD_BYTES))
            assert await client.frame() == frames.fetch_response(number, RECORD_BYTES)
