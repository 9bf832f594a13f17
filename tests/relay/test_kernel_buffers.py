"""What the kernel may keep for a connection that takes nothing."""

import asyncio
import socket
from pathlib import Path

import pytest
from relaylab import frames
from relaylab.lab import open_lab, slow_client, until

from proxy.relay.channel import (
    MAX_BUFFER_BYTES,
    MIN_BUFFER_BYTES,
    SHARED_BUFFER_BYTES,
    socket_buffer_bytes,
)

BIG_BYTES = 64 << 20
LARGEST_RECEIVE_BYTES = int(Path("/proc/sys/net/core/rmem_max").read_text())
KERNEL_FACTOR = 2
"""The kernel doubles what is set, for its own overhead."""


@pytest.mark.parametrize(
    ("connections", "expected_bytes"),
    [
        pytest.param(0, MAX_BUFFER_BYTES, id="none"),
        pytest.param(1, MAX_BUFFER_BYTES, id="the first"),
        pytest.param(12, MAX_BUFFER_BYTES, id="the last with all it could use"),
        pytest.param(128, SHARED_BUFFER_BYTES // 128, id="a share"),
        pytest.param(192, MIN_BUFFER_BYTES, id="the last share"),
        pytest.param(10_000, MIN_BUFFER_BYTES, id="never less"),
    ],
)
def test_the_receive_buffer_gets_smaller_with_the_connections(connections, expected_bytes):
    assert socket_buffer_bytes(connections) == expected_bytes


def test_what_five_hundred_connections_take_in():
    total = sum(KERNEL_FACTOR * socket_buffer_bytes(number) for number in range(1, 501))
    assert total <= 150_000_000


async def test_both_sockets_of_a_connection_are_bounded():
    async with open_lab() as lab:
        await lab.pair(frames.metadata_request(1))
        (connection,) = lab.relay.connections
        await until(lambda: connection.upstream is not None)
        for channel in (connection.channel, connection.upstream):
            size = channel.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            assert size == KERNEL_FACTOR * min(MAX_BUFFER_BYTES, LARGEST_RECEIVE_BYTES)
            unsent = channel.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
            assert unsent == MAX_BUFFER_BYTES


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
