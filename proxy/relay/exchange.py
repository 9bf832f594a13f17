"""One request on its way to a broker, and what is to be done with the response to it."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from prometheus_client import Counter

from metrics.clock import clock_ms
from proxy.quota.client import Charge, ClientQuotas
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.gate import Expected
from proxy.relay.interceptor import ClientInterceptor
from proxy.relay.services import Services
from proxy.wire.apis import (
    FETCH,
    PRODUCE,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    Handling,
    api_name,
    handling,
    is_membership,
    response_body_offset,
    response_is_flexible,
    throttle_offset,
)
from proxy.wire.frames import RequestHead

LOGIN_APIS = frozenset({SASL_HANDSHAKE, SASL_AUTHENTICATE})
"""Never held, and read whole in both directions: they tell who the client is."""


_BYTE_RATES = {
    FETCH: (QuotaKind.CONSUMER_BYTE_RATE,),
    PRODUCE: (QuotaKind.PRODUCER_BYTE_RATE,),
}

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
        self._watch: ClientInterceptor | None = None
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
    def watch(self) -> ClientInterceptor | None:
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


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done with every response of one API and version; looked up once per request."""

    handling: Handling
    takes_whole: bool
    """It is taken into memory before it is sent on."""
    is_flexible: bool
    """Its header ends with a tag section, whose one byte is 0 when it is empty."""
    body_offset: int
    """Where its body starts when that section is empty."""
    throttle_offset: int
    """Where its throttle time can be written without taking it whole; 0: nowhere."""
    costs_time: bool
    """Its service time counts for `request_percentage`."""
    kinds: tuple[QuotaKind, ...]
    """Quotas at whose gates its request waits."""


@lru_cache(maxsize=1024)
def plan_of(api_key: int, version: int) -> Plan:
    """Return the plan of an API and version."""
    how = handling(api_key, version)
    is_login = api_key in LOGIN_APIS
    costs_time = not (is_login or is_membership(api_key))
    takes_whole = is_login or how in (Handling.REWRITE, Handling.API_VERSIONS)
    return Plan(
        handling=how,
        takes_whole=takes_whole,
        is_flexible=response_is_flexible(api_key, version),
        body_offset=response_body_offset(api_key, version),
        throttle_offset=0 if takes_whole else throttle_offset(api_key, version) or 0,
        costs_time=costs_time,
        kinds=_BYTE_RATES.get(api_key, ()),
    )


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
        self.expected: Expected | None = None
        """Counts the response to a Fetch of a bounded client until it comes."""
        self.watch: ClientInterceptor | None = None
        """Who follows the client's reads, when this is one of them."""
        self.asked: Any = None
        """What it asks for; read only when it is followed."""
        self.charge: Charge | None = None
        """What the request's own bytes cost; later, what its response is held for."""
        self.measured = False
        """Whether the response has been charged."""
        self.throttle_ms = 0
        """What to tell the client; 0 leaves the broker's own figure."""
