"""What an idle connection is closed for, and which ones are only held back by us."""

import asyncio
import math
import socket
import tracemalloc
from struct import pack

import pytest
from relaylab import frames
from relaylab.lab import open_lab, slow_client, turns, until

from proxy.quota.entities import QuotaKind
from proxy.relay.frame_flow import MAX_START_BYTES, SLOW_FRAME_S
from proxy.relay.services import Limits
from proxy.wire.apis import METADATA

TIMEOUT_S = 5.0
PATIENT_S = 600.0
BIG_BYTES = 64 << 20
SASL_HANDSHAKE = 17
LOGIN_BYTES = 500_000
"""Near the longest that a login may have."""

LOGIN = frames.request(SASL_HANDSHAKE, 1, 1, bytes(LOGIN_BYTES))
PRODUCE = frames.produce_request(1, 1, LOGIN_BYTES)


def check_idle(lab, now_s=math.inf, timeout_s=TIMEOUT_S) -> None:
    for connection in tuple(lab.relay.connections):
        connection.check_idle(now_s, timeout_s)


def owed_since_s(lab) -> float | None:
    """Of the first connection; None before there is one."""
    return next((each.requests.owed_since_s for each in lab.relay.connections), None)


async def begun(lab) -> float:
    """Return since when a request is owed, once the loop's clock, of milliseconds, is past it."""
    await until(lambda: owed_since_s(lab) is not None)
    since_s = owed_since_s(lab)
    await until(lambda: asyncio.get_running_loop().time() > since_s)
    return since_s


async def test_nothing_happens_before_the_timeout():
    async with open_lab() as lab:
        await lab.client()
        await until(lambda: lab.relay.connected)
        check_idle(lab, asyncio.get_running_loop().time() + TIMEOUT_S / 2)
        assert lab.relay.connected == 1


async def test_a_client_that_sends_nothing():
    async with open_lab() as lab:
        client = await lab.client()
        await until(lambda: lab.relay.connected)
        check_idle(lab)
        await client.ended()
        assert lab.rejected("no_request") == 1


async def test_a_request_that_was_begun():
    async with open_lab() as lab:
        client = await lab.client()
        await client.send(frames.metadata_request(1)[:5], b"")
        check_idle(lab)
        await client.ended()
        assert lab.rejected("slow_frame") == 1


@pytest.mark.parametrize(
    ("request_", "first_bytes"),
    [
        pytest.param(LOGIN, 6, id="head"),
        pytest.param(LOGIN, 60, id="kept until complete"),
        pytest.param(PRODUCE, 60, id="streamed"),
    ],
)
async def test_a_begun_request_must_go_on_sooner(request_, first_bytes):
    async with open_lab() as lab:
        client = await lab.client()
        await client.send(request_[:first_bytes])
        begun_s = await begun(lab)
        check_idle(lab, begun_s + SLOW_FRAME_S - 0.1, PATIENT_S)
        assert lab.relay.connected == 1
        check_idle(lab, begun_s + SLOW_FRAME_S + 0.1, PATIENT_S)
        await client.ended()
        assert lab.rejected("slow_frame") == 1


@pytest.mark.parametrize(
    ("request_", "is_streamed"),
    [pytest.param(LOGIN, False, id="kept"), pytest.param(PRODUCE, True, id="streamed")],
)
async def test_more_of_a_request_buys_time_only_where_it_is_streamed(request_, is_streamed):
    async with open_lab() as lab:
        client = await lab.client()
        await client.send(request_[:60])
        begun_s = await begun(lab)
        (connection,) = lab.relay.connections
        await client.send(request_[60:120])
        await until(lambda: connection.requests.last_active > begun_s)
        assert (owed_since_s(lab) > begun_s) is is_streamed


async def test_a_request_begun_behind_others_is_timed_by_itself():
    async with open_lab() as lab:
        first, second = frames.metadata_request(2), frames.metadata_request(3)
        client, broker = await lab.pair(frames.metadata_request(1))
        await client.send(first[:6])
        begun_s = await begun(lab)
        await client.send(first[6:] + second[:6])
        assert await broker.frame() == first
        assert owed_since_s(lab) > begun_s


async def test_what_is_only_announced_takes_no_memory():
    clients = 8
    async with open_lab() as lab:
        tracemalloc.start()
        try:
            for _ in range(clients):
                client = await lab.client()
                await client.send(LOGIN[:60])
                await lab.broker()
            await until(
                lambda: all(connection.requests.under_way for connection in lab.relay.connections)
            )
            used, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert used < clients * LOGIN_BYTES / 2


