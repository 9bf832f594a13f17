"""A proxy that is led to itself in the place of a broker says so, and nothing grows."""

import asyncio
import socket
from contextlib import asynccontextmanager, suppress
from struct import pack

import pytest
from relaylab import frames
from relaylab.lab import LAB_HOST, open_lab, until

from proxy.cluster.upstream import LOOP, UpstreamError

IP_LOCAL_PORT_RANGE = 51
"""A socket option that Python has no name for."""

MOST = 6
"""Connections that may come of one client: itself, and those by which the loop is found."""


@asynccontextmanager
async def detour(target):
    """A port that passes on what it gets to another one, so that nobody sees where it came from."""
    ways = []

    async def pass_on(reader, writer):
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader, writer):
        with suppress(OSError):
            there, back = await asyncio.open_connection(LAB_HOST, target)
            ways.append(back)
            await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    async with await asyncio.start_server(serve, LAB_HOST, 0) as server:
        yield server.sockets[0].getsockname()[:2]
        for way in ways:
            way.close()


async def monitored(lab, holds):
    monitor = asyncio.create_task(lab.brokers.monitor())
    try:
        await until(holds)
    finally:
        monitor.cancel()
        await asyncio.gather(monitor, return_exceptions=True)


async def test_a_client_that_is_led_in_a_circle():
    async with open_lab() as lab:
        real = lab.brokers.bootstrap.servers[0]
        own = (LAB_HOST, lab.port)
        lab.brokers.bootstrap.servers[:] = [own]
        for _ in range(3):
            client = await lab.client()
            await client.send(frames.metadata_request(1))
            assert await client.ended() == b""
        assert lab.brokers.loop.startswith(f"{LAB_HOST}:{lab.port} is this proxy itself; fix: ")
        assert lab.upstream_errors(LOOP) == 3
        await until(lambda: not lab.relay.connected)
        assert next(lab.services.numbers) <= MOST
        lab.brokers.bootstrap.servers.append(real)
        await lab.pair(frames.metadata_request(1))


async def test_a_client_on_this_host_may_have_the_port_of_a_connection_to_a_broker():
    """Linux gives a port to several connections that end at different places."""
    async with open_lab() as lab:
        await lab.pair(frames.metadata_request(1))
        (first,) = lab.relay.connections
        await until(lambda: first.upstream is not None)
        _, port = first.upstream.sock.getsockname()
        with socket.socket() as client:
            client.setblocking(False)
            try:
                client.setsockopt(
                    socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, pack("I", port << 16 | port)
                )
            except OSError:
                pytest.skip("Linux 6.3 lets a client choose where it begins")
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, (LAB_HOST, lab.port))
            assert client.getsockname()[1] == port
            await loop.sock_sendall(client, frames.metadata_request(1))
            broker = await lab.broker()
            assert await broker.frame() == frames.metadata_request(1)
        assert lab.brokers.loop is None


async def test_a_broker_that_advertises_the_proxy():
    async with open_lab() as lab:
        lab.relay.learn(1, LAB_HOST, lab.port)
        port = lab.relay.listeners["default"].address_of(1)[1]
        client = await lab.client(port)
        await client.send(frames.metadata_request(1))
        assert await client.ended() == b""
        client = await lab.client(port)
        await client.send(frames.metadata_request(1))
        broker = await lab.broker()  # a bootstrap server stands in
        assert await broker.frame() == frames.metadata_request(1)
        assert lab.relay.connected <= MOST


@pytest.mark.parametrize("is_hidden", [False, True])
async def test_the_probe_finds_it_out_and_that_it_is_over(monkeypatch, is_hidden):
    monkeypatch.setattr("proxy.relay.brokers.RETRY_INTERVAL_S", 0.01)
    async with open_lab(is_inner=True) as lab, detour(lab.port) as hidden:
        brokers = lab.brokers
        (real,) = brokers.bootstrap.servers
        own = hidden if is_hidden else (LAB_HOST, lab.port)
        brokers.bootstrap.servers[:] = [own]
        await monitored(lab, lambda: brokers.loop)
        assert not brokers.reachable
        assert brokers.bootstrap.probes == {}
        with pytest.raises(UpstreamError) as failure:
            await brokers.connect(None)
        assert failure.value.reason == LOOP
        await until(lambda: not lab.relay.connected)
        assert next(lab.services.numbers) <= MOST
        # With another server beside it, and then repaired.
        brokers.bootstrap.servers.append(real)
        (await brokers.connect(None)).sock.close()
        lab.relay.stop_accepting()
        await monitored(lab, lambda: brokers.loop is None)


async def test_two_proxies_that_lead_to_each_other(monkeypatch):
    monkeypatch.setattr("proxy.relay.brokers.RETRY_INTERVAL_S", 0.01)
    async with open_lab() as one, open_lab(is_inner=True) as other:
        for lab, target in ((one, other), (other, one)):
            lab.brokers.bootstrap.servers[:] = [(LAB_HOST, target.port)]
        await monitored(one, lambda: one.brokers.loop)
        client = await one.client()
        await client.send(frames.metadata_request(1))
        assert await client.ended() == b""
        assert next(one.services.numbers) + next(other.services.numbers) <= 2 * MOST


async def test_who_guesses_a_probe_when_there_is_none_is_served():
    async with open_lab() as lab:
        bootstrap = lab.brokers.bootstrap
        (await bootstrap.connect(probes=True)).sock.close()
        (name,) = bootstrap.probes
        bootstrap.probes.clear()
        await lab.broker()
        client = await lab.client()
        await client.send(frames.fetch_request(1, client_id=name))
        await lab.broker()
        assert lab.brokers.loop is None
