"""Strangers who connect keep nobody out, whatever they send or leave unsaid."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from confluent_kafka.admin import AdminClient
from support.proxy_process import HOST, ProxyProcess, until
from support.raw import RawClient, api_versions, message

from proxy.wire.apis import SASL_AUTHENTICATE, SASL_HANDSHAKE

PLACES = 40
ADDRESSES = 4
TIMEOUT_S = 30


@contextmanager
def silent(running: ProxyProcess, count: int) -> Iterator[list[socket.socket]]:
    """Connect from several addresses, and say nothing."""
    with ExitStack() as stack:
        made = []
        for number in range(count):
            own = (f"127.0.0.{2 + number % ADDRESSES}", 0)
            address = (HOST, running.port)
            made.append(stack.enter_context(socket.create_connection(address, TIMEOUT_S, own)))
        yield made


def test_silent_connections_keep_nobody_out(proxy: Callable[..., ProxyProcess]) -> None:
    running = proxy(limits={"max_connections": PLACES})
    with RawClient(running.bootstrap, "first") as first:
        first.ask(api_versions(3))
        with silent(running, 2 * PLACES):
            running.until_counts("connections_rejected_total", PLACES + 1, reason="evicted")
            with RawClient(running.bootstrap, "raw") as client:
                client.ask(api_versions(3))
            real = AdminClient({"bootstrap.servers": running.bootstrap, "client.id": "real"})
            assert real.list_topics(timeout=TIMEOUT_S).brokers
            first.ask(api_versions(3))
            shown = running.metrics()
            assert shown.value("connections_rejected_total", reason="too_many_connections") == 0
            assert shown.value("connections_limit") == PLACES
            assert shown.value("connections") <= PLACES
            assert shown.value("silent_connections") >= PLACES / 2
    until(lambda: not running.metrics().value("silent_connections"), "all have gone")


@pytest.mark.parametrize(
    ("mechanism", "login", "reason"),
    [
        ("PLAIN", b"\0alice\0" + bytes(16 << 10), "too_long"),
        ("SCRAM-SHA-256", b"n,,n=a,r=b" + b",x=y" * 60_000, "too_long"),
        ("SCRAM-SHA-256", b"n,,n=a,r=b" + b",x=y" * 4_000, "bad_body"),
        ("OAUTHBEARER", b"n,,\1auth=Bearer e30.e30.x\1" + b"x=y\1" * 15_000 + b"\1", "bad_body"),
    ],
)
def test_a_login_that_would_take_long(
    proxy: Callable[..., ProxyProcess], mechanism: str, login: bytes, reason: str
) -> None:
    running = proxy()
    with RawClient(running.bootstrap, "raw") as client:
        client.ask(message(SASL_HANDSHAKE, 1, mechanism=mechanism))
        with suppress(ConnectionError):
            client.send(message(SASL_AUTHENTICATE, 1, auth_bytes=login))
        assert client.is_closed_by_peer()
    running.until_counts("connections_rejected_total", 1, reason=reason)
