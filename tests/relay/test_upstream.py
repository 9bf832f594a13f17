"""Why a broker could not be reached."""

import asyncio
import socket

import pytest
from relaylab.lab import open_files

from proxy.relay.tls import upstream_context
from proxy.relay.upstream import UpstreamError, connect

HOST = "127.0.0.1"
ENOUGH_S = 10.0


async def reason_of(host: str, port: int, *, tls=None, timeout_s: float = ENOUGH_S) -> str:
    files = open_files()
    with pytest.raises(UpstreamError) as failure:
        await connect(host, port, tls=tls, timeout_s=timeout_s)
    assert open_files() <= files
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
    with socket.create_server((HOST, 0), backlog=0) as server:
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:  # the queue of the server is full after the first of these
            sock.setblocking(False)
            sock.connect_ex(server.getsockname())
        assert await reason_of(HOST, server.getsockname()[1], timeout_s=0.05) == "timeout"
        for sock in waiting:
            sock.close()


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
        assert open_files() <= files
