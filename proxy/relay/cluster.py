"""What is known of the Kafka cluster: whether it answers, and each broker's real address."""

import asyncio
import ssl
from dataclasses import dataclass, field, replace

from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest, MetadataResponse
from structlog import get_logger

from proxy.login import Login, LoginRefusedError
from proxy.relay.ask import ask, log_in
from proxy.relay.channel import Channel
from proxy.relay.upstream import LOGIN_REFUSED, UpstreamError, connect

PROBE_INTERVAL_S = 10.0
"""Between probes while the cluster answers."""

RETRY_INTERVAL_S = 1.0
"""Between probes while it does not."""

_API_VERSIONS_VERSION = 0
_METADATA_VERSION = 1

_log = get_logger(__name__)


@dataclass(slots=True)
class Cluster:
    """The brokers behind the proxy, for what it asks itself; see `for_clients`.

    Addresses are learned from every response that passes, and from a probe of our own where we are
    logged in, or the cluster lets one ask without.
    """

    bootstrap_servers: tuple[tuple[str, int], ...]
    tls: ssl.SSLContext | None
    connect_timeout_s: float
    splice: bool = True
    login: Login | None = None
    """Every connection is logged in with it; None: with no connection is that done."""
    reachable: bool = False
    """Whether the last probe was answered."""
    refusal: str | None = None
    """Why the last probe could not log in; None when that is not what went wrong."""
    brokers: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Real address by node id."""
    _next_bootstrap: int = 0
    _probed: bool = False
    _may_ask_metadata: bool = True

    def for_clients(self) -> "Cluster":
        """Return the same brokers, for connections on which clients log in for themselves."""
        return replace(self, login=None)

    def learn(self, node_id: int, host: str, port: int) -> None:
        """Take in a broker's real address."""
        if self.brokers.get(node_id) != (host, port):
            self.brokers[node_id] = (host, port)
            _log.info("broker learned", node_id=node_id, host=host, port=port)

    def knows(self, node_id: int) -> bool:
        """Say whether this broker's address is known."""
        return node_id in self.brokers

    async def connect(self, node_id: int | None) -> Channel:
        """Connect to a broker; None, or one that is not known: any bootstrap server that answers.

        Raises UpstreamError. Where one of several does not let us in, that is the error: the others
        may only be down.
        """
        address = self.brokers.get(node_id) if node_id is not None else None
        if address is not None:
            return await self._connect(address)
        errors: list[UpstreamError] = []
        for _ in self.bootstrap_servers:
            server = self.bootstrap_servers[self._next_bootstrap % len(self.bootstrap_servers)]
            try:
                return await self._connect(server)
            except UpstreamError as error:
                self._next_bootstrap += 1
                errors.append(error)
        raise next((error for error in errors if error.reason == LOGIN_REFUSED), errors[-1])

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

    async def _connect(self, address: tuple[str, int]) -> Channel:
        host, port = address
        if self.login is not None:
            try:
                self.login.check(address)
            except LoginRefusedError as error:
                raise UpstreamError(LOGIN_REFUSED, f"{host}:{port}: {error}") from None
        channel = await connect(
            host, port, tls=self.tls, timeout_s=self.connect_timeout_s, splice=self.splice
        )
        if self.login is not None:
            try:
                await self._log_in(self.login, channel, address)
            except BaseException:
                channel.sock.close()
                raise
        return channel

    async def _log_in(self, login: Login, channel: Channel, address: tuple[str, int]) -> None:
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
        try:
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
        finally:
            channel.sock.close()
