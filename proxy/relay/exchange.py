"""One request on its way to a broker, and what is to be done with the response to it."""

from prometheus_client import Counter

from proxy.quota.entities import ClientIdentity
from proxy.quota.manager import Charge, ClientQuotas
from proxy.relay.services import Services
from proxy.wire.apis import SASL_AUTHENTICATE, SASL_HANDSHAKE, Handling, api_name

LOGIN_APIS = frozenset({SASL_HANDSHAKE, SASL_AUTHENTICATE})
"""Never held, and read whole in both directions: they tell who the client is."""


class ClientSession:
    """One client id on one connection: its quotas and its byte counters."""

    __slots__ = ("_bytes", "_services", "identity", "quotas")

    def __init__(self, services: Services, identity: ClientIdentity) -> None:
        self.identity = identity
        self.quotas: ClientQuotas = services.quotas.client(identity)
        self._services = services
        self._bytes: dict[int, Counter] = {}
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

    def close(self) -> None:
        """Give the quotas and counters back."""
        self.quotas.close()
        self._services.client_left(self.identity)


class Exchange:
    """A request that was sent on and whose response has not been sent on yet."""

    __slots__ = (
        "api_key",
        "charge",
        "correlation_id",
        "handling",
        "measured",
        "request_bytes",
        "sent_ms",
        "session",
        "throttle_ms",
        "version",
        "wait_ms",
    )

    def __init__(
        self,
        session: ClientSession,
        *,
        api_key: int,
        version: int,
        correlation_id: int,
        handling: Handling,
        request_bytes: int,
        sent_ms: float,
    ) -> None:
        self.session = session
        self.api_key = api_key
        self.version = version
        """Of the response: where the broker answers in another one, that one."""
        self.correlation_id = correlation_id
        self.handling = handling
        self.request_bytes = request_bytes
        self.sent_ms = sent_ms
        self.wait_ms = 0
        """How long the broker may sit on the request for lack of data."""
        self.charge: Charge | None = None
        """What the request's own bytes cost."""
        self.measured = False
        """Whether the response has been charged."""
        self.throttle_ms = 0
        """What to tell the client; 0 leaves the broker's own figure."""
