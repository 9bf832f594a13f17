"""Runs a real relay on loopback with a broker and clients that do what the test says."""

import asyncio
import os
import resource
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import trustme
from parts.interceptors import NothingShown
from prometheus_client import CollectorRegistry

from metrics import Instruments
from metrics.clock import clock_ms
from metrics.exposition import MetricTableCollector
from proxy.cluster.dial import upstream_context
from proxy.cluster.kafka_client import Bootstrap
from proxy.progress.topics import TopicNames
from proxy.quota.entities import QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.meters import OF_SENSORS
from proxy.quota.rules import QuotaManagerSettings, Rule
from proxy.relay.brokers import BrokerConnector
from proxy.relay.clients import ClientRegistry, ClientUsage
from proxy.relay.intercept_queue import InterceptQueue
from proxy.relay.listener import ListenerSettings
from proxy.relay.ports import ReusePortSockets
from proxy.relay.relay import Relay
from proxy.relay.services import Limits, Reapers, Services
from proxy.relay.steering import Steering
from proxy.relay.tls import server_context

LIMIT_S = 120.0
"""No test waits longer than this for anything, on however slow a machine."""

LOCALHOST = "127.0.0.1"
"""From where clients come."""

LAB_HOST = "127.0.0.9"
"""Where relay and broker listen. On LOCALHOST the kernel may give them a port that another test has
just closed, to which a client that this test has left behind still connects, again and again."""
LISTENER = "default"

READ_LIMIT_BYTES = 1 << 16

LOOKS, LOOK_S = 100, 0.01
"""Whether files are left open: clients that other tests left behind open sockets now and then."""


def open_files() -> set[str]:
    """The sockets and pipes that are open; what else the loop opens when it needs it is its own."""
    return set(_described_files())


