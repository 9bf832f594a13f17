"""Whether the cluster answers, and what a probe learns of it."""

import asyncio
import socket

import pytest
from relaylab import frames
from relaylab.lab import LIMIT_S, no_free_descriptor, silent_server, turns, until

from proxy.relay.cluster import Cluster
from proxy.relay.upstream import UpstreamError
from proxy.wire.apis import API_VERSIONS, METADATA

HOST = "127.0.0.1"
REFUSING = (HOST, 1)
NEVER_S = 600.0


class Broker:
    """Answers probes; with `wants_login` it hangs up on Metadata."""

    def __init__(self, *, wants_login: bool = False, garbage: bytes = b"") -> None:
        self.wants_login = wants_login
        self.garbage = garbage
        self.asked: list[int] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.read(4):
            request = await reader.readexactly(int.from_bytes(head, "big"))
            api_key = int.from_bytes(request[:2], "big")
            self.asked.append(api_key)
            if api_key == METADATA and self.wants_login:
                break
            if api_key == METADATA:
                writer.write(self.garbage or frames.metadata_response(1, {3: ("real", 9)}))
            else:
                writer.write(frames.response(API_VERSIONS, 0, 0, bytes(6)))
        writer.close()


async def probe(broker: Broker, times: int = 1) -> Cluster:
    async with await asyncio.start_server(broker.serve, HOST, 0) as server:
        cluster = Cluster((server.sockets[0].getsockname()[:2],), None, 5.0)
        for _ in range(times):
            monitor = asyncio.create_task(cluster.monitor())
            await until(lambda: cluster.reachable)
            monitor.cancel()
            await asyncio.gather(monitor, return_exceptions=True)
            cluster.reachable = False
        return cluster


async def test_the_brokers_are_learned():
    cluster = await probe(Broker())
    assert cluster.brokers == {3: ("real", 9)}
    assert cluster.knows(3)
    assert not cluster.knows(4)


async def test_a_cluster_that_wants_a_login_is_reachable_and_not_asked_again():
    broker = Broker(wants_login=True)
    cluster = await probe(broker, times=2)
    assert cluster.brokers == {}
    assert broker.asked == [API_VERSIONS, METADATA, API_VERSIONS]


async def test_garbage_does_not_end_the_monitor():
    broker = Broker(garbage=frames.response(METADATA, 1, 1, b"\x7f\xff\xff\xff"))
    async with await asyncio.start_server(broker.serve, HOST, 0) as server:
        cluster = Cluster((server.sockets[0].getsockname()[:2],), None, 5.0)
        monitor = asyncio.create_task(cluster.monitor())
        await until(lambda: METADATA in broker.asked)
        await turns(20)
        assert not monitor.done()
        assert not cluster.reachable
        monitor.cancel()
        await asyncio.gather(monitor, return_exceptions=True)


@pytest.mark.parametrize("dead", ["refuses", "silent"])
async def test_nobody_is_turned_away_while_one_server_answers(dead):
    with silent_server() as silent, socket.create_server((HOST, 0)) as server:
        bad, good = REFUSING if dead == "refuses" else silent, server.getsockname()
        cluster = Cluster((bad, good), None, NEVER_S)
        for _ in range(2):
            async with asyncio.timeout(LIMIT_S):
                channels = await asyncio.gather(*(cluster.connect(None) for _ in range(8)))
            for channel in channels:
                assert channel.sock.getpeername() == good
                channel.sock.close()
            assert cluster._order == [good, bad]


async def test_a_server_without_tls_is_tried_last_from_then_on(certificates):
    closing = await asyncio.start_server(lambda _, w: w.close(), HOST, 0)
    good = await asyncio.start_server(Broker().serve, HOST, 0, ssl=certificates.server())
    async with closing, good:
        servers = [each.sockets[0].getsockname() for each in (closing, good)]
        cluster = Cluster(tuple(servers), certificates.client(), LIMIT_S)
        channel = await cluster.for_clients().connect(None)
        assert channel.sock.getpeername() == servers[1]
        channel.sock.close()
        assert cluster._order == servers[::-1]


async def test_a_server_that_hangs_up_on_the_probe_is_tried_last_from_then_on(monkeypatch):
    monkeypatch.setattr("proxy.relay.cluster.RETRY_INTERVAL_S", 0.0)
    closing = await asyncio.start_server(lambda _, w: w.close(), HOST, 0)
    good = await asyncio.start_server(Broker().serve, HOST, 0)
    async with closing, good:
        servers = [each.sockets[0].getsockname() for each in (closing, good)]
        cluster = Cluster(tuple(servers), None, LIMIT_S)
        monitor = asyncio.create_task(cluster.monitor())
        await until(lambda: cluster.reachable)
        assert cluster._order == servers[::-1]
        monitor.cancel()
        await asyncio.gather(monitor, return_exceptions=True)


async def test_no_server_answers():
    cluster = Cluster((REFUSING, (HOST, 2)), None, LIMIT_S)
    with pytest.raises(UpstreamError, match=f"{HOST}:[12]: ") as failure:
        await cluster.connect(None)
    assert failure.value.reason == "refused"


@pytest.mark.parametrize("ended_by", ["an answer", "the cluster's word"])
async def test_an_address_that_fails_is_doubtful(ended_by):
    with socket.create_server((HOST, 0)) as server:
        address = server.getsockname()
        cluster = Cluster((REFUSING,), None, LIMIT_S)
        cluster.learn(7, *REFUSING)
        with pytest.raises(UpstreamError):
            await cluster.for_clients().connect(7)
        assert cluster._doubtful == {7}
        if ended_by == "an answer":
            cluster.brokers[7] = address
            (await cluster.connect(7)).sock.close()
        else:
            cluster.learn(7, *address)
        assert not cluster._doubtful


async def test_a_silent_address_is_doubtful_before_the_client_gives_up(monkeypatch):
    monkeypatch.setattr("proxy.relay.cluster.DOUBT_AFTER_S", 0.01)
    with silent_server() as silent:
        cluster = Cluster((REFUSING,), None, NEVER_S)
        cluster.learn(7, *silent)
        first = asyncio.create_task(cluster.connect(7))
        await until(lambda: cluster._doubtful)
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(UpstreamError, match=r"no connection in 0\.01 s"):
                await cluster.connect(7)
        assert not first.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_nothing_is_doubtful_for_want_of_descriptors():
    with socket.create_server((HOST, 0)) as server:
        address = server.getsockname()
        cluster = Cluster((address,), None, LIMIT_S)
        cluster.learn(7, *address)
        (await cluster.connect(7)).sock.close()
        with no_free_descriptor(), pytest.raises(UpstreamError) as failure:
            await cluster.connect(7)
        assert failure.value.reason == "local"
        assert not cluster._doubtful
