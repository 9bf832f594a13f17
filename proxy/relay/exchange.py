"""One request on its way to a broker, and what is to be done with the response to it."""

from dataclasses import dataclass
from functools import lru_cache

from proxy.quota.client import Charge
from proxy.quota.entities import QuotaKind
from proxy.quota.gate import Expected
from proxy.relay.interceptor import INTERCEPTED_APIS, SeenRequest
from proxy.relay.session import ClientSession
from proxy.wire.apis import (
    FETCH,
    PRODUCE,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    Handling,
    handling,
    is_known,
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


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done with every response of one API and version; looked up once per request."""

    handling: Handling
    takes_whole: bool
    """It is taken into memory before it is sent on."""
    may_be_seen: bool
    """An interceptor may want to see it."""
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

    def has_header_tags(self, view: memoryview) -> bool:
        """Return whether the header has tagged fields, so that the body is elsewhere."""
        return self.is_flexible and view[self.body_offset - 1] != 0


@lru_cache(maxsize=1024)
def plan_of(api_key: int, version: int) -> Plan:
    """Return the plan of an API and version."""
    how = handling(api_key, version)
    is_login = api_key in LOGIN_APIS
    takes_whole = is_login or how in (Handling.REWRITE, Handling.API_VERSIONS)
    return Plan(
        handling=how,
        takes_whole=takes_whole,
        may_be_seen=api_key in INTERCEPTED_APIS and is_known(api_key, version),
        is_flexible=response_is_flexible(api_key, version),
        body_offset=response_body_offset(api_key, version),
        throttle_offset=0 if takes_whole else throttle_offset(api_key, version) or 0,
        costs_time=not (is_login or is_membership(api_key)),
        kinds=_BYTE_RATES.get(api_key, ()),
    )


class Exchange:
    """A request that was sent on and whose response has not been sent on yet."""

    __slots__ = (
        *("api_key", "charge", "correlation_id", "expected", "full_bytes", "measured", "plan"),
        *("request_bytes", "seen", "sent_ms", "session", "throttle_ms", "version", "wait_ms"),
    )

    def __init__(
        self, session: ClientSession, head: RequestHead, version: int, sent_ms: float
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
        self.seen: SeenRequest | None = None
        """What the interceptor makes of it; None when it was not shown."""
        self.charge: Charge | None = None
        """What the request's own bytes cost; later, what its response is held for."""
        self.measured = False
        """Whether the response has been charged."""
        self.throttle_ms = 0
        """What to tell the client; 0 leaves the broker's own figure."""
