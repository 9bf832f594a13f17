"""A client at the port of a broker that is not known yet gets a bootstrap server in its place."""

import asyncio

from relaylab import frames
from relaylab.lab import LISTENER, open_lab, silent_server, turns, until
from structlog.testing import capture_logs

from proxy.cluster.kafka_client import Bootstrap
from proxy.cluster.upstream import UpstreamError
from proxy.relay.brokers import BrokerConnector
from proxy.relay.channel import Channel

REFUSING = ("127.0.0.1", 1)


def broker_port(lab, node_id: int) -> int:
    return lab.relay.listeners[LISTENER].address_of(node_id)[1]


async def test_the_stand_in_is_closed_once_the_address_is_known_and_all_is_answered():
    async with open_lab() as lab:
        client = await lab.client(broker_port(lab, 7))
        for number in (1, 2):
            await client.send(frames.metadata_request(number))
        bootstrap = await lab.broker()
        for _ in range(2):
            await bootstrap.frame()
        await bootstrap.send(frames.metadata_response(1, {7: ("localhost", 1)}, 300_000))
        names = frames.metadata_brokers(await client.frame())
        assert names == {7: ("proxy", broker_port(lab, 7))}
        await turns(20)
        assert lab.relay.connected == 1  # one answer is due
        await bootstrap.send(frames.metadata_response(2, {}))
        assert await client.ended() == frames.metadata_response(2, {})
        assert not lab.relay.at_bootstrap
        await client.close()
        await until(lambda: not lab.relay.connected)


async def test_another_clients_metadata_ends_it_too():
    async with open_lab() as lab:
        waiting = await lab.client(broker_port(lab, 7))
        await waiting.send(frames.metadata_request(1))
        bootstrap = await lab.broker()
        await bootstrap.frame()
        await bootstrap.send(frames.metadata_response(1, {}))
        await waiting.frame()
        client, broker = await lab.pair(frames.metadata_request(1))
        await broker.send(frames.metadata_response(1, {7: ("localhost", 1), 8: ("localhost", 2)}))
        await client.frame()
        assert await waiting.ended() == b""
        await turns(20)
        assert not client.reader.at_eof()


async def test_a_client_that_goes_is_forgotten():
    async with open_lab() as lab:
        client = await lab.client(broker_port(lab, 7))
        await client.send(frames.metadata_request(1))
        await lab.broker()
        assert list(lab.relay.at_bootstrap) == [7]
        await client.close()
        await until(lambda: not lab.relay.connected)
        assert not lab.relay.at_bootstrap


async def test_a_known_broker_is_dialled_itself():
    async with open_lab() as lab:
        other: asyncio.Queue[bytes] = asyncio.Queue()

        async def serve(reader, writer):
            other.put_nowait(await reader.read(1000))
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            lab.brokers.learn(7, *server.sockets[0].getsockname()[:2])
            client = await lab.client(broker_port(lab, 7))
            await client.send(frames.metadata_request(1))
            assert await other.get() == frames.metadata_request(1)
            assert not lab.relay.at_bootstrap
            await client.ended()


async def test_a_broker_that_has_moved_is_found_through_a_stand_in():
    async with open_lab() as lab:
        lab.brokers.learn(7, *REFUSING)
        client = await lab.client(broker_port(lab, 7))
        await client.send(frames.metadata_request(1))
        bootstrap = await lab.broker()
        await bootstrap.frame()
        assert lab.upstream_errors("refused") == 1
        address = lab.brokers.bootstrap.servers[0]
        await bootstrap.send(frames.metadata_response(1, {7: address}))
        await client.frame()
        assert await client.ended() == b""
        again = await lab.client(broker_port(lab, 7))
        await again.send(frames.metadata_request(2))
        await (await lab.broker()).frame()
        assert not lab.relay.at_bootstrap
        assert lab.upstream_errors("refused") == 1


async def test_a_silent_address_keeps_only_the_first_client_waiting(monkeypatch):
    monkeypatch.setattr("proxy.relay.brokers.UNANSWERED_AFTER_S", 0.01)
    with silent_server() as silent:
        async with open_lab() as lab:
            lab.brokers.bootstrap.connect_timeout_s = 600.0
            lab.brokers.learn(7, *silent)
            first = await lab.client(broker_port(lab, 7))
            await first.send(frames.metadata_request(1))
            await until(lambda: lab.brokers.unanswered)
            second = await lab.client(broker_port(lab, 7))
            await second.send(frames.metadata_request(2))
            assert await (await lab.broker()).frame() == frames.metadata_request(2)


async def test_a_whole_cluster_that_is_down():
    async with open_lab() as lab:
        lab.relay.brokers = BrokerConnector(Bootstrap([("127.0.0.1", 2)], None, 10.0))
        lab.relay.brokers.learn(7, *REFUSING)
        client = await lab.client(broker_port(lab, 7))
        await client.send(frames.metadata_request(1))
        with capture_logs() as logs:
            assert await client.ended() == b""
        assert lab.upstream_errors("refused") == 1
        (line,) = (line for line in logs if line["log_level"] == "warning")
        assert "127.0.0.1:1: " in line["detail"]  # the broker's own


async def test_the_client_goes_while_we_dial():
    async with open_lab() as lab:

        async def never(node_id):
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                cancelled.set()
                raise UpstreamError("timeout", "cancelled") from None

        cancelled = asyncio.Event()
        lab.relay.brokers = Dialler(never)
        client = await lab.client()
        await client.send(frames.metadata_request(1))
        await until(lambda: lab.relay.connections)
        await turns(20)
        await client.close()
        await asyncio.wait_for(cancelled.wait(), 10)
        assert lab.relay.connected == 0


async def test_an_unexpected_error_while_we_dial_ends_that_client_only():
    async with open_lab() as lab:

        async def broken(node_id):
            raise RuntimeError("broken")

        lab.relay.brokers = Dialler(broken)
        client = await lab.client()
        await client.send(frames.metadata_request(1))
        assert await client.ended() == b""
        assert lab.rejected("internal_error") == 1


class Dialler:
    """Brokers of which nothing is known."""

    def __init__(self, connect) -> None:
        self.connect = connect
        self.addresses = {}

    def learn(self, node_id: int, host: str, port: int) -> None:
        pass

    def refuse_loop(self, client: Channel, client_id: str | None) -> None:
        pass

    def disconnected(self, channel: Channel) -> None:
        pass
