"""One request on its way to a broker, and what is to be done with the response to it."""

from prometheus_client import Counter

from metrics.clock import clock_ms
from proxy.quota.client_quotas import ClientQuotas, ThrottleTime
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.gate import InFlightFetch
from proxy.relay.following import Asked, Watch
from proxy.relay.services import Services
from proxy.wire.apis import api_name, plan_of
from proxy.wire.frames import RequestHead

QUOTA_KINDS = {kind.value: (kind,) for kind in QuotaKind}
"""The quotas at whose gates a request waits, by the byte rate of its API."""

_NEVER_LOOKED = -1
"""Instead of a generation."""


class ClientSession:
    """The client of one connection: its quotas, its byte counters, and who follows its reads."""

    __slots__ = (
        *("_bytes", "_generation", "_node_id", "_services", "_watch", "identity"),
        *("last_fetch_bytes", "quotas"),
    )

    def __init__(
        self, services: Services, identity: ClientIdentity, node_id: int | None = None
    ) -> None:
        self.identity = identity
        self._node_id = node_id
        self._watch: Watch | None = None
        self._generation = _NEVER_LOOKED
        self.quotas: ClientQuotas = services.quotas.client(identity)
        self._services = services
        self._bytes: dict[int, Counter] = {}
        self.last_fetch_bytes: int | None = None
        """Length of the last Fetch response; None before the first, and where no quota asks."""
        services.client_came(identity)

    def count_bytes(self, api_key: int, count: int) -> None:
        """Add to bytes_total."""
        counter = self._bytes.get(api_key)
        if counter is None:
            counter = self._bytes[api_key] = self._services.instruments.bytes_total.of(
                self.identity.listener,
                self.identity.user or "",
                self.identity.client_id or "",
                api_name(api_key),
            )
        counter.inc(count)

    @property
    def watch(self) -> Watch | None:
        """Who follows the client's reads on this connection; None for most clients."""
        following = self._services.following
        if following is not None and following.generation != self._generation:
            self._generation = following.generation
            self._watch = following.watch(self.identity, self._node_id, self._watch, clock_ms())
        return self._watch

    def close(self) -> None:
        """Give the quotas and counters back."""
        self.quotas.close()
        if self._watch is not None:
            self._watch.close()
        self._services.client_left(self.identity)


class Exchange:
    """A request that was sent on and whose response has not been sent on yet."""

    __slots__ = (
        "api_key",
        "asked",
        "charge",
        "correlation_id",
        "expected",
        "full_bytes",
        "measured",
        "plan",
        "request_bytes",
        "sent_ms",
        "session",
        "throttle_ms",
        "version",
        "wait_ms",
        "watch",
    )

    def __init__(
        self,
        session: ClientSession,
        head: RequestHead,
        version: int,
        sent_ms: float,
    ) -> None:
        self.session = session
        self.api_key = head.api_key
        self.version = version
        """Of the response: where the broker answers in another one, that one."""
        self.plan = plan_of(head.api_key, version)
        self.correlation_id = head.correlation_id
        self.request_bytes = head.frame_bytes
        self.sent_ms = sent_ms
        self.wait_ms = 0
        """How long the broker may sit on the request for lack of data."""
        self.full_bytes = 0
        """With a response of at least so many bytes it did not lack data."""
        self.expected: InFlightFetch | None = None
        """Counts the response to a Fetch of a bounded client until it comes."""
        self.watch: Watch | None = None
        """Who follows the client's reads, when this is one of them."""
        self.asked: Asked | None = None
        """What it asks for; read only when it is followed."""
        self.charge: ThrottleTime | None = None
        """What the request's own bytes cost; later, what its response is held for."""
        self.measured = False
        """Whether the response has been charged."""
        self.throttle_ms = 0
        """What to tell the client; 0 leaves the broker's own figure."""
