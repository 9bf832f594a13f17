"""Whoever holds connections to the admin port keeps no one else out; over plain sockets and TLS."""

import asyncio
import json
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from time import perf_counter

import pytest
import trustme
from admin_world import AdminWorld, NoQueries, start
from parts.updating_client import UpdatingClient
from prometheus_client.metrics_core import Metric
from structlog.testing import capture_logs

from proxy.admin.port import admin_port
from proxy.admin.port.admin_port import ADMIN_RECEIVE_BYTES, AdminPort
from proxy.admin.server import AdminServer
from proxy.cluster.tls_socket import MOST_IN_VAIN
from proxy.config.models import AdminSection
from proxy.relay.paced_steps import MOST_S

HOST = "127.0.0.1"
LIMIT_S = 20
LONG_S = 3600.0
SOON_S = 0.5
PATIENT = {"head_timeout": LONG_S, "idle_timeout": LONG_S}
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, authority: trustme.CA) -> "Tls":
    return Tls(authority) if request.param == "tls" else Tls(None)


class Tls:
    """Contexts for both sides; None of both without TLS."""

    def __init__(self, authority: trustme.CA | None) -> None:
        self.server = self.client = None
        if authority is not None:
            self.server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            authority.issue_cert(HOST).configure_cert(self.server)
            self.client = ssl.create_default_context()
            authority.configure_trust(self.client)


class Caller:
    """A connection to the admin port."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def get(self) -> int:
        """Ask for the health; return the status of the answer."""
        self.writer.write(GET)
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), LIMIT_S)
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        await self.reader.readexactly(length)
        return int(head.split()[1])

    def abort(self) -> None:
        self.writer.transport.abort()

    async def ended(self) -> bytes:
        """Wait until the server has closed; return what it sent before."""
        try:
            return await asyncio.wait_for(self.reader.read(), LIMIT_S)
        except ConnectionError:
            return b""


@asynccontextmanager
async def opened(server: AdminServer, host: str = HOST) -> AsyncIterator[AdminServer]:
    await start(server, host)
    try:
        yield server
    finally:
        await server.stop()


def connected(server: AdminServer) -> int:
    """Return how many connections aiohttp serves."""
    return len(server.listening.make_http.args[0].connections)


async def call(stack: AsyncExitStack, server: AdminServer, tls: Tls, address: str = HOST) -> Caller:
    """Connect from an address of this machine."""
    connecting = asyncio.open_connection(HOST, server.port, ssl=tls.client, local_addr=(address, 0))
    caller = Caller(*await asyncio.wait_for(connecting, LIMIT_S))
    stack.callback(caller.abort)  # keeps it: who is forgotten closes
    return caller


MORE_THAN_WAITS = 5_000
"""Answers with a file of the page: more than both ends' kernels keep, which take 40 MB at most."""

SLOW = {
    "nothing": b"",
    "a part of a line": b"GET /hea",
    "a part of the head": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: a\r\n",
    "a second head": GET + b"GET /healthz HTTP/1.1\r\n",
    "a part of the body": (
        b"PUT /v1/quotas/user=a HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{"
    ),
}


@pytest.mark.parametrize("sent", SLOW.values(), ids=SLOW.keys())
async def test_who_is_slow_is_closed(world: AdminWorld, tls: Tls, sent: bytes):
    limits = AdminSection.model_construct(head_timeout=SOON_S, idle_timeout=SOON_S)
    async with (
        opened(world.server(section=limits, tls=tls.server)) as server,
        AsyncExitStack() as stack,
    ):
        caller = await call(stack, server, tls)
        caller.writer.write(sent)
        answer = await caller.ended()
        assert answer.count(b"HTTP/1.1 200") == sent.count(GET)


NO_REQUESTS = {
    "too many headers": GET[:-2] + b"X: a\r\n" * 200 + b"\r\n",
    "a long path": b"GET /" + b"a" * 10_000 + GET[12:],
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "Kafka": b"\0\0\0\x10\0\x12\0\3\0\0\0\1\0\4test\0\0",
}


@pytest.mark.parametrize("sent", NO_REQUESTS.values(), ids=NO_REQUESTS.keys())
async def test_what_is_no_request_is_answered_in_json(world: AdminWorld, tls: Tls, sent: bytes):
    async with (
        opened(world.server(tls=tls.server)) as server,
        AsyncExitStack() as stack,
    ):
        caller = await call(stack, server, tls)
        caller.writer.write(sent)
        head, _, body = (await caller.ended()).partition(b"\r\n\r\n")
        assert head.split()[1] == b"400"
        assert json.loads(body).keys() == {"error", "fix"}


