"""Why a broker could not be reached."""

import asyncio
import errno
import socket
from contextlib import ExitStack

import pytest
from relaylab.lab import LAB_HOST, left_open, no_free_descriptor, open_files, silent_server, turns

from proxy.cluster.dial import connect_to_first, interleave_families, start_tls, upstream_context
from proxy.cluster.resolver import Resolver
from proxy.cluster.upstream import UpstreamError

HOST = LAB_HOST
REFUSING = (HOST, 1)
ENOUGH_S = 10.0
NEVER_S = 600.0


async def connect(host: str, port: int, *, tls=None, timeout_s: float) -> socket.socket:
    server, sock = await connect_to_first([(host, port)], timeout_s, Resolver())
    return await start_tls(sock, server, tls, timeout_s)


async def reason_of(host: str, port: int, *, tls=None, timeout_s: float = ENOUGH_S) -> str:
    files = open_files()
    with pytest.raises(UpstreamError) as failure:
        await connect(host, port, tls=tls, timeout_s=timeout_s)
    assert not await left_open(files)
    assert f"{host}:{port}" in str(failure.value)
    return failure.value.reason


async def test_refused():
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    assert await reason_of(HOST, port) == "refused"


@pytest.mark.parametrize("host", ["broker.invalid", "a" * 70 + ".example", "a..b"])
async def test_no_such_name(host):
    assert await reason_of(host, 9092) == "dns"


async def test_a_broker_that_accepts_no_more():
    with silent_server() as address:
        assert await reason_of(*address, timeout_s=0.05) == "timeout"


async def test_no_descriptor_is_left():
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        await asyncio.get_running_loop().getaddrinfo(HOST, port)  # opens what the loop wants for it
        with no_free_descriptor(), pytest.raises(UpstreamError) as failure:
            await connect_to_first([(HOST, port)], ENOUGH_S, Resolver())
    assert failure.value.reason == "local"


async def test_a_broker_that_does_not_answer_the_handshake():
    with socket.create_server((HOST, 0)) as server:
        tls = upstream_context(None, None, None)
        assert await reason_of(HOST, server.getsockname()[1], tls=tls, timeout_s=0.05) == "timeout"


async def test_a_certificate_of_another_authority(certificates):
    server = await asyncio.start_server(lambda _, w: w.close(), HOST, 0, ssl=certificates.server())
    async with server:
        tls = upstream_context(None, None, None)
        with pytest.raises(UpstreamError) as failure:
            await connect(HOST, server.sockets[0].getsockname()[1], tls=tls, timeout_s=ENOUGH_S)
        assert failure.value.reason == "tls"


async def test_a_name_that_the_certificate_does_not_have(certificates):
    host = "127.0.0.2"
    server = await asyncio.start_server(lambda _, w: w.close(), host, 0, ssl=certificates.server())
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UpstreamError, match="IP address mismatch") as failure:
            await connect(host, port, tls=certificates.client(), timeout_s=ENOUGH_S)
        assert failure.value.reason == "tls"


async def test_cancelled_while_it_connects():
    with socket.create_server((HOST, 0)) as server:
        files = open_files()
        tls = upstream_context(None, None, None)
        port = server.getsockname()[1]
        task = asyncio.create_task(connect(HOST, port, tls=tls, timeout_s=ENOUGH_S))
        await asyncio.get_running_loop().run_in_executor(None, server.accept)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not await left_open(files)


@pytest.mark.parametrize("first", ["refuses", "silent"])
async def test_the_next_server_is_tried_at_once(first):
    with silent_server() as silent, socket.create_server((HOST, 0)) as server:
        good = server.getsockname()
        files = open_files()
        async with asyncio.timeout(ENOUGH_S):
            reached, sock = await connect_to_first(
                [REFUSING if first == "refuses" else silent, good], NEVER_S, Resolver()
            )
        with sock:
            assert reached == good == sock.getpeername()
        await turns(10)
        assert not await left_open(files)


async def test_the_next_address_of_a_name_is_tried_at_once(monkeypatch):
    with silent_server() as silent, socket.create_server((HOST, 0)) as server:
        good = server.getsockname()
        name_means(monkeypatch, silent, silent, good)
        files = open_files()
        async with asyncio.timeout(ENOUGH_S):
            reached, sock = await connect_to_first([("broker", 9092)], NEVER_S, Resolver())
        with sock:
            assert reached == ("broker", 9092)
            assert sock.getpeername() == good
        await turns(10)
        assert not await left_open(files)


async def test_a_name_server_that_does_not_answer(monkeypatch):
    async def never(*_, **__):
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", never)
    assert await reason_of("broker", 9092, timeout_s=0.05) == "timeout"
    with socket.create_server((HOST, 0)) as server:
        monkeypatch.undo()
        name_means(monkeypatch, server.getsockname())
        _, sock = await connect_to_first([("broker", 9092)], ENOUGH_S, Resolver())
        sock.close()


def test_address_families_take_turns():
    addresses = [(6, "a"), (6, "b"), (6, "c"), (4, "d"), (4, "e")]
    assert [name for _, name in interleave_families(addresses)] == ["a", "d", "b", "e", "c"]


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        pytest.param([errno.ECONNREFUSED], "refused", id="refused"),
        pytest.param([errno.EHOSTUNREACH], "refused", id="no route"),
        pytest.param([errno.EADDRNOTAVAIL], "local", id="no local port"),
        pytest.param([errno.ETIMEDOUT], "timeout", id="given up by the system"),
        pytest.param([errno.ECONNREFUSED, errno.EADDRNOTAVAIL], "refused", id="no such family"),
    ],
)
async def test_reasons(monkeypatch, errors, reason):
    """Of a name with as many addresses as there are errors."""
    addresses = [(HOST, port) for port in range(1, len(errors) + 1)]
    name_means(monkeypatch, *addresses)
    left = iter(errors)

    async def fail(*_):
        number = next(left)
        raise OSError(number, "failed")

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", fail)
    assert await reason_of("broker", 9092) == reason


@pytest.mark.parametrize("after", range(16))
async def test_cancelled_at_any_moment(monkeypatch, after):
    """Two servers answer at once, a third never."""
    monkeypatch.setattr("proxy.cluster.dial.ATTEMPT_DELAY_S", 0.0)
    with ExitStack() as stack:
        servers = [stack.enter_context(silent_server())]
        for _ in range(2):  # nobody accepts: the only descriptors are the client's
            server = stack.enter_context(socket.create_server((HOST, 0)))
            servers.append(server.getsockname())
        name_means(monkeypatch, *servers)
        files = open_files()
        task = asyncio.create_task(connect_to_first([("one", 1), ("two", 2)], NEVER_S, Resolver()))
        await turns(after)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            task.result()[1].close()
        await turns(10)
        assert not await left_open(files)


def name_means(monkeypatch, *addresses: tuple[str, int]) -> None:
    """Let every name mean these addresses."""
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo

    async def getaddrinfo(host, port, **kinds):
        if host == HOST:  # uvloop asks for addresses too
            return await real(host, port, **kinds)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in addresses]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
