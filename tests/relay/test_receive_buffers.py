"""What the kernel may keep for a connection that takes nothing."""

import asyncio
import socket
import sys
from pathlib import Path

import pytest
from relaylab import frames
from relaylab.lab import open_lab, slow_client, until

from proxy.quota.entities import QuotaKind
from proxy.quota.rules import QuotaSettings, Rule
from proxy.relay.channel import (
    MAX_RECEIVE_BYTES,
    MAX_UNSENT_BYTES,
    MIN_RECEIVE_BYTES,
    SHARED_RECEIVE_BYTES,
    receive_bytes,
)
from proxy.relay.connection import STALLED_S
from proxy.relay.lifecycle import Pause
from proxy.relay.services import ThrottleMode
from proxy.wire.apis import PRODUCE

BIG_BYTES, BLOCK_BYTES = 64 << 20, 1 << 20
HELD = 50
SO_MEMINFO = 55
"""Of Linux; first in it is what the kernel has taken in. The socket module has no name for it."""
KERNEL_FACTOR = 2
"""The kernel doubles what is set, for its own overhead."""
LARGEST_BYTES = KERNEL_FACTOR * min(
    MAX_RECEIVE_BYTES, int(Path("/proc/sys/net/core/rmem_max").read_text())
)
DEFAULT_RECEIVE_BYTES = int(Path("/proc/sys/net/ipv4/tcp_rmem").read_text().split()[1])
"""What the kernel gives a connection that has not been fast."""


@pytest.mark.parametrize(
    ("connections", "expected_bytes"),
    [
        pytest.param(0, MAX_RECEIVE_BYTES, id="none"),
        pytest.param(1, MAX_RECEIVE_BYTES, id="the first"),
        pytest.param(12, MAX_RECEIVE_BYTES, id="the last with all it could use"),
        pytest.param(128, SHARED_RECEIVE_BYTES // 128, id="a share"),
        pytest.param(192, MIN_RECEIVE_BYTES, id="the last share"),
        pytest.param(10_000, MIN_RECEIVE_BYTES, id="never less"),
    ],
)
def test_the_receive_buffer_gets_smaller_with_the_connections(connections, expected_bytes):
    assert receive_bytes(connections) == expected_bytes


def test_what_five_hundred_connections_take_in():
    total = sum(KERNEL_FACTOR * receive_bytes(number) for number in range(1, 501))
    assert total <= 150_000_000


def buffers(connection):
    """What the kernel may take in from the client and from the broker, and keep for each."""
    client, broker = connection.channel.sock, connection.upstream.sock
    taken_in = [each.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) for each in (client, broker)]
    kept = [
        each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) for each in (client, broker)
    ]
    return (*taken_in, *kept)


def is_bounded(connection):
    client_bytes, broker_bytes, for_client, for_broker = buffers(connection)
    assert broker_bytes == LARGEST_BYTES
    assert for_client == MAX_UNSENT_BYTES
    assert (client_bytes == LARGEST_BYTES) == (for_broker == MAX_RECEIVE_BYTES)
    return client_bytes == LARGEST_BYTES


def bounded(bound, kind=QuotaKind.PRODUCER_BYTE_RATE):
    return Rule(client_id="test", bounds={kind: bound})


async def produce(client, broker, number, record_bytes):
    request = frames.produce_request(number, 1, record_bytes)
    await asyncio.gather(client.send(request), broker.receive(len(request)))


async def test_the_client_of_an_open_connection_has_the_window_that_the_kernel_finds():
    async with open_lab() as lab:
        client, broker = await lab.pair(frames.metadata_request(1))
        (connection,) = lab.relay.connections
        await until(lambda: connection.upstream is not None)
        assert not is_bounded(connection)
        before = buffers(connection)[0]
        for number in range(2, 12):
            await produce(client, broker, number, 4 * BLOCK_BYTES)
        assert buffers(connection)[0] > before
        assert not is_bounded(connection)