async def test_a_head_that_trickles_is_slow_too(world: AdminWorld, tls: Tls):
    async def trickle(caller: Caller) -> None:
        caller.writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        while True:
            caller.writer.write(b"X: y\r\n")
            await caller.writer.drain()
            await asyncio.sleep(0)

    limits = AdminSection.model_construct(head_timeout=SOON_S, idle_timeout=LONG_S)
    async with (
        opened(world.server(section=limits, tls=tls.server)) as server,
        AsyncExitStack() as stack,
    ):
        caller = await call(stack, server, tls)
        sending = asyncio.create_task(trickle(caller))
        assert b" 200 " not in await caller.ended()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_a_handshake_that_trickles_is_closed(world: AdminWorld, authority: trustme.CA):
    tls = Tls(authority)
    limits = AdminSection.model_construct(max_connections=1, head_timeout=SOON_S)
    async with (
        opened(world.server(section=limits, tls=tls.server)) as server,
        AsyncExitStack() as stack,
    ):
        for sent in (b"", b"\x16\x03\x01\x02\x00"):
            stranger = await call(stack, server, Tls(None))
            stranger.writer.write(sent)
            assert await stranger.ended() == b""
        for garbage in (GET, b"\x00\x00\x00\x10\x00\x12\x00\x03"):
            stranger = await call(stack, server, Tls(None))
            stranger.writer.write(garbage)
            await stranger.ended()


async def test_key_updates_without_end_are_not_read(world: AdminWorld, authority: trustme.CA):
    """Each costs some 20 us; what is asked between a few of them is answered."""
    loop, tls = asyncio.get_running_loop(), Tls(authority)
    async with opened(world.server(tls=tls.server)) as server:
        sock = socket.create_connection((HOST, server.port))
        sock.setblocking(False)
        client = UpdatingClient(sock)
        await asyncio.wait_for(client.greet(), LIMIT_S)
        for _ in range(3):
            await loop.sock_sendall(sock, client.updates(MOST_IN_VAIN // 2) + client.data(GET))
            assert await asyncio.wait_for(loop.sock_recv(sock, ADMIN_RECEIVE_BYTES), LIMIT_S)
        await loop.sock_sendall(sock, client.updates(MOST_IN_VAIN + 1))
        with suppress(ConnectionError):
            while await asyncio.wait_for(loop.sock_recv(sock, ADMIN_RECEIVE_BYTES), LIMIT_S):
                pass
        client.close()


async def until_closed_unread(world: AdminWorld, tls: Tls, asked: bytes) -> None:
    """Have requests sent by who reads no answer, and return when its connection is closed."""
    limits = AdminSection.model_construct(head_timeout=LONG_S, idle_timeout=SOON_S)
    async with (
        opened(world.server(section=limits, tls=tls.server)) as server,
        AsyncExitStack() as stack,
    ):
        caller = await call(stack, server, tls)
        caller.writer.transport.pause_reading()
        caller.writer.write(asked)
        while connected(server):  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0)


async def test_who_does_not_read_its_answers_is_closed(world: AdminWorld, tls: Tls):
    """Answers of megabytes stay in the kernel's buffers and then in the process."""
    await until_closed_unread(world, tls, GET.replace(b"/healthz", b"/page/page.css") * 400)


class Scrapes:
    """Counts the answers to `/metrics`; each has LINE in it, and is no long one for aiohttp."""

    LINE = "x" * 30_000

    def __init__(self) -> None:
        self.count = 0

    def collect(self) -> Iterator[Metric]:
        self.count += 1
        yield Metric("padding", self.LINE, "gauge")


async def test_who_does_not_read_its_scrapes_gets_no_more_of_them(world: AdminWorld, tls: Tls):
    """Each that is asked for behind another would stay in the process, and give it more time."""
    scrapes = Scrapes()
    world.prometheus.register(scrapes)
    await until_closed_unread(world, tls, GET.replace(b"/healthz", b"/metrics") * MORE_THAN_WAITS)
    assert 0 < scrapes.count < MORE_THAN_WAITS // 2


async def test_who_reads_late_gets_all_its_scrapes(world: AdminWorld, tls: Tls):
    scrapes = Scrapes()
    world.prometheus.register(scrapes)
    async with opened(world.server(tls=tls.server)) as server, AsyncExitStack() as stack:
        caller = await call(stack, server, tls)
        caller.writer.transport.pause_reading()
        scrape = GET.replace(b"/healthz", b"/metrics")
        caller.writer.write(scrape * MORE_THAN_WAITS)
        while not server.listening.unread:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0)
        caller.writer.transport.resume_reading()
        for _ in range(MORE_THAN_WAITS):
            await asyncio.wait_for(caller.reader.readuntil(b"# TYPE padding gauge\n"), LIMIT_S)
    assert scrapes.count == MORE_THAN_WAITS


