"""Key updates (RFC 8446, 4.6.3) cost the reader some 20 us each, and anybody may send them."""

import asyncio
import gc
import itertools
import socket
import ssl
import weakref

import pytest
from parts.updating_client import BUFFER_BYTES, NOT_REQUESTED, REQUESTED, UpdatingClient
from relaylab import frames
from relaylab.lab import LIMIT_S, Certificates, open_lab, turns, until

from proxy.cluster.dial import tls_handshake
from proxy.cluster.tls_socket import (
    MOST_HANDSHAKE_BYTES,
    MOST_HELLO_BYTES,
    MOST_IN_VAIN,
    TlsSocket,
)
from proxy.relay import frame_flow
from proxy.relay.channel import BLOCKED, Channel, ChannelLost
from proxy.relay.tls import server_context

LONG = 30
HANDSHAKE_RECORDS = 10  # at most; they count until the first data
SMALL_BUFFER_BYTES = 4096


async def connected(certificates: Certificates) -> tuple[UpdatingClient, TlsSocket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        far = socket.socket()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far.connect(server.getsockname())
        near, _ = server.accept()
    far.setblocking(False)
    near.setblocking(False)
    client = UpdatingClient(far)
    greeting = tls_handshake(near, certificates.server(), server_side=True)
    _, secured = await asyncio.wait_for(asyncio.gather(client.greet(), greeting), LIMIT_S)
    return client, secured


async def test_a_handshake_goes_on_when_the_peer_takes_more(certificates, tmp_path):
    """Its answer is longer than what the kernel keeps for a peer that does not read."""
    chain = tmp_path / "chain"
    chain.write_bytes(certificates.cert.read_bytes() + LONG * certificates.ca.read_bytes())
    context = server_context(chain, certificates.key, None)
    client, near = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    client.setblocking(False)
    updating = UpdatingClient(client)
    client.send(updating.hello())
    greeting = asyncio.create_task(tls_handshake(near, context, server_side=True))
    await turns(20)
    await asyncio.wait_for(asyncio.gather(updating.greet(), greeting), LIMIT_S)
    updating.close()
    greeting.result().close()


def records_of_a_hello(size: int) -> bytes:
    """The start of a ClientHello (RFC 8446, 4.1.2) of 64 KiB, in records of 1 KiB."""
    record = b"\x16\x03\x01\x04\x00"
    hello = b"\x01\x00\xff\xff\x03\x03" + bytes(size)
    return b"".join(record + hello[at : at + 1024] for at in range(0, size, 1024))


async def test_a_long_hello_is_given_up_before_it_is_there(certificates):
    client, near = socket.socketpair()
    near.setblocking(False)
    greeting = asyncio.create_task(tls_handshake(near, certificates.server(), server_side=True))
    client.send(records_of_a_hello(MOST_HELLO_BYTES - 2048))
    await turns(20)
    assert not greeting.done()
    client.send(records_of_a_hello(4096))
    with pytest.raises(OSError, match="Protocol error"):
        await asyncio.wait_for(greeting, LIMIT_S)
    client.close()


@pytest.mark.parametrize("group", [b"ffdhe8192", b"ffdhe2048", b"P-521", b"X448"])
async def test_no_costly_key_exchange_can_be_asked_for(certificates, group):
    client, near = socket.socketpair()
    near.setblocking(False)
    client.send(UpdatingClient(client, group).hello())
    with pytest.raises(ssl.SSLError, match="NO_SUITABLE"):
        await asyncio.wait_for(
            tls_handshake(near, certificates.server(), server_side=True), LIMIT_S
        )
    client.close()


@pytest.mark.parametrize("is_long", [False, True])
async def test_a_long_chain_of_a_client_is_given_up(certificates, tmp_path, is_long):
    chain = tmp_path / "chain"
    authority = certificates.ca.read_bytes()
    most = MOST_HANDSHAKE_BYTES // len(authority) * (3 if is_long else 0)
    chain.write_bytes(certificates.cert.read_bytes() + most * authority)
    context = certificates.client()
    context.load_cert_chain(chain, certificates.key)
    client, near = socket.socketpair()
    client.setblocking(False)
    near.setblocking(False)
    server = certificates.server(wants_certificate=True)
    greetings = await asyncio.wait_for(
        asyncio.gather(
            tls_handshake(client, context, server_side=False, server_hostname="localhost"),
            tls_handshake(near, server, server_side=True),
            return_exceptions=True,
        ),
        LIMIT_S,
    )
    greeted = greetings[1]
    assert isinstance(greeted, OSError if is_long else TlsSocket), greeted
    for each in greetings:
        if isinstance(each, TlsSocket):
            each.close()


async def test_the_lane_reads_on_from_tls_in_turns(certificates, monkeypatch):
    """As long as there is more: a peer that sends on and on leaves time to the others."""
    monkeypatch.setattr(frame_flow, "FAIR_S", 0.0)
    async with open_lab(client_tls=certificates) as lab:
        client, broker = await lab.pair(frames.metadata_request(1))
        await broker.send(frames.metadata_response(1, {}))
        await client.frame()
        (connection,) = lab.relay.connections
        sizes, calls = itertools.cycle((1, 2)), 0
        connection.channel.buffered_bytes = lambda: next(sizes)

        def ready() -> None:
            nonlocal calls
            calls += 1
            if calls == LONG:
                connection.channel.buffered_bytes = int

        for number in (1, 2, 3):  # the socket is readable all the time
            connection.requests.run_lane(ready)
            assert (calls, len(lab.services.paced_steps)) == (number, 1)
        await until(lambda: calls == LONG)


@pytest.mark.parametrize("answer", [NOT_REQUESTED, REQUESTED])
async def test_what_follows_a_few_key_updates_is_read(certificates, answer):
    client, secured = await connected(certificates)
    channel, buffer = Channel(secured), memoryview(bytearray(100))
    for _ in range(3):
        client.sock.send(
            client.updates(MOST_IN_VAIN - HANDSHAKE_RECORDS, answer) + client.data(b"data")
        )
        assert (channel.recv_into(buffer), bytes(buffer[:4])) == (4, b"data")
        assert channel.recv_into(buffer) == BLOCKED
    client.close()
    secured.close()


async def test_who_sends_key_updates_without_end_is_given_up(certificates):
    client, secured = await connected(certificates)
    channel, buffer = Channel(secured), memoryview(bytearray(100))
    updates = client.data(b"data") + client.updates(MOST_IN_VAIN + 1)
    client.sock.send(updates + client.data(b"x"))
    assert channel.recv_into(buffer) == len(b"data")
    with pytest.raises(ChannelLost, match="Protocol error"):
        channel.recv_into(buffer)
    client.close()
    secured.close()


async def test_records_are_read_however_they_are_cut(certificates):
    client, secured = await connected(certificates)
    channel, buffer = Channel(secured), memoryview(bytearray(100))
    sent, came = client.updates(3) + client.data(b"some") + client.data(b"data"), b""
    for byte in sent:
        client.sock.send(bytes((byte,)))
        while (got := channel.recv_into(buffer)) > 0:
            came += bytes(buffer[:got])
        assert got == BLOCKED
    assert came == b"somedata"
    client.close()
    secured.close()


async def test_a_connection_leaves_nothing_to_the_garbage_collector(certificates):
    gc.disable()
    try:
        client, secured = await connected(certificates)
        client.close()
        assert Channel(secured).recv_into(memoryview(bytearray(1))) == 0
        secured.close()
        gone = weakref.ref(secured)
        del secured
        assert gone() is None
    finally:
        gc.enable()


async def test_a_handshake_that_fails_leaves_nothing_to_the_garbage_collector(certificates):
    gc.collect()
    gc.disable()
    try:
        async with open_lab(client_tls=certificates) as lab:
            plain = await lab.silent_client()
            await asyncio.get_running_loop().sock_sendall(plain, b"GET / HTTP/1.1\r\n\r\n")
            await until(lambda: lab.rejected("tls_handshake"))
            await turns()
            assert not [each for each in gc.get_objects() if isinstance(each, TlsSocket)]
    finally:
        gc.enable()


async def test_who_does_not_take_the_answers_is_given_up(certificates, monkeypatch):
    monkeypatch.setattr("proxy.cluster.tls_socket.MOST_UNSENT_BYTES", SMALL_BUFFER_BYTES)
    client, secured = await connected(certificates)
    channel, buffer = Channel(secured), memoryview(bytearray(100))
    secured.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER_BYTES)
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)

    def read_on() -> None:
        sent = 0
        while sent < 2 * BUFFER_BYTES:
            updates = client.updates(MOST_IN_VAIN - HANDSHAKE_RECORDS, REQUESTED)
            sent += client.sock.send(updates + client.data(b"x"))
            while channel.recv_into(buffer) != BLOCKED:
                pass

    with pytest.raises(ChannelLost, match="No buffer space"):
        read_on()
    client.close()
    secured.close()