async def test_the_start_of_a_long_header_needs_room(monkeypatch):
    monkeypatch.setattr("proxy.relay.memory_pool.MOST_OF_ADDRESS_BYTES", MAX_START_BYTES)
    asked = frames.request(METADATA, 1, 1, pack(">i", 0), client_id="c" * 30_000)
    async with open_lab() as lab:
        kept_bytes = lab.services.kept_bytes
        first, second = await lab.client(), await lab.client()
        await first.send(asked[:9_000])
        await until(lambda: kept_bytes.total == MAX_START_BYTES)
        await second.send(asked[:9_000])
        await until(lambda: kept_bytes.waiting == 1)
        await first.send(asked[9_000:20_000], asked[20_000:])
        assert await (await lab.broker()).frame() == asked
        await until(lambda: kept_bytes.total == MAX_START_BYTES and not kept_bytes.waiting)
        await second.send(asked[9_000:])
        assert await (await lab.broker()).frame() == asked
        await until(lambda: not kept_bytes.total)


async def test_a_long_header_takes_no_room_from_what_is_behind_it():
    login = frames.request(SASL_HANDSHAKE, 1, 1, bytes(400_000), client_id="c" * 30_000)
    async with open_lab() as lab:
        client = await lab.client()
        await client.send(login[:9_000])
        await until(lambda: lab.services.kept_bytes.total == MAX_START_BYTES)
        await client.send(login[9_000:100_000])
        await until(lambda: lab.services.kept_bytes.total == len(login))


@pytest.mark.parametrize("piece_bytes", [1000, 70_000, LOGIN_BYTES])
async def test_what_is_kept_arrives_whole_whatever_the_pieces(piece_bytes):
    mechanism = b"MECHANISM-" * 3000
    login = frames.request(SASL_HANDSHAKE, 1, 1, pack(">h", len(mechanism)) + mechanism)
    async with open_lab() as lab:
        client = await lab.client()
        following = frames.metadata_request(2)
        sent = login + following
        await client.send(
            *(sent[start : start + piece_bytes] for start in range(0, len(sent), piece_bytes))
        )
        broker = await lab.broker()
        assert await broker.frame() == login
        await broker.send(frames.response(SASL_HANDSHAKE, 1, 1, pack(">hi", 0, 0)))
        assert await broker.frame() == following


async def test_a_broker_that_does_not_answer():
    async with open_lab() as lab:
        client, _ = await lab.pair(frames.metadata_request(1))
        check_idle(lab)
        await client.ended()
        assert lab.upstream_errors("timeout") == 1


async def test_a_broker_that_stops_in_an_answer():
    async with open_lab() as lab:
        client, broker = await lab.pair(frames.fetch_request(1))
        await broker.send(frames.fetch_response(1, 200_000)[:100_000])
        await client.receive(100_000)
        check_idle(lab)
        await client.ended()
        assert lab.upstream_errors("timeout") == 1


async def test_a_client_that_does_not_read():
    async with open_lab() as lab:
        sock = await lab.silent_client()
        await asyncio.get_running_loop().sock_sendall(sock, frames.fetch_request(1))
        broker = await lab.broker()
        broker.writer.write(frames.fetch_response(1, BIG_BYTES))
        await until(lambda: lab.relay.connections)
        (connection,) = lab.relay.connections
        await until(lambda: connection.responses.sending_blocked)
        check_idle(lab)
        assert lab.rejected("client_not_reading") == 1
        broker.reset()


async def test_an_open_connection_without_traffic():
    async with open_lab() as lab:
        client, broker = await lab.pair(frames.metadata_request(1))
        await broker.send(frames.metadata_response(1, {}))
        await client.frame()
        check_idle(lab)
        assert await client.ended() == b""
        assert await broker.ended() == b""
        assert lab.rejected("no_request") == lab.upstream_errors("timeout") == 0


@pytest.mark.parametrize("holds", [True, False])
async def test_a_client_that_we_hold_back_is_not_idle(holds):
    async with open_lab(rules=(slow_client(),), holds=holds) as lab:
        _, broker = await lab.pair(frames.fetch_request(1))
        await broker.send(frames.fetch_response(1, 10_000))
        await until(lambda: lab.held)
        check_idle(lab)
        assert lab.relay.connected == 1


async def test_the_watch_closes_by_itself():
    async with open_lab(limits=Limits(idle_timeout_s=0.01)) as lab:
        client = await lab.client()
        watch = asyncio.create_task(lab.relay.watch_idle())
        assert await client.ended() == b""
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


@pytest.mark.parametrize("is_reset", [True, False], ids=["reset", "ended"])
async def test_a_produce_at_a_gate_waits_its_turn_unless_its_client_was_reset(is_reset):
    """Kafka appends what came before an orderly end."""
    async with open_lab(rules=(slow_client(kind=QuotaKind.PRODUCER_BYTE_RATE),)) as lab:
        client, _ = await lab.pair(frames.produce_request(1, acks=0))
        for number in range(2, 5):
            await client.send(frames.produce_request(number, acks=0))
        (connection,) = lab.relay.connections
        await until(lambda: connection.waiter.gate is not None)
        if is_reset:
            sock = client.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, pack("ii", 1, 0))
        client.reset()
        if is_reset:
            await until(lambda: check_idle(lab, 0.0) or not lab.relay.connections)
        else:
            await turns(20)
            check_idle(lab)
            assert lab.relay.connections