async def test_only_so_many_leave_their_answers_unread(
    world: AdminWorld, tls: Tls, monkeypatch: pytest.MonkeyPatch
):
    """Else each of hundreds could keep megabytes in the process, until its time is over."""
    monkeypatch.setattr(admin_port, "MOST_UNREAD", 2)
    limits = AdminSection.model_construct(**PATIENT)
    async with (
        opened(world.server(section=limits, tls=tls.server)) as server,
        AsyncExitStack() as stack,
    ):
        callers = [await call(stack, server, tls) for _ in range(5)]
        for caller in callers:
            caller.writer.transport.pause_reading()
            caller.writer.write(GET.replace(b"/healthz", b"/page/page.css") * MORE_THAN_WAITS)
        while connected(server) > 2:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0)
        assert await (await call(stack, server, tls)).get() == 200


async def test_who_asks_again_in_time_stays(world: AdminWorld, tls: Tls):
    limits = AdminSection.model_construct(**PATIENT)
    async with (
        opened(world.server(section=limits, tls=tls.server)) as server,
        AsyncExitStack() as stack,
    ):
        caller = await call(stack, server, tls)
        assert [await caller.get() for _ in range(5)] == [200] * 5


ENDLESS = {
    "a line": GET + b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 100_000,
    "header after header": b"GET /healthz HTTP/1.1\r\n" + b"X: yyyyyyyyyy\r\n" * 100_000,
}


@pytest.mark.parametrize("sent", ENDLESS.values(), ids=ENDLESS.keys())
async def test_a_head_without_end_is_refused(world: AdminWorld, tls: Tls, sent: bytes):
    limits = AdminSection.model_construct(**PATIENT)
    async with (
        opened(world.server(section=limits, tls=tls.server)) as server,
        AsyncExitStack() as stack,
    ):
        caller = await call(stack, server, tls)
        caller.writer.write(sent)
        await caller.ended()
        assert await (await call(stack, server, tls)).get() == 200


async def test_one_address_has_its_share(world: AdminWorld, tls: Tls):
    limits = AdminSection.model_construct(max_connections=10, max_connections_per_ip=3)
    with capture_logs() as logs:
        async with (
            opened(world.server(section=limits, tls=tls.server)) as server,
            AsyncExitStack() as stack,
        ):
            operator = await call(stack, server, tls, "127.0.0.2")
            assert await operator.get() == 200
            callers = [await call(stack, server, tls) for _ in range(3)]
            assert [await caller.get() for caller in callers] == [200] * 3
            assert await callers[0].get() == 200
            for gone in (1, 2, 0):  # the one that asked for nothing for longest
                assert await (await call(stack, server, tls)).get() == 200
                assert await callers[gone].ended() == b""
            assert await operator.get() == 200
    (line,) = logs
    assert (line["closed"], line["crowded_by"]) == (1, HOST)


async def test_a_flood_gives_way_to_another_address(world: AdminWorld, tls: Tls):
    limits = AdminSection.model_construct(max_connections=4, max_connections_per_ip=4, **PATIENT)
    async with (
        opened(world.server(section=limits, tls=tls.server)) as server,
        AsyncExitStack() as stack,
    ):
        flood = [await call(stack, server, tls) for _ in range(4)]
        assert await flood[0].get() == 200
        operator = await call(stack, server, tls, "127.0.0.2")
        assert await operator.get() == 200
        assert await flood[1].ended() == b""
        more = [await call(stack, server, Tls(None)) for _ in range(20)]
        assert await flood[0].ended() == b""  # of its own address, not the operator
        assert await more[0].ended() == b""
        assert await operator.get() == 200
        third = await call(stack, server, tls, "127.0.0.3")
        assert await third.get() == 200
        assert await operator.get() == 200


async def test_in_a_flood_each_newcomer_is_answered(world: AdminWorld, tls: Tls):
    """Also one from the address of the flood, and where each address has one connection."""
    limits = AdminSection.model_construct(max_connections=3, max_connections_per_ip=3, **PATIENT)
    async with (
        opened(world.server(section=limits, tls=tls.server)) as server,
        AsyncExitStack() as stack,
    ):
        for number in range(20):
            await call(stack, server, tls)
            assert await (await call(stack, server, tls)).get() == 200
            other = await call(stack, server, tls, f"127.0.1.{number + 1}")
            assert await other.get() == 200


