"""One request on its way to a broker, and what is to be done with the response to it."""

from proxy.quota.client_quotas import ThrottleTime
from proxy.quota.entities import QuotaKind
from proxy.quota.gate import InFlightFetch
from proxy.relay.interceptor import SeenRequest
from proxy.relay.session import ClientSession
from proxy.wire.apis import plan_of
from proxy.wire.frames import RequestHead

QUOTA_KINDS = {kind.value: (kind,) for kind in QuotaKind}
"""The quotas at whose gates a request waits, by the byte rate of its API."""


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
        self.expected: InFlightFetch | None = None
        """Counts the response to a Fetch of a bounded client until it comes."""
        self.seen: SeenRequest | None = None
        """What the interceptor makes of it; None when it was not shown."""
        self.charge: ThrottleTime | None = None
        """What the request's own bytes cost; later, what its response is held for."""
        self.measured = False
        """Whether the response has been charged."""
        self.throttle_ms = 0
        """What to tell the client; 0 leaves the broker's own figure."""
