"""What is known of the Kafka cluster: whether it answers, and each broker's real address."""

import asyncio
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest, MetadataResponse
from structlog import get_logger

from proxy.login import Login, LoginRefusedError
from proxy.relay.ask import ask, log_in
from proxy.relay.channel import Channel
from proxy.relay.upstream import LOCAL, LOGIN_REFUSED, Server, UpstreamError, reach, secure

PROBE_INTERVAL_S = 10.0
"""Between probes while the cluster answers."""

RETRY_INTERVAL_S = 1.0
"""Between probes while it does not."""

DOUBT_AFTER_S = 1.0
"""A broker's address that has not answered for so long is doubtful. Some clients give up at the
same time as we do, so the end of `connect_timeout` would be too late to see it."""

_API_VERSIONS_VERSION = 0
_METADATA_VERSION = 1

_log = get_logger(__name__)


@dataclass(slots=True)
class Cluster:
    """The brokers behind the proxy, for what it asks itself; see `for_clients`.

    Addresses are learned from every response that passes, and from a probe of our own where we are
    logged in, or the cluster lets one ask without.
    """

    bootstrap_servers: tuple[Server, ...]
    tls: ssl.SSLContext | None
    connect_timeout_s: float
    splice: bool = True
    login: Login | None = None
    """Every connection is logged in with it; None: with no connection is that done."""
    reachable: bool = False
    """Whether the last probe was answered."""
    refusal: str | None = None
    """Why the last probe could not log in; None when that is not what went wrong."""
    brokers: dict[int, Server] = field(default_factory=dict)
    """Real address by node id."""
    _order: list[Server] = field(default_factory=list)
    """Bootstrap servers: first who answered last, at the end who failed last."""
    _doubtful: set[int] = field(default_factory=set)
    """Brokers whose address did not answer when it was dialled last."""
    _probed: bool = False
    _may_ask_metadata: bool = True

    def __post_init__(self) -> None:
        if not self._order:
            self._order.extend(dict.fromkeys(self.bootstrap_servers))

    def for_clients(self) -> "Cluster":
        """Return the same brokers, for connections on which clients log in for themselves."""
        return replace(self, login=None)

    def learn(self, node_id: int, host: str, port: int) -> None:
        """Take in a broker's real address, which is beyond doubt until it does not answer."""
        self._doubtful.discard(node_id)
        if self.brokers.get(node_id) != (host, port):
            self.brokers[node_id] = (host, port)
            _log.info("broker learned", node_id=node_id, host=host, port=port)

    def knows(self, node_id: int) -> bool:
        """Say whether this broker's address is known."""
        return node_id in self.brokers

    async def connect(self, node_id: int | None) -> Channel:
        """Connect to a broker; None, or one that is not known: any bootstrap server that answers.

        A broker whose address is doubtful gets at most DOUBT_AFTER_S seconds; an answer, or its
        address from the cluster, ends the doubt.

        Raises UpstreamError. Where one of several does not let us in, that is the error: the others
        may only be down.
        """
        address = self.brokers.get(node_id) if node_id is not None else None
        if node_id is not None and address is not None:
            return await self._connect_broker(node_id, address)
        server, channel = await self._connect(self._order, self.connect_timeout_s)
        self._rank(server, 0)
        return channel

    async def monitor(self) -> None:
        """Probe the cluster until cancelled."""
        while True:
            try:
                async with asyncio.timeout(2 * self.connect_timeout_s):
                    await self._probe()
                self._now_reachable(error=None)
            except Exception as error:  # who knows what answers at that address
                self._now_reachable(error)
            await asyncio.sleep(PROBE_INTERVAL_S if self.reachable else RETRY_INTERVAL_S)

    def _now_reachable(self, error: Exception | None) -> None:
        is_refused = isinstance(error, UpstreamError) and error.reason == LOGIN_REFUSED
        refusal = str(error) if is_refused else None
        if error is None and not self.reachable:
            _log.info("cluster reachable", brokers=len(self.brokers))
        elif error is not None and (
            self.reachable or not self._probed or (refusal and refusal != self.refusal)
        ):
            _log.warning("cluster not reachable", error=str(error) or type(error).__name__)
            self._may_ask_metadata = True  # what is there next may let us
        self.reachable, self.refusal = error is None, refusal
        self._probed = True

    async def _connect_broker(self, node_id: int, address: Server) -> Channel:
        limit_s = self.connect_timeout_s
        if node_id in self._doubtful:
            limit_s = min(limit_s, DOUBT_AFTER_S)
        overdue = asyncio.get_running_loop().call_later(
            DOUBT_AFTER_S, self._doubt, node_id, address
        )
        try:
            _, channel = await self._connect((address,), limit_s)
        except UpstreamError as error:
            if error.reason != LOCAL:
                self._doubt(node_id, address)
            raise
        finally:
            overdue.cancel()
        self._doubtful.discard(node_id)
        return channel

    def _doubt(self, node_id: int, address: Server) -> None:
        if self.brokers[node_id] == address:  # not learned anew in the meantime
            self._doubtful.add(node_id)

    async def _connect(self, servers: Iterable[Server], limit_s: float) -> tuple[Server, Channel]:
        """Connect to the first of these that answers and, where we log in, lets us in.

        Only opening the connection is a race: more handshakes and logins than needed are a burden,
        most of all on a broker that is slow for having too many.
        """
        errors: list[UpstreamError] = []
        left: list[Server] = []
        for server in servers:
            try:
                if self.login is not None:
                    self.login.check(server)
                left.append(server)
            except LoginRefusedError as error:
                errors.append(UpstreamError(LOGIN_REFUSED, f"{server[0]}:{server[1]}: {error}"))
        while left:
            try:
                server, sock = await reach(left, limit_s)
            except UpstreamError as error:
                errors.append(error)
                break
            try:
                return server, await self._begin(server, sock, limit_s)
            except UpstreamError as error:
                errors.append(error)
                left.remove(server)
                self._rank(server, len(self._order))
        raise next((error for error in errors if error.reason == LOGIN_REFUSED), errors[-1])

    def _rank(self, server: Server, place: int) -> None:
        if server in self._order:  # not so are most brokers' addresses
            self._order.remove(server)
            self._order.insert(place, server)

    async def _begin(self, server: Server, sock: socket.socket, limit_s: float) -> Channel:
        channel = await secure(sock, server, tls=self.tls, timeout_s=limit_s, splice=self.splice)
        if self.login is not None:
            try:
                await self._log_in(self.login, channel, server)
            except BaseException:
                channel.sock.close()
                raise
        return channel

    async def _log_in(self, login: Login, channel: Channel, address: Server) -> None:
        where = f"{address[0]}:{address[1]}"
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                await log_in(channel, login, address)
        except UpstreamError as error:
            raise UpstreamError(error.reason, f"{where}: {error}") from None
        except TimeoutError:
            limit_s = self.connect_timeout_s
            raise UpstreamError("timeout", f"{where}: not logged in after {limit_s:g} s") from None
        except OSError as error:
            raise UpstreamError("closed", f"{where}: {error}") from None

    async def _probe(self) -> None:
        """Ask for ApiVersions, which every broker answers, and for the brokers if it may."""
        channel = await self.connect(None)
        server = self._order[0]
        try:
            await self._ask(channel)
        except BaseException:  # also when it is out of time; it lets connect, and does not serve
            self._rank(server, len(self._order))
            raise
        finally:
            channel.sock.close()

    async def _ask(self, channel: Channel) -> None:
        await ask(channel, ApiVersionsRequest(version=_API_VERSIONS_VERSION), 0)
        if not self._may_ask_metadata:
            return
        request = MetadataRequest(version=_METADATA_VERSION, topics=[])
        try:
            body = await ask(channel, request, 1)
        except (UpstreamError, OSError):
            if self.login is not None:
                raise
            self._may_ask_metadata = False  # it wants a login first
            return
        for broker in MetadataResponse.decode(body, version=_METADATA_VERSION).brokers:
            self.learn(broker.node_id, broker.host, broker.port)
