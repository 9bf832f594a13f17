"""A request on its way to the broker and back, and what it has in common with others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from metrics import CounterChild
from proxy.quota.entities import QuotaKind
from proxy.quota.gate import InFlightFetch
from proxy.quota.meter import ByteLease
from proxy.quota.meters import ThrottleDecision
from proxy.relay.clients import RequestSampler
from proxy.relay.interceptor import INTERCEPTED_APIS, InterceptedRequest
from proxy.relay.session import ClientSession
from proxy.relay.timing import NOT_TIMED, ApiTimes, ExchangeTimes
from proxy.relay.topic_traffic import TopicChargeObserver
from proxy.wire.apis import ApiPlan
from proxy.wire.fetch import TopicKey
from proxy.wire.frames import RequestHead

NO_ACKS = 0  # of a Produce request that gets no response


@dataclass(slots=True)
class RequestKind:
    """What a connection's requests have in common that begin with the same bytes."""

    session: ClientSession
    plan: ApiPlan
    api_key: int
    version: int
    """In which the broker is asked; see `forwarded_api_version`."""
    first: RequestHead
    """The header of the first one, which has the version that the client asked for."""
    start: bytes
    """The bytes behind the correlation id by which the kind is known."""
    end: int
    """Where they end in the frame."""
    acks: int | None
    """That a Produce request asks for; None: it is another one."""
    count: CounterChild
    relayed: CounterChild
    """Of the client's bytes, those of its requests and responses of this API."""
    times: ApiTimes
    bounded_by: QuotaKind | None
    """At whose gate it waits."""
    plain_start: bytes | None
    """As `start`, of those that only quotas and an interceptor may keep from being sent on at once,
    None for others: of a Fetch up to its limits, once they are known."""
    max_bytes: int | None
    """The limit that the client sets such a Fetch, None before it is known; 0 for another request.
    """
    lease: ByteLease | None = None
    """What the lane's bytes are taken from; None: no rule bounds them."""
    is_in_lane: bool = False
    is_shown: bool = False
    """Whether the interceptor is shown what the lane sends on."""
    run: list[Any] = field(default_factory=list)
    """The parts of the FetchRunShape of those that the lane sent on last; void: of none so far."""
    turn: RequestSampler | None = None
    """Draws which are walked for their topics; None: none are."""
    lent: InFlightFetch | None = None
    """Counts the Fetches that the lane sends on."""
    until_taught: int = 0
    """So many requests go by before the lane is taught it again, after it was in vain."""

    def is_wanted(self, now_ms: float) -> bool:
        """Return whether an interceptor asks for one that comes now."""
        if self.acks == NO_ACKS or self.api_key not in INTERCEPTED_APIS:
            return False
        return self.session.interceptor.wants(self.api_key, now_ms)


@dataclass(eq=False)
class Exchange:
    """A request that was sent on and whose response has not been sent on yet.

    Without slots: what few requests set stays with the class.
    """

    kind: RequestKind
    correlation_id: int
    request_bytes: int
    """What is counted with its response: all of it, but for what follows the head of a Produce."""
    sent_ms: float
    """When it was read, or the last of its body if that came later."""
    wait_ms: int = field(default=0, init=False)
    """How long the broker may sit on the request for lack of data."""
    expected: InFlightFetch | None = field(default=None, init=False)
    """Counts the response to a Fetch of a bounded client until it comes."""
    topics: TopicChargeObserver | None = field(default=None, init=False)
    """Walks the response to a Fetch, where rules name topics."""
    topic_sizes: Mapping[TopicKey, int] | None = field(default=None, init=False)
    """What is read of a Produce request that rules with topics are charged for."""
    has_more_topics: bool = field(default=False, init=False)
    """Whether it has more of them than `topic_sizes`, as the request was not read as a whole."""
    topic_charge: ThrottleDecision | None = field(default=None, init=False)
    """What that has cost."""
    seen: InterceptedRequest | None = field(default=None, init=False)
    """What the interceptor makes of it; None when it was not shown."""
    charge: ThrottleDecision | None = field(default=None, init=False)
    """What the request's own bytes cost; later, what its response is held for."""
    measured: bool = field(default=False, init=False)
    """Whether the response has been charged."""
    throttle_ms: int = field(default=0, init=False)
    """What to tell the client; 0 leaves the broker's own figure."""
    is_wait_doubtful: bool = field(default=False, init=False)
    """Whether its time counts unless the broker has waited for data."""
    weight: int = field(default=0, init=False)
    """How many requests it stands for in the samples of topics; 0: it is in none."""
    gated_ms: float = field(default=0.0, init=False)
    """How long it waited at a quota's gate."""
    timed: ExchangeTimes = field(default=NOT_TIMED, init=False)
    """Of one in some requests."""

    @property
    def is_looked_into(self) -> bool:
        """Whether a Fetch response is walked whatever an interceptor wants."""
        return self.is_wait_doubtful or self.topics is not None or self.weight > 0

    def head(self, frame_bytes: int) -> RequestHead:
        """Return the request's header."""
        kind = self.kind
        return kind.first._replace(
            frame_bytes=frame_bytes, api_version=kind.version, correlation_id=self.correlation_id
        )
