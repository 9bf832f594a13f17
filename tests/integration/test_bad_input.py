"""What clients may send or leave out ends their own connection, with one line and one count."""

import random
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.proxy_process import HOST, ProxyProcess, until
from support.raw import RawClient, api_versions, fetch, message

from proxy.wire.apis import METADATA

MAX_REQUEST_BYTES = 1_000_000
IDLE_S = 1
SHARE_FETCH = 78


@pytest.fixture
def strict(proxy: Callable[..., ProxyProcess]) -> Iterator[ProxyProcess]:
    """A proxy with low limits, and beside each test a well-behaved client that must not notice."""
    limits = {"max_request_bytes": MAX_REQUEST_BYTES, "idle_timeout": f"{IDLE_S}s"}
    running = proxy(limits=limits)
    with RawClient(running.bootstrap, "good") as good:
        good.ask(api_versions(3))
        yield running
    with RawClient(running.bootstrap, "good") as good:
        good.ask(api_versions(3))


def frame(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


METADATA_HEAD = struct.pack(">hhih4s", METADATA, 1, 1, 4, b"name")

BAD_BYTES = {
    "http_on_plain_port": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
    "tls_on_plain_port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "negative_length": struct.pack(">i", -1),
    "too_long": struct.pack(">i", MAX_REQUEST_BYTES + 1),
    "too_short": struct.pack(">i", 7) + bytes(7),
    "bad_header": frame(struct.pack(">hhih", METADATA, 1, 1, 9999)),
    "unsupported_version": frame(struct.pack(">hhih", SHARE_FETCH, 1, 1, -1) + b"\0"),
}


def expect_one_rejection(running: ProxyProcess, reason: str) -> None:
    running.until_counts("connections_rejected_total", 1, reason=reason)
    assert running.metrics().value("connections_rejected_total") == 1
    (line,) = running.logged("client rejected")
    assert (line["reason"], line["listener"], line["peer"]) == (reason, "default", HOST)


@pytest.mark.parametrize("reason", BAD_BYTES)
def test_bad_bytes(strict: ProxyProcess, reason: str) -> None:
    with RawClient(strict.bootstrap) as client:
        client.sock.sendall(BAD_BYTES[reason])
        assert client.is_closed_by_peer()
    expect_one_rejection(strict, reason)


def test_tls_client_on_a_plain_port(strict: ProxyProcess) -> None:
    context = ssl.create_default_context()
    with pytest.raises((ssl.SSLError, ConnectionError)):
        RawClient(strict.bootstrap, tls=context, server_name="example")
    expect_one_rejection(strict, "tls_on_plain_port")


@pytest.mark.parametrize("sent", [2, 6, 16, 30], ids=["length", "head", "header", "body"])
def test_frame_that_ends_early(strict: ProxyProcess, sent: int) -> None:
    whole = frame(METADATA_HEAD + bytes(100))
    with RawClient(strict.bootstrap) as client:
        client.sock.sendall(whole[:sent])
    expect_one_rejection(strict, "truncated_frame")


@pytest.mark.parametrize(
    ("sent", "reason"), [(0, "no_request"), (6, "slow_frame"), (30, "slow_frame")]
)
def test_client_that_stops_sending(strict: ProxyProcess, sent: int, reason: str) -> None:
    with RawClient(strict.bootstrap) as client:
        client.sock.sendall(frame(METADATA_HEAD + bytes(100))[:sent])
        assert client.is_closed_by_peer()
    expect_one_rejection(strict, reason)


def test_idle_client_is_closed_without_blame(strict: ProxyProcess) -> None:
    with RawClient(strict.bootstrap) as client:
        client.ask(api_versions(3))
        assert client.is_closed_by_peer()
    assert strict.metrics().value("connections_rejected_total") == 0
    assert strict.log("client rejected") == []


def test_client_that_does_not_read(
    strict: ProxyProcess, topic: Callable[..., str], fill: Callable[..., None]
) -> None:
    """More than fits into all socket buffers is asked for, and none of it is taken."""
    name = topic()
    fill(name, 10, 500_000)
    with RawClient(strict.bootstrap, receive_buffer_bytes=4096) as client:
        client.send(*[fetch(12, name, max_bytes=5_000_000) for _ in range(8)])
        expect_one_rejection(strict, "client_not_reading")


def test_garbage_of_any_kind(strict: ProxyProcess) -> None:
    """Whatever the bytes are, the proxy stays healthy; the fixture looks for faults in its log."""

    @settings(
        max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(
        body=st.binary(max_size=300),
        framed=st.booleans(),
        head=st.one_of(
            st.none(),
            st.tuples(st.integers(-2, 95), st.integers(-1, 20), st.integers(-1, 40)),
        ),
    )
    def play(body: bytes, framed: bool, head: tuple[int, int, int] | None) -> None:
        if head is not None:
            api_key, version, name_bytes = head
            body = struct.pack(">hhih", api_key, version, 1, name_bytes) + body
        with suppress(ConnectionError), closing(RawClient(strict.bootstrap).sock) as sock:
            sock.sendall(frame(body) if framed else body)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass

    play()
    until(lambda: strict.metrics().value("connections") <= 1, "all connections are gone")
    assert strict.get("/healthz")[0] == 200


def test_requests_in_small_pieces(strict: ProxyProcess) -> None:
    """Slow, but in time: not a fault."""
    with RawClient(strict.bootstrap) as client:
        for byte in client.encode(message(METADATA, 9, topics=[])):
            client.sock.sendall(bytes([byte]))
        assert client.receive().brokers


def test_pipelined_requests_in_odd_pieces(strict: ProxyProcess) -> None:
    cuts = random.Random(1)
    with RawClient(strict.bootstrap) as client:
        count = 40
        data = b"".join(client.encode(message(METADATA, 1, topics=[])) for _ in range(count))
        while data:
            size = cuts.randrange(1, 60)
            client.sock.sendall(data[:size])
            data = data[size:]
        for _ in range(count):
            assert client.receive().brokers


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_connections": 2}, "too_many_connections"),
        ({"max_connections_per_ip": 2}, "too_many_connections_per_ip"),
    ],
)
def test_limits_of_connections(
    proxy: Callable[..., ProxyProcess], limits: dict[str, int], reason: str
) -> None:
    running = proxy(limits=limits)
    with RawClient(running.bootstrap) as first:
        with RawClient(running.bootstrap) as second:
            for client in (first, second):
                client.ask(api_versions(3))
            with RawClient(running.bootstrap) as third:
                assert third.is_closed_by_peer()
            expect_one_rejection(running, reason)
            assert running.metrics().value("connections", listener="default") == 2
        until(lambda: running.metrics().value("connections") == 1, "the second one is gone")
        with RawClient(running.bootstrap) as fourth:
            fourth.ask(api_versions(3))
        first.ask(api_versions(3))