def _described_files() -> dict[str, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists the folder
            name = str(entry.readlink())
            if name.startswith("pipe:"):
                found[name] = name
            elif name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                    if not _is_of_other_tests(copy):
                        found[name] = repr(copy)
    return found


def _is_of_other_tests(sock: socket.socket) -> bool:
    """Whether it is between LOCALHOST and itself, as nothing here is: tests that failed may have
    left clients of brokers and proxies there, which connect anew when they like.
    """
    if sock.family is not socket.AF_INET:
        return False
    with suppress(OSError):  # it is not connected
        return sock.getsockname()[0] == sock.getpeername()[0] == LOCALHOST
    return False


def opened(files: Collection[str]) -> list[str]:
    """Return what is open beside these."""
    return [text for name, text in _described_files().items() if name not in files]


async def left_open(files: Collection[str]) -> list[str]:
    """Return what is open beside these, for good: other tests' clients come and go in threads."""
    for _ in range(LOOKS):
        if not opened(files):
            break
        await asyncio.sleep(LOOK_S)
    return opened(files)


def left_open_after(files: Collection[str]) -> list[str]:
    """Return the same where no loop runs."""
    for _ in range(LOOKS):
        if not opened(files):
            break
        time.sleep(LOOK_S)
    return opened(files)


async def turns(count: int = 3) -> None:
    """Let everything that is ready now run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(holds: Callable[[], object]) -> None:
    """Let the loop run until something is so."""
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 - many of these states have nothing to wait on
            await asyncio.sleep(0)


@contextmanager
def silent_server() -> Iterator[tuple[str, int]]:
    """A port that neither takes connections nor refuses them: its queue is full."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server((LAB_HOST, 0), backlog=0))
        for _ in range(4):  # the first of these fills it
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    """The process is at its limit of open files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as sock:
        lowest_free = sock.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class Certificates:
    """One authority, and a certificate for the local host, as files and contexts."""

    def __init__(self, authority: trustme.CA, folder: Path) -> None:
        self.authority = authority
        self.ca, self.cert, self.key = (folder / name for name in ("ca", "cert", "key"))
        authority.cert_pem.write_to_path(self.ca)
        issued = authority.issue_cert("localhost", LOCALHOST, LAB_HOST)
        issued.private_key_pem.write_to_path(self.key)
        for pem in issued.cert_chain_pems:
            pem.write_to_path(self.cert, append=True)

    def server(self, *, wants_certificate: bool = False) -> ssl.SSLContext:
        return server_context(self.cert, self.key, self.ca if wants_certificate else None)

    def client(self) -> ssl.SSLContext:
        return upstream_context(self.ca, None, None)


class Reader(asyncio.StreamReader):
    """Knows what has come and was not received yet; that is little more than `limit` twice."""

    def __init__(self, limit: int = READ_LIMIT_BYTES) -> None:
        super().__init__(limit, asyncio.get_running_loop())
        self.unread = bytearray()

    def feed_data(self, data: bytes) -> None:
        self.unread += data
        super().feed_data(data)

    async def readexactly(self, count: int) -> bytes:
        return self._received(await super().readexactly(count))

    async def read(self, most: int) -> bytes:
        return self._received(await super().read(most))

    def _received(self, data: bytes) -> bytes:
        del self.unread[: len(data)]
        return data


@dataclass(slots=True)
class End:
    """One end of a connection, the client's or the broker's."""

    reader: Reader
    writer: asyncio.StreamWriter

    @property
    def unread(self) -> bytes:
        """What has come and was not received yet."""
        return bytes(self.reader.unread)

    async def send(self, *pieces: bytes) -> None:
        """Send each piece by itself, so that the relay sees it before the next one."""
        for piece in pieces:
            self.writer.write(piece)
            await asyncio.wait_for(self.writer.drain(), LIMIT_S)
            if len(pieces) > 1:
                await turns()

    async def receive(self, count: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(count), LIMIT_S)

    async def frame(self) -> bytes:
        length = await self.receive(4)
        return length + await self.receive(int.from_bytes(length, "big"))

    async def ended(self) -> bytes:
        """Wait for the end; return what came before it."""
        received = b""
        with suppress(RuntimeError):  # it may not have been paused
            self.writer.transport.resume_reading()
        with suppress(ConnectionError):
            async with asyncio.timeout(LIMIT_S):
                while piece := await self.reader.read(1 << 16):
                    received += piece
        return received

    def reset(self) -> None:
        """Break the connection off."""
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await asyncio.wait_for(self.writer.wait_closed(), LIMIT_S)


@dataclass(slots=True)
class Lab:
    """The relay and what surrounds it."""

    relay: Relay
    services: Services
    brokers: BrokerConnector
    metrics: CollectorRegistry
    accepted: asyncio.Queue[End]
    client_tls: ssl.SSLContext | None
    ends: list[End] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.relay.listeners[LISTENER].bootstrap_port

    async def client(self, port: int | None = None, address: str | None = None) -> End:
        """A client, that comes from an address if that is given."""
        loop, reader = asyncio.get_running_loop(), Reader()
        transport, protocol = await loop.create_connection(
            lambda: asyncio.StreamReaderProtocol(reader),
            LAB_HOST,
            port or self.port,
            ssl=self.client_tls,
            server_hostname="localhost" if self.client_tls else None,
            local_addr=(address, 0) if address else None,
        )
        end = End(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        self.ends.append(end)
        return end

    async def silent_client(self) -> socket.socket:
        """A plain client that only receives what a small buffer takes, until it is read from."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        self.sockets.append(sock)
        await asyncio.get_running_loop().sock_connect(sock, (LAB_HOST, self.port))
        return sock

    async def broker(self) -> End:
        """The broker's end of the next connection that the relay dials."""
        return await asyncio.wait_for(self.accepted.get(), LIMIT_S)

    async def pair(self, first: bytes, address: str | None = None) -> tuple[End, End]:
        """A client and the broker's end that its first request opened; that request is read."""
        client = await self.client(address=address)
        await client.send(first)
        broker = await self.broker()
        assert await broker.frame() == first
        return client, broker

    @property
    def held(self) -> int:
        return sum(len(reaper) for reaper in self.services.reapers.all)

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.get_sample_value(f"kafka_quota_proxy_{name}", labels) or 0.0

    def rejected(self, reason: str) -> float:
        return self.count("connections_rejected_total", reason=reason)

    def upstream_errors(self, reason: str) -> float:
        return self.count("upstream_errors_total", reason=reason)


@asynccontextmanager
async def open_lab(
    *,
    splice: bool = True,
    client_tls: Certificates | None = None,
    upstream_tls: Certificates | None = None,
    rules: tuple[Rule, ...] = (),
    holds: bool = True,
    limits: Limits | None = None,
    takes_free_ports: bool = True,
    passes_unknown_apis: bool = False,
    steering: Steering | None = None,
    is_inner: bool = False,
    lane: bool | None = None,
    sample_every: int | None = None,
    read_limit_bytes: int = READ_LIMIT_BYTES,
) -> AsyncIterator[Lab]:
    """Start everything; at the end check that nothing is left of any connection.

    `lane`: what is plain goes by the lane; None: on uvloop, as in the proxy, and not on the other
    loop, so that each test is run both ways. `sample_every`: one request in so many is walked for
    its topics; None: none is. `is_inner`: another lab is opened before and closed after it, and
    looks for open files. `read_limit_bytes`: with twice as much
    unread a broker takes no more.
    """
    loop = asyncio.get_running_loop()
    files = open_files()
    metrics = CollectorRegistry()
    instruments = Instruments(metrics, max_label_sets=100)
    settings, names = QuotaManagerSettings(rules=rules), TopicNames()
    quotas = QuotaManager(settings, instruments)
    sensors = OF_SENSORS, quotas.metric_rows
    metrics.register(MetricTableCollector([sensors], clock_ms, sys.maxsize))
    new_usage = None if sample_every is None else lambda: ClientUsage(names, sample_every)
    services = Services(
        loop=loop,
        limits=limits or Limits(),
        holds=holds,
        quotas=quotas,
        reapers=Reapers(loop, instruments),
        instruments=instruments,
        max_pipes=512 if splice else 0,
        clients=ClientRegistry(instruments.bytes_total, new_usage),
        interceptor=lambda *_: NothingShown(),
        unshown=InterceptQueue(loop.call_later),
        topic_names=names,
        passes_unknown_apis=passes_unknown_apis,
        steering=steering,
        lane="uvloop" in type(loop).__module__ if lane is None else lane,
    )
    accepted: asyncio.Queue[End] = asyncio.Queue()
    ends: list[End] = []

    def accept(reader: Reader, writer: asyncio.StreamWriter) -> None:
        ends.append(End(reader, writer))
        accepted.put_nowait(ends[-1])

    server = await loop.create_server(
        lambda: asyncio.StreamReaderProtocol(Reader(read_limit_bytes), accept),
        LAB_HOST,
        0,
        ssl=upstream_tls.server() if upstream_tls else None,
    )
    address = server.sockets[0].getsockname()[:2]
    bootstrap = Bootstrap([address], upstream_tls.client() if upstream_tls else None, 10.0)
    brokers = BrokerConnector(bootstrap)
    tls = client_tls.server() if client_tls else None
    listener = ListenerSettings(LISTENER, LAB_HOST, "proxy", takes_free_ports, tls=tls)
    relay = Relay((listener,), brokers, services)
    ports = ReusePortSockets()
    relay.use({LISTENER: {None: ports.open(LISTENER, LAB_HOST, 0)[0]}}, ports)
    relay.accept()
    lab = Lab(
        relay,
        services,
        brokers,
        metrics,
        accepted,
        client_tls.client() if client_tls else None,
        ends,
    )
    try:
        yield lab
    finally:
        await relay.close()
        for end in ends:
            end.reset()
            await end.close()
        for sock in lab.sockets:
            sock.close()
        server.close()
        await server.wait_closed()
        await turns()
    assert relay.connected == 0
    assert lab.count("connections", listener=LISTENER) == 0
    assert lab.held == 0
    assert services.pipes.open_pipes == 0
    assert not services.clients.connections
    assert is_inner or not await left_open(files)


def slow_client(name: str = "test", kind: QuotaKind = QuotaKind.CONSUMER_BYTE_RATE) -> Rule:
    """A bound so low that everything is held for longer than any test runs."""
    return Rule(client_id=name, bounds={kind: 1.0})


def fast_client(name: str = "test") -> Rule:
    """A bound that no test comes near."""
    return Rule(client_id=name, bounds={QuotaKind.CONSUMER_BYTE_RATE: 1e12})
