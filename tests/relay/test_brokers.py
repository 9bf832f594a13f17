"""Whether the cluster answers, and what a probe learns of it."""

import asyncio
import socket
from struct import pack

import pytest
from relaylab import frames
from relaylab.lab import (
    LIMIT_S,
    LISTENER,
    no_free_descriptor,
    open_lab,
    silent_server,
    turns,
    until,
)
from structlog.testing import capture_logs

from proxy.cluster.kafka_client import Bootstrap
from proxy.cluster.upstream import UpstreamError
from proxy.relay.brokers import MAX_BROKERS_BYTES, MAX_KNOWN_BROKERS, BrokerConnector
from proxy.relay.log_limiter import LINES_AT_ONCE
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


def brokers_of(*servers, tls=None, limit_s: float = LIMIT_S) -> BrokerConnector:
    return BrokerConnector(Bootstrap(servers, tls, limit_s))


def test_a_broker_that_names_ever_new_addresses_has_few_lines():
    brokers = brokers_of(REFUSING)
    with capture_logs() as lines:
        for node_id in range(50):
            brokers.learn(node_id, "real", 9092)
        assert len(lines) == 50
        for number in range(5000):
            brokers.learn(number % 2, f"real-{number}", 9092)
    assert len(lines) <= 50 + 2 * LINES_AT_ONCE
    assert brokers.addresses[1] == ("real-4999", 9092)


async def probe(broker: Broker, times: int = 1) -> BrokerConnector:
    async with await asyncio.start_server(broker.serve, HOST, 0) as server:
        brokers = brokers_of(server.sockets[0].getsockname()[:2], limit_s=5.0)
        for _ in range(times):
            monitor = asyncio.create_task(brokers.monitor())
            await until(lambda: brokers.reachable)
            monitor.cancel()
            await asyncio.gather(monitor, return_exceptions=True)
            brokers.reachable = False
        return brokers


async def test_the_brokers_are_learned():
    brokers = await probe(Broker())
    assert brokers.addresses == {3: ("real", 9)}


async def test_no_more_brokers_are_learned_than_a_cluster_has():
    brokers = brokers_of(REFUSING)
    for node_id in range(MAX_KNOWN_BROKERS + 10):
        brokers.learn(node_id, "real", 9)
    brokers.learn(0, "moved", 9)
    assert len(brokers.addresses) == MAX_KNOWN_BROKERS
    assert brokers.addresses[0] == ("moved", 9)


async def test_of_a_probe_no_more_is_read_than_the_brokers_of_a_cluster():
    named = dict.fromkeys(range(MAX_KNOWN_BROKERS + 10), ("real", 9))
    brokers = await probe(Broker(garbage=frames.metadata_response(1, named)))
    assert brokers.addresses.keys() == set(range(MAX_KNOWN_BROKERS))
    longer = pack(">ii", MAX_BROKERS_BYTES + 1, 1) + bytes(MAX_BROKERS_BYTES)
    broker = Broker(garbage=longer)
    async with await asyncio.start_server(broker.serve, HOST, 0) as server:
        brokers = brokers_of(server.sockets[0].getsockname()[:2], limit_s=5.0)
        monitor = asyncio.create_task(brokers.monitor())
        await until(lambda: brokers.reachable is not None)
        monitor.cancel()
        await asyncio.gather(monitor, return_exceptions=True)
    assert not brokers.reachable
    assert not brokers.addresses


async def test_clients_are_not_told_of_brokers_beyond_those():
    async with open_lab() as lab:
        for node_id in range(MAX_KNOWN_BROKERS):
            lab.brokers.learn(node_id, "real", 9)
        client, broker = await lab.pair(frames.metadata_request(1))
        listener = lab.relay.listeners[LISTENER]
        await broker.send(
            frames.metadata_response(1, {7: ("real", 9), MAX_KNOWN_BROKERS: ("b", 9)})
        )
        answer = await client.frame()
        told = {7: ("proxy", listener.open_ports[7])}
        assert answer == frames.metadata_response(1, told)
        assert listener.open_ports.keys() == {None, 7}


async def test_a_cluster_that_wants_a_login_is_reachable_and_not_asked_again():
    broker = Broker(wants_login=True)
    brokers = await probe(broker, times=2)
    assert brokers.addresses == {}
    assert broker.asked == [API_VERSIONS, METADATA, API_VERSIONS]


async def test_garbage_does_not_end_the_monitor():
    broker = Broker(garbage=frames.response(METADATA, 1, 1, b"\x7f\xff\xff\xff"))
    async with await asyncio.start_server(broker.serve, HOST, 0) as server:
        brokers = brokers_of(server.sockets[0].getsockname()[:2], limit_s=5.0)
        monitor = asyncio.create_task(brokers.monitor())
        await until(lambda: METADATA in broker.asked)
        await turns(20)
        assert not monitor.done()
        assert not brokers.reachable
        monitor.cancel()
        await asyncio.gather(monitor, return_exceptions=True)