async def test_handshakes_count_and_give_way(world: AdminWorld, authority: trustme.CA):
    tls = Tls(authority)
    limits = AdminSection.model_construct(max_connections=3, max_connections_per_ip=3, **PATIENT)
    async with (
        opened(world.server(section=limits, tls=tls.server)) as server,
        AsyncExitStack() as stack,
    ):
        silent = [await call(stack, server, Tls(None)) for _ in range(3)]
        operator = await call(stack, server, tls, "127.0.0.2")
        assert await operator.get() == 200
        assert await silent[0].ended() == b""


async def test_who_is_being_answered_is_not_closed_for_others(world: AdminWorld):
    answering, go_on = asyncio.Event(), asyncio.Event()

    class SlowReports(NoQueries):
        async def accept(self, raw: bytes, _: object) -> Mapping[str, object]:
            answering.set()
            await go_on.wait()
            return {"taken": len(raw)}

    limits = AdminSection.model_construct(max_connections=2, max_connections_per_ip=2, **PATIENT)
    plain = Tls(None)
    async with (
        opened(world.server(section=limits, reports=SlowReports())) as server,
        AsyncExitStack() as stack,
    ):
        busy = await call(stack, server, plain)
        busy.writer.write(
            b"POST /v1/spark/batches HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        )
        await asyncio.wait_for(answering.wait(), LIMIT_S)
        idle = await call(stack, server, plain)
        assert await idle.get() == 200
        operator = await call(stack, server, plain, "127.0.0.2")
        assert await operator.get() == 200
        assert await idle.ended() == b""
        go_on.set()
        assert (await busy.ended()).startswith(b"HTTP/1.1 200")


async def test_both_families_of_localhost_are_served(world: AdminWorld):
    async with opened(world.server("localhost"), "localhost") as server:
        reader, writer = await asyncio.open_connection("localhost", server.port)
        assert await Caller(reader, writer).get() == 200
        writer.close()


async def test_tls_is_all_that_is_spoken(world: AdminWorld, authority: trustme.CA):
    tls = Tls(authority)
    async with (
        opened(world.server(tls=tls.server)) as server,
        AsyncExitStack() as stack,
    ):
        plain = await call(stack, server, Tls(None))
        plain.writer.write(GET)
        assert b"HTTP" not in await plain.ended()
        assert await (await call(stack, server, tls)).get() == 200


async def test_who_shows_no_certificate_is_refused(world: AdminWorld, authority: trustme.CA):
    tls = Tls(authority)
    assert tls.server is not None
    assert tls.client is not None
    authority.configure_trust(tls.server)
    tls.server.verify_mode = ssl.CERT_REQUIRED
    async with (
        opened(world.server(tls=tls.server)) as server,
        AsyncExitStack() as stack,
    ):
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await (await call(stack, server, tls)).get()
        authority.issue_cert("anna@example.com").configure_cert(tls.client)
        assert await (await call(stack, server, tls)).get() == 200


async def test_what_is_parsed_in_one_go_is_bounded():
    """A body may come in pieces of one byte, each of which takes microseconds."""
    pieces: list[int] = []

    class Recording(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            pieces.append(len(data))

    port = AdminPort(AdminSection.model_construct())
    port.make_http = Recording
    port.serve([socket.create_server((HOST, 0))])
    sent = b"1\r\n[\r\n" * 200_000
    with socket.create_connection(port.addresses[0]) as client:
        client.setblocking(False)
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(client, sent), LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            while sum(pieces) < len(sent):  # noqa: ASYNC110 - there is nothing to wait on
                await asyncio.sleep(0)
    port.close()
    assert max(pieces) <= 4 * ADMIN_RECEIVE_BYTES


async def test_of_many_connections_few_are_parsed_in_one_round_of_the_loop():
    count = 20
    rounds, over, loop = [0], asyncio.Event(), asyncio.get_running_loop()

    class Costly(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:  # noqa: ARG002
            begin_s = perf_counter()
            while perf_counter() < begin_s + MOST_S:
                pass
            rounds.append(rounds[0])
            if len(rounds) > count:
                over.set()

    def begin_round() -> None:
        rounds[0] += 1
        if not over.is_set():
            loop.call_soon(begin_round)

    port = AdminPort(AdminSection.model_construct())
    port.make_http = Costly
    port.serve([socket.create_server((HOST, 0))])
    begin_round()
    with ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(socket.create_connection(port.addresses[0]))
            client.sendall(b"[")
        await asyncio.wait_for(over.wait(), LIMIT_S)
    port.close()
    assert max(Counter(rounds[1:]).values()) <= 2
