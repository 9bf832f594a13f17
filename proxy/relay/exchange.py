"""One request on its way to a broker, and what is to be done with the response to it."""

from dataclasses import dataclass

from proxy.quota.client_quotas import ThrottleTime
from proxy.quota.gate import InFlightFetch
from proxy.relay.interceptor import SeenRequest
from proxy.relay.session import ClientSession
from proxy.wire.apis import ApiPlan


@dataclass(slots=True, eq=False)
class Exchange:
    """A request that was sent on and whose response has not been sent on yet."""

    session: ClientSession
    plan: ApiPlan
    api_key: int
    version: int
    """Of the response: where the broker answers in another one, that one."""
    correlation_id: int
    request_bytes: int
    sent_ms: float
    wait_ms: int = 0
    """How long the broker may sit on the request for lack of data."""
    full_bytes: int = 0
    """With a response of at least so many bytes it did not lack data."""
    expected: InFlightFetch | None = None
    """Counts the response to a Fetch of a bounded client until it comes."""
    seen: SeenRequest | None = None
    """What the interceptor makes of it; None when it was not shown."""
    charge: ThrottleTime | None = None
    """What the request's own bytes cost; later, what its response is held for."""
    measured: bool = False
    """Whether the response has been charged."""
    throttle_ms: int = 0
    """What to tell the client; 0 leaves the broker's own figure."""
