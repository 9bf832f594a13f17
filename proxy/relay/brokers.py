"""The brokers behind the proxy: whether they answer, and each one's real address."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TypeAlias

from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest
from structlog import get_logger

from metrics.clock import clock_ms
from proxy.cluster.broker_connection import BrokerConnection
from proxy.cluster.kafka_client import Bootstrap
from proxy.cluster.upstream import (
    CONNECTION_CLOSED,
    LOCAL,
    LOGIN_REFUSED,
    LOOP,
    Address,
    UpstreamError,
    explain_self_loop,
)
from proxy.relay.channel import Channel
from proxy.relay.log_limiter import LogLimiter

PROBE_INTERVAL_S, RETRY_INTERVAL_S = 10.0, 1.0
"""Between probes while the cluster answers, and while it does not."""

UNANSWERED_AFTER_S = 1.0
"""A broker's address that has not answered for so long is in doubt. Some clients give up at the
same time as we do, so the end of `connect_timeout` would be too late to see it."""

MAX_KNOWN_BROKERS, MAX_BROKERS_BYTES = 4000, 1 << 20
"""More than any cluster has, and names. Clients are not told of others: each may cost a port."""

_IPV4_AS_IPV6 = "::ffff:"

Ends: TypeAlias = tuple[Address, Address]
"""Of a connection: where the one who opened it is, and where the other one is."""

_API_VERSIONS_VERSION = 0
_METADATA_VERSION = 1

_log = get_logger(__name__)


class BrokerConnector:
    """Connects clients, which log in for themselves, to their brokers, and probes the cluster.

    Addresses come from every response that passes, and from the probe where the proxy is logged in,
    or the cluster lets one ask without.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        self.bootstrap = bootstrap
        self.reachable: bool | None = None
        """Whether the last probe was answered; None before the first one."""
        self.refusal: str | None = None
        """Why the last probe could not log in; None when that is not what went wrong."""
        self.was_reachable = False
        """Whether any probe was answered."""
        self.silent_since_s: float | None = None
        """Since when no probe gets any answer, in the loop's time; None while brokers answer."""
        self.addresses: dict[int, Address] = {}
        self.on_learned: Callable[[int], None] = lambda _: None
        """Called with each broker whose address is another one now."""
        self.unanswered: set[int] = set()
        """Brokers whose address did not answer when it was dialled last."""
        self._dialled: dict[Ends, Address] = {}
        """The brokers that connections go to, by the ends of these."""
        self._ends: dict[Channel, Ends] = {}
        self._limited = LogLimiter(_log, clock_ms)
        self._may_ask_metadata = True

    @property
    def answers(self) -> bool:
        """Whether a broker answered the last probe, if only to refuse the login."""
        return bool(self.reachable) or self.refusal is not None

    @property
    def loop(self) -> str | None:
        """What leads to this proxy itself in the place of a broker, and how to mend it."""
        server = next(iter(self.bootstrap.loops), None)
        return None if server is None else explain_self_loop(server)

    def learn(self, node_id: int, host: str, port: int) -> None:
        """Set a broker's real address, which is beyond doubt until it does not answer."""
        self.unanswered.discard(node_id)
        is_known = node_id in self.addresses or len(self.addresses) < MAX_KNOWN_BROKERS
        if is_known and self.addresses.get(node_id) != (host, port):
            self.addresses[node_id] = (host, port)
            about = {"reason": "address", "peer": f"node {node_id}"}
            self._limited.info("broker learned", **about, node_id=node_id, host=host, port=port)
            self.on_learned(node_id)

    async def connect(self, node_id: int | None) -> Channel:
        """Connect to a broker; None, or one that is not known: any bootstrap server that answers.

        A broker whose address is in doubt gets at most UNANSWERED_AFTER_S. Raises UpstreamError.
        When the connection is over, `disconnected` is to be called.
        """
        if node_id is None or node_id not in self.addresses:
            connection = await self.bootstrap.connect(log_in=False)
        else:
            connection = await self._connect(node_id, self.addresses[node_id])
        channel = Channel(connection.sock)
        if ends := _ends_of(connection.sock):
            self._dialled[ends], self._ends[channel] = connection.broker, ends
        return channel

    def disconnected(self, channel: Channel) -> None:
        """Forget a connection, which is about to be closed."""
        if ends := self._ends.pop(channel, None):
            self._dialled.pop(ends, None)

    def refuse_loop(self, client: Channel, client_id: str | None) -> None:
        """Raise UpstreamError for a client that is this proxy itself: no broker is dialled for it.

        It is known by both ends of its connection, for a client on this host may begin where a
        connection to a broker does; or, if others are in between that pass requests on, by the
        client id of a probe.
        """
        ends = _ends_of(client.sock)
        server = None if ends is None else self._dialled.get((ends[1], ends[0]))
        if server is None and client_id is not None:
            server = self.bootstrap.probes.get(client_id)
        if server is not None:
            self.bootstrap.loops[server] += 1
            raise UpstreamError(LOOP, explain_self_loop(server))

    async def monitor(self) -> None:
        """Probe the cluster until cancelled."""
        while True:
            try:
                limit_s = 2 * self.bootstrap.connect_timeout_s
                async with asyncio.timeout(limit_s):
                    await self._probe(limit_s)
                self._probe_ended(error=None)
            except Exception as error:  # who knows what answers at that address
                self._probe_ended(error)
            finally:
                self.bootstrap.probes.clear()
            self._limited.sweep()
            await asyncio.sleep(PROBE_INTERVAL_S if self.reachable else RETRY_INTERVAL_S)

    def _probe_ended(self, error: Exception | None) -> None:
        is_refused = isinstance(error, UpstreamError) and error.reason == LOGIN_REFUSED
        refusal = str(error) if is_refused else None
        if error is None and not self.reachable:
            _log.info("cluster reachable", brokers=len(self.addresses))
        elif error is not None and (
            self.reachable is not False or (refusal and refusal != self.refusal)
        ):
            text = self.loop or str(error) or type(error).__name__
            _log.warning("cluster not reachable", error=text)
            self._may_ask_metadata = True  # what is there next may let us
        self.reachable, self.refusal = error is None, refusal
        self.was_reachable |= error is None
        if self.answers:
            self.silent_since_s = None
        elif self.silent_since_s is None:
            self.silent_since_s = asyncio.get_running_loop().time()

    async def _connect(self, node_id: int, address: Address) -> BrokerConnection:
        limit_s = self.bootstrap.connect_timeout_s
        if node_id in self.unanswered:
            limit_s = min(limit_s, UNANSWERED_AFTER_S)
        loop = asyncio.get_running_loop()
        overdue = loop.call_later(UNANSWERED_AFTER_S, self._doubt, node_id, address)
        try:
            connection = await self.bootstrap.connect((address,), limit_s=limit_s, log_in=False)
        except UpstreamError as error:
            if error.reason != LOCAL:
                self._doubt(node_id, address)
            raise
        finally:
            overdue.cancel()
        self.unanswered.discard(node_id)
        return connection

    def _doubt(self, node_id: int, address: Address) -> None:
        if self.addresses[node_id] == address:  # the cluster has named no other in the meantime
            self.unanswered.add(node_id)

    async def _probe(self, limit_s: float) -> None:
        """Ask for ApiVersions, which every broker answers, and for the brokers if it may."""
        for server in tuple(self.bootstrap.loops):
            await self._probe_loop(server)
        with closing(await self.bootstrap.connect(probes=True)) as connection:
            try:
                await connection.ask(ApiVersionsRequest[_API_VERSIONS_VERSION](), limit_s)
                if self._may_ask_metadata:
                    await self._ask_metadata(connection, limit_s)
            except BaseException:  # also out of time: it lets connect, and does not serve
                self.bootstrap.failed(connection.broker)
                raise

    async def _probe_loop(self, server: Address) -> None:
        """Ask a server again that led to this proxy itself; forget it if it does so no longer."""
        loops, limit_s = self.bootstrap.loops, UNANSWERED_AFTER_S
        seen = loops[server]
        with suppress(UpstreamError):
            made = await self.bootstrap.connect((server,), limit_s=limit_s, probes=True)
            with closing(made):
                await made.ask(ApiVersionsRequest[_API_VERSIONS_VERSION](), limit_s)
        if loops[server] == seen:
            del loops[server]
            _log.info("a server does not lead to this proxy any more", server=server)

    async def _ask_metadata(self, connection: BrokerConnection, limit_s: float) -> None:
        try:
            request = MetadataRequest[_METADATA_VERSION](topics=[])
            response = await connection.ask(request, limit_s, MAX_BROKERS_BYTES)
        except UpstreamError as error:
            if self.bootstrap.login is not None or error.reason != CONNECTION_CLOSED:
                raise
            self._may_ask_metadata = False  # it wants a login first
            return
        for broker in response.brokers[:MAX_KNOWN_BROKERS]:
            self.learn(broker.node_id, broker.host, broker.port)


def _ends_of(sock: socket.socket) -> Ends | None:
    """Return this end of a connection and the other one; None where it is lost already."""
    try:
        here, there = sock.getsockname(), sock.getpeername()
    except OSError:
        return None
    near, far = ((ip.removeprefix(_IPV4_AS_IPV6), port) for ip, port, *_ in (here, there))
    return near, far
