"""What is known of the Kafka cluster: whether it answers, and each broker's real address."""

import asyncio
import ssl
from dataclasses import dataclass, field

from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest, MetadataResponse
from structlog import get_logger

from proxy.relay.ask import ask
from proxy.relay.channel import Channel
from proxy.relay.upstream import UpstreamError, connect

PROBE_INTERVAL_S = 10.0
"""Between probes while the cluster answers."""

RETRY_INTERVAL_S = 1.0
"""Between probes while it does not."""

_API_VERSIONS_VERSION = 0
_METADATA_VERSION = 1

_log = get_logger(__name__)


@dataclass(slots=True)
class Cluster:
    """The brokers behind the proxy.

    Addresses are learned from every response that passes, and from a probe of our own where the
    cluster lets one ask without logging in.
    """

    bootstrap_servers: tuple[tuple[str, int], ...]
    tls: ssl.SSLContext | None
    connect_timeout_s: float
    splice: bool = True
    reachable: bool = False
    """Whether the last probe was answered."""
    brokers: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Real address by node id."""
    _next_bootstrap: int = 0
    _probed: bool = False
    _may_ask_metadata: bool = True

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

        Raises UpstreamError.
        """
        address = self.brokers.get(node_id) if node_id is not None else None
        if address is not None:
            return await self._connect(address)
        servers = len(self.bootstrap_servers)
        for attempt in range(servers):
            server = self.bootstrap_servers[self._next_bootstrap % servers]
            try:
                return await self._connect(server)
            except UpstreamError:
                self._next_bootstrap += 1
                if attempt == servers - 1:
                    raise
        raise AssertionError("a cluster has at least one bootstrap server")

    async def monitor(self) -> None:
        """Probe the cluster until cancelled."""
        while True:
            try:
                async with asyncio.timeout(2 * self.connect_timeout_s):
                    await self._probe()
                self._now_reachable(error=None)
            except Exception as error:  # who knows what answers at that address
                self._now_reachable(error=str(error) or type(error).__name__)
            await asyncio.sleep(PROBE_INTERVAL_S if self.reachable else RETRY_INTERVAL_S)

    def _now_reachable(self, error: str | None) -> None:
        if error is None and not self.reachable:
            _log.info("cluster reachable", brokers=len(self.brokers))
        elif error is not None and (self.reachable or not self._probed):
            _log.warning("cluster not reachable", error=error)
            self._may_ask_metadata = True  # what is there next may let us
        self.reachable = error is None
        self._probed = True

    async def _connect(self, address: tuple[str, int]) -> Channel:
        host, port = address
        return await connect(
            host, port, tls=self.tls, timeout_s=self.connect_timeout_s, splice=self.splice
        )

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
                self._may_ask_metadata = False  # it wants a login first
                return
            for broker in MetadataResponse.decode(body, version=_METADATA_VERSION).brokers:
                self.learn(broker.node_id, broker.host, broker.port)
        finally:
            channel.sock.close()