async def test_since_when_it_is_silent(monkeypatch):
    monkeypatch.setattr("proxy.relay.brokers.RETRY_INTERVAL_S", 0.0)
    monkeypatch.setattr("proxy.relay.brokers.PROBE_INTERVAL_S", 0.0)
    broker = Broker()
    async with await asyncio.start_server(broker.serve, HOST, 0) as server:
        good = server.sockets[0].getsockname()[:2]
        brokers = brokers_of(REFUSING, limit_s=5.0)
        assert (brokers.answers, brokers.silent_since_s) == (False, None)
        monitor = asyncio.create_task(brokers.monitor())
        await until(lambda: brokers.silent_since_s is not None)
        since_s = brokers.silent_since_s
        await turns(20)
        assert brokers.silent_since_s == since_s
        assert (brokers.answers, brokers.was_reachable) == (False, False)
        brokers.bootstrap.servers[:] = [good]
        await until(lambda: brokers.reachable)
        assert (brokers.answers, brokers.silent_since_s) == (True, None)
        brokers.bootstrap.servers[:] = [REFUSING]
        await until(lambda: not brokers.reachable)
        assert (brokers.was_reachable, brokers.silent_since_s is None) == (True, False)
        monitor.cancel()
        await asyncio.gather(monitor, return_exceptions=True)


@pytest.mark.parametrize("dead", ["refuses", "silent"])
async def test_nobody_is_turned_away_while_one_server_answers(dead):
    with silent_server() as silent, socket.create_server((HOST, 0)) as server:
        bad, good = REFUSING if dead == "refuses" else silent, server.getsockname()
        brokers = brokers_of(bad, good, limit_s=NEVER_S)
        for _ in range(2):
            async with asyncio.timeout(LIMIT_S):
                channels = await asyncio.gather(*(brokers.connect(None) for _ in range(8)))
            for channel in channels:
                assert channel.sock.getpeername() == good
                channel.sock.close()
            assert brokers.bootstrap.servers == [good, bad]


async def test_a_server_without_tls_is_tried_last_from_then_on(certificates):
    closing = await asyncio.start_server(lambda _, w: w.close(), HOST, 0)
    good = await asyncio.start_server(Broker().serve, HOST, 0, ssl=certificates.server())
    async with closing, good:
        servers = [each.sockets[0].getsockname() for each in (closing, good)]
        brokers = brokers_of(*servers, tls=certificates.client())
        channel = await brokers.connect(None)
        assert channel.sock.getpeername() == servers[1]
        channel.sock.close()
        assert brokers.bootstrap.servers == servers[::-1]


async def test_a_server_that_hangs_up_on_the_probe_is_tried_last_from_then_on(monkeypatch):
    monkeypatch.setattr("proxy.relay.brokers.RETRY_INTERVAL_S", 0.0)
    closing = await asyncio.start_server(lambda _, w: w.close(), HOST, 0)
    good = await asyncio.start_server(Broker().serve, HOST, 0)
    async with closing, good:
        servers = [each.sockets[0].getsockname() for each in (closing, good)]
        brokers = brokers_of(*servers)
        monitor = asyncio.create_task(brokers.monitor())
        await until(lambda: brokers.reachable)
        assert brokers.bootstrap.servers == servers[::-1]
        monitor.cancel()
        await asyncio.gather(monitor, return_exceptions=True)


async def test_no_server_answers():
    brokers = brokers_of(REFUSING, (HOST, 2))
    with pytest.raises(UpstreamError, match=f"{HOST}:[12]: ") as failure:
        await brokers.connect(None)
    assert failure.value.reason == "refused"


@pytest.mark.parametrize("ended_by", ["an answer", "the cluster's word"])
async def test_an_address_that_fails_is_doubtful(ended_by):
    with socket.create_server((HOST, 0)) as server:
        address = server.getsockname()
        brokers = brokers_of(REFUSING)
        brokers.learn(7, *REFUSING)
        with pytest.raises(UpstreamError):
            await brokers.connect(7)
        assert brokers.unanswered == {7}
        if ended_by == "an answer":
            brokers.addresses[7] = address
            (await brokers.connect(7)).sock.close()
        else:
            brokers.learn(7, *address)
        assert not brokers.unanswered


async def test_a_silent_address_is_doubtful_before_the_client_gives_up(monkeypatch):
    monkeypatch.setattr("proxy.relay.brokers.UNANSWERED_AFTER_S", 0.01)
    with silent_server() as silent:
        brokers = brokers_of(REFUSING, limit_s=NEVER_S)
        brokers.learn(7, *silent)
        first = asyncio.create_task(brokers.connect(7))
        await until(lambda: brokers.unanswered)
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(UpstreamError, match=r"no connection in 0\.01 s"):
                await brokers.connect(7)
        assert not first.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_nothing_is_doubtful_for_want_of_descriptors():
    with socket.create_server((HOST, 0)) as server:
        address = server.getsockname()
        brokers = brokers_of(address)
        brokers.learn(7, *address)
        (await brokers.connect(7)).sock.close()
        with no_free_descriptor(), pytest.raises(UpstreamError) as failure:
            await brokers.connect(7)
        assert failure.value.reason == "local"
        assert not brokers.unanswered
