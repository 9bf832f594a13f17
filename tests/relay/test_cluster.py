"""Whether the cluster answers, and what a probe learns of it."""

import asyncio

from relaylab import frames
from relaylab.lab import turns, until

from proxy.relay.cluster import Cluster
from proxy.wire.apis import API_VERSIONS, METADATA

HOST = "127.0.0.1"


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


async def test_the_next_bootstrap_server_is_tried():
    broker = Broker()
    async with await asyncio.start_server(broker.serve, HOST, 0) as server:
        good = server.sockets[0].getsockname()[:2]
        cluster = Cluster(((HOST, 1), good), None, 5.0)
        channel = await cluster.connect(None)
        assert channel.sock.getpeername() == good
        channel.sock.close()
