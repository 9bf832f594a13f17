"""What an idle connection is closed for, and which ones are only held back by us."""

import asyncio
import math

import pytest
from relaylab import frames
from relaylab.lab import open_lab, slow_client, until

from proxy.relay.services import Limits, ThrottleMode

TIMEOUT_S = 5.0
BIG_BYTES = 64 << 20


def check_idle(lab, now_s=math.inf) -> None:
    for connection in tuple(lab.relay._connections):
        connection.check_idle(now_s, TIMEOUT_S)


async def test_nothing_happens_before_the_timeout():
    async with open_lab() as lab:
        await lab.client()
        await until(lambda: lab.relay.connections)
        check_idle(lab, asyncio.get_running_loop().time() + TIMEOUT_S / 2)
        assert lab.relay.connections == 1


async def test_a_client_that_sends_nothing():
    async with open_lab() as lab:
        client = await lab.client()
        await until(lambda: lab.relay.connections)
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
        await until(lambda: lab.relay._connections)
        (connection,) = lab.relay._connections
        await until(lambda: connection._responses.sending_blocked)
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


@pytest.mark.parametrize("mode", ThrottleMode)
async def test_a_client_that_we_hold_back_is_not_idle(mode):
    async with open_lab(rules=(slow_client(),), mode=mode) as lab:
        _, broker = await lab.pair(frames.fetch_request(1))
        await broker.send(frames.fetch_response(1, 10_000))
        await until(lambda: lab.held)
        check_idle(lab)
        assert lab.relay.connections == 1


async def test_the_watch_closes_by_itself():
    async with open_lab(limits=Limits(idle_timeout_s=0.01)) as lab:
        client = await lab.client()
        watch = asyncio.create_task(lab.relay.watch_idle())
        assert await client.ended() == b""
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