async def test_who_waited_at_a_gate_is_bounded_from_then_on():
    async with open_lab(rules=(bounded(1e6),)) as lab:
        client, broker = await lab.pair(frames.metadata_request(1))
        (connection,) = lab.relay.connections
        await produce(client, broker, 2, 12 * BLOCK_BYTES)
        sending = asyncio.create_task(produce(client, broker, 3, 100))
        await until(lambda: Pause.GATED in connection.life.pauses)
        assert not is_bounded(connection)
        lab.services.quotas.update(QuotaSettings())
        await sending
        assert is_bounded(connection)


async def test_who_was_muted_is_bounded_from_then_on():
    async with open_lab(rules=(bounded(1e6),), mode=ThrottleMode.MUTE) as lab:
        client, broker = await lab.pair(frames.metadata_request(1))
        (connection,) = lab.relay.connections
        await broker.send(frames.metadata_response(1, {}))
        await client.frame()
        await produce(client, broker, 2, 12 * BLOCK_BYTES)
        await broker.send(frames.response(PRODUCE, 7, 2, bytes(8)))
        await client.frame()
        assert Pause.MUTED in connection.life.pauses
        assert not is_bounded(connection)
        lab.services.quotas.update(QuotaSettings())
        await until(lambda: Pause.MUTED not in connection.life.pauses)
        assert is_bounded(connection)


async def test_a_client_whose_broker_takes_nothing_for_a_while_is_bounded():
    async with open_lab() as lab:
        client = await lab.client()
        client.writer.write(frames.produce_request(1, 1, BIG_BYTES))
        await lab.broker()
        (connection,) = lab.relay.connections
        requests = connection.requests
        await until(lambda: requests.sending_blocked)
        idle_s = lab.services.limits.idle_timeout_s
        connection.check_idle(requests.last_active + STALLED_S / 2, idle_s)
        assert not is_bounded(connection)
        connection.check_idle(requests.last_active + STALLED_S, idle_s)
        assert is_bounded(connection)
        client.reset()


async def test_what_held_clients_go_on_sending_waits_at_the_clients():
    async with open_lab(rules=(slow_client(kind=QuotaKind.PRODUCER_BYTE_RATE),)) as lab:
        clients = [await lab.client() for _ in range(HELD)]
        for client in clients:
            client.writer.write(frames.produce_request(1, 1, 100))
            client.writer.write(frames.produce_request(2, 1, BLOCK_BYTES))
        for _ in clients:
            await lab.broker()
        connections = lab.relay.connections
        await until(lambda: sum(Pause.GATED in each.life.pauses for each in connections) == HELD)
        taken_in = 0
        for connection in connections:
            info = connection.channel.sock.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, 4)
            taken_in += int.from_bytes(info, sys.byteorder)
        assert 0 < taken_in <= HELD * DEFAULT_RECEIVE_BYTES


@pytest.mark.parametrize("rules", [(), (slow_client(),)], ids=["does not read", "is held"])
async def test_the_rest_of_a_response_waits_at_the_broker(rules):
    async with open_lab(rules=rules) as lab:
        sock = await lab.silent_client()
        await asyncio.get_running_loop().sock_sendall(sock, frames.fetch_request(1))
        broker = await lab.broker()
        await broker.frame()
        broker.writer.write(frames.fetch_response(1, BIG_BYTES))
        (connection,) = lab.relay.connections
        responses = connection.responses
        await until(lambda: responses.delayed.waiting or responses.sending_blocked)
        assert broker.writer.transport.get_write_buffer_size() > BIG_BYTES / 2
        broker.reset()


async def test_the_rest_of_a_request_waits_at_the_client():
    async with open_lab() as lab:
        client = await lab.client()
        client.writer.write(frames.produce_request(1, 1, BIG_BYTES))
        await lab.broker()
        (connection,) = lab.relay.connections
        await until(lambda: connection.requests.sending_blocked)
        assert client.writer.transport.get_write_buffer_size() > BIG_BYTES / 2
        client.reset()
