"""The brokers behind the proxy: whether they answer, and each one's real address."""

import asyncio
from contextlib import closing

from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest
from structlog import get_logger

from proxy.cluster.broker_connection import BrokerConnection
from proxy.cluster.kafka_client import Bootstrap
from proxy.cluster.upstream import CLOSED, LOCAL, LOGIN_REFUSED, Address, UpstreamError
from proxy.relay.channel import Channel

PROBE_INTERVAL_S, RETRY_INTERVAL_S = 10.0, 1.0
"""Between probes while the cluster answers, and while it does not."""

UNANSWERED_AFTER_S = 1.0
"""A broker's address that has not answered for so long is in doubt. Some clients give up at the
same time as we do, so the end of `connect_timeout` would be too late to see it."""

_API_VERSIONS_VERSION = 0
_METADATA_VERSION = 1

_log = get_logger(__name__)


class Brokers:
    """Connects clients, which log in for themselves, to their brokers, and probes the cluster.

    Addresses come from every response that passes, and from the probe where the proxy is logged in,
    or the cluster lets one ask without. `splice`: whether the kernel may move bytes of plain
    connections.
    """

    def __init__(self, bootstrap: Bootstrap, *, splice: bool = True) -> None:
        self.bootstrap = bootstrap
        self.reachable = False
        """Whether the last probe was answered."""
        self.refusal: str | None = None
        """Why the last probe could not log in; None when that is not what went wrong."""
        self.was_reachable = False
        """Whether any probe was answered."""
        self.silent_since_s: float | None = None
        """Since when no probe gets any answer, in the loop's time; None while brokers answer."""
        self.addresses: dict[int, Address] = {}
        self.unanswered: set[int] = set()
        """Brokers whose address did not answer when it was dialled last."""
        self._splice = splice
        self._probed = False
        self._may_ask_metadata = True

    @property
    def answers(self) -> bool:
        """Whether a broker answered the last probe, if only to refuse the login."""
        return self.reachable or self.refusal is not None

    def learn(self, node_id: int, host: str, port: int) -> None:
        """Set a broker's real address, which is beyond doubt until it does not answer."""
        self.unanswered.discard(node_id)
        if self.addresses.get(node_id) != (host, port):
            self.addresses[node_id] = (host, port)
            _log.info("broker learned", node_id=node_id, host=host, port=port)

    async def connect(self, node_id: int | None) -> Channel:
        """Connect to a broker; None, or one that is not known: any bootstrap server that answers.

        A broker whose address is in doubt gets at most UNANSWERED_AFTER_S. Raises UpstreamError.
        """
        if node_id is None or node_id not in self.addresses:
            connection = await self.bootstrap.connect(log_in=False)
        else:
            connection = await self._connect(node_id, self.addresses[node_id])
        return Channel(connection.sock, spliceable=self._splice)

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
            await asyncio.sleep(PROBE_INTERVAL_S if self.reachable else RETRY_INTERVAL_S)

    def _probe_ended(self, error: Exception | None) -> None:
        is_refused = isinstance(error, UpstreamError) and error.reason == LOGIN_REFUSED
        refusal = str(error) if is_refused else None
        if error is None and not self.reachable:
            _log.info("cluster reachable", brokers=len(self.addresses))
        elif error is not None and (
            self.reachable or not self._probed or (refusal and refusal != self.refusal)
        ):
            _log.warning("cluster not reachable", error=str(error) or type(error).__name__)
            self._may_ask_metadata = True  # what is there next may let us
        self.reachable, self.refusal, self._probed = error is None, refusal, True
        self.was_reachable |= self.reachable
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
        with closing(await self.bootstrap.connect()) as connection:
            try:
                await connection.ask(ApiVersionsRequest[_API_VERSIONS_VERSION](), limit_s)
                if self._may_ask_metadata:
                    await self._ask_metadata(connection, limit_s)
            except BaseException:  # also out of time: it lets connect, and does not serve
                self.bootstrap.failed(connection.broker)
                raise

    async def _ask_metadata(self, connection: BrokerConnection, limit_s: float) -> None:
        try:
            response = await connection.ask(MetadataRequest[_METADATA_VERSION](topics=[]), limit_s)
        except UpstreamError as error:
            if self.bootstrap.login is not None or error.reason != CLOSED:
                raise
            self._may_ask_metadata = False  # it wants a login first
            return
        for broker in response.brokers:
            self.learn(broker.node_id, broker.host, broker.port)
