"""What every connection needs from the rest of the program, in one place."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import get_args

from structlog import get_logger

from metrics import CounterChild
from metrics.clock import MS_PER_SECOND, clock_ms
from metrics.exposition import OTHER
from metrics.instruments import Instruments
from proxy.progress.topics import TopicNames
from proxy.quota import fields
from proxy.quota.connection_quotas import TOO_MANY, ConnectionQuotas
from proxy.quota.delay_queue import DelayedResponse, DelayQueue, Release
from proxy.quota.manager import QuotaManager
from proxy.quota.meter import LEASE_MS
from proxy.quota.meters import ThrottleDecision
from proxy.relay.abandoned import AbandonedRequests
from proxy.relay.clients import ClientRegistry, ClientUsage, quota_direction
from proxy.relay.intercept_queue import InterceptQueue
from proxy.relay.interceptor import Interceptor
from proxy.relay.log_limiter import LogLimiter, OutageLog
from proxy.relay.memory_pool import MemoryPool
from proxy.relay.paced_steps import LoginCpuLimit, PacedStepScheduler
from proxy.relay.pump import MAX_PIPES, PipePool
from proxy.relay.resets import ResetWatcher
from proxy.relay.steering import Steering
from proxy.relay.timing import ApiTimes
from proxy.wire.apis import ApiFamily, api_name, api_of, is_known
from proxy.wire.frames import FrameFault

REJECTIONS = (
    *get_args(FrameFault),
    *("too_many_connections", "too_many_connections_per_ip", "evicted", "out_of_files"),
    *("tls_handshake", "unsupported_sasl", "unsupported_version", "internal_error"),
    *(TOO_MANY, "connection_rate"),
    *("no_request", "slow_frame", "truncated_frame", "client_not_reading"),
)
"""Every reason of `connections_rejected_total`; explained in docs/limits.md."""

UPSTREAM_ERRORS = (
    *("dns", "refused", "tls", "local", "timeout", "closed", "bad_response", "loop"),
    *("login_refused", "quotas_refused"),
)
"""Every reason of `upstream_errors_total`; explained in docs/limits.md."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(fields.SettingsBase):
    """What one proxy takes on. docs/limits.md says what happens at each."""

    max_connections: fields.Count = 10_000
    max_connections_per_ip: fields.Count = 1_000
    max_request_bytes: fields.FrameSize = 100 * 2**20
    max_in_flight_requests: fields.Count = 64
    idle_timeout_s: fields.Duration = 600.0
    connect_timeout_s: fields.Duration = 10.0
    drain_timeout_s: fields.DurationOrZero = 10.0
    """0: connections are closed at once."""
    max_client_entities: fields.Count = 10_000


class Reapers:
    """A delay queue for each family of APIs, each with a timer of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, instruments: Instruments) -> None:
        self._loop = loop
        lag = instruments.delay_queue_lag_seconds
        self._by_family: dict[ApiFamily, DelayQueue] = {
            family: DelayQueue(family, clock_ms, self._call_at, lag.observe)
            for family in get_args(ApiFamily)
        }
        self.all = self._by_family.values()
        for reaper in self.all:
            instruments.delay_queue_size.labels(reaper.api).set_function(reaper.__len__)

    def add(self, api_key: int, due_ms: float, release: Release) -> DelayedResponse:
        """Hold something of an API until then, as `DelayQueue.add`."""
        return self._by_family[api_of(api_key).family].add(due_ms, release)

    def release_all(self) -> None:
        """Release everything now."""
        for reaper in self.all:
            reaper.release_all()

    def _call_at(self, due_ms: float, callback: Callable[[], None]) -> Callable[[], None]:
        # The loop's own clock may stand for a whole round; a delay does not depend on it.
        delay_s = max(due_ms - clock_ms(), 0.0) / MS_PER_SECOND
        return self._loop.call_later(delay_s, callback).cancel


@dataclass(slots=True)
class Services:
    """Shared by all connections of one proxy."""

    loop: asyncio.AbstractEventLoop
    limits: Limits
    holds: bool
    """Whether responses are held to slow a client down; else it is answered at once, told to wait,
    and not read from for that time (KIP-219)."""
    quotas: QuotaManager
    reapers: Reapers
    instruments: Instruments
    clients: ClientRegistry
    interceptor: Interceptor
    unshown: InterceptQueue
    """What has passed, and the interceptor is to see."""
    steering: Steering | None = None
    """None: all clients are this process's own."""
    lane: bool = True
    """Whether what is plain is sent on by the lane, where that was compiled."""
    passes_unknown_apis: bool = False
    """APIs that no table knows are offered and passed on; else they are hidden and refused."""
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    """Of connections, in the order in which they come."""
    topic_names: TopicNames = field(default_factory=TopicNames)
    """Of those that clients name by their ids."""
    connection_quotas: ConnectionQuotas = field(init=False)
    paced_steps: PacedStepScheduler = field(init=False)
    handshakes: PacedStepScheduler = field(init=False)
    """Has those of TLS: anybody may ask for thousands, for which no other step is to wait."""
    kept_bytes: MemoryPool = field(init=False)
    outages: OutageLog = field(default_factory=lambda: OutageLog(_log.warning))
    log: LogLimiter = field(default_factory=lambda: LogLimiter(_log, clock_ms))
    """For all that a client can cause."""
    login_pace: LoginCpuLimit = field(default_factory=LoginCpuLimit)
    max_pipes: int = MAX_PIPES
    pipes: PipePool = field(init=False)
    resets: ResetWatcher = field(init=False)
    abandoned: AbandonedRequests = field(init=False)
    times: dict[str, ApiTimes] = field(default_factory=dict)
    """The histograms of the APIs that were seen, by their names."""
    is_ending: bool = False
    """Whether all clients are drained, and come to another process then."""
    _awaits_leases: bool = False

    def __post_init__(self) -> None:
        self.connection_quotas = ConnectionQuotas(self.quotas)
        self.paced_steps, self.handshakes = [PacedStepScheduler(self.loop) for _ in range(2)]
        self.kept_bytes = MemoryPool(self.loop, partial(self.log.warning, reason="no_room"))
        self.instruments.kept_bytes.set_function(lambda: self.kept_bytes.total)
        self.instruments.kept_bytes_waiting.set_function(lambda: self.kept_bytes.waiting)
        self.resets = ResetWatcher(self.loop)
        self.abandoned = AbandonedRequests(self.loop)
        self.quotas.on_lent = self._await_leases
        no_pipe = partial(self.log.warning, "no pipe for splice, copying instead", reason="no_pipe")
        self.pipes = PipePool(self.max_pipes, lambda error: no_pipe(error=str(error)))
        # From the start at 0: Prometheus sees no increase in a series that begins with 1.
        for reason in REJECTIONS:
            self.instruments.connections_rejected_total.labels(reason)
        for reason in UPSTREAM_ERRORS:
            self.instruments.upstream_errors_total.labels(reason)

    def _await_leases(self) -> None:
        if not self._awaits_leases:
            self._awaits_leases = True
            self.loop.call_later(LEASE_MS / MS_PER_SECOND, self._take_leases_back)

    def _take_leases_back(self) -> None:
        self._awaits_leases = False
        if self.quotas.take_back(clock_ms()):
            self._await_leases()

    def sweep(self) -> None:
        """Log the sums that are due, and forget what is over; to be called every second or so."""
        now_ms = clock_ms()
        self.outages.sweep(now_ms)
        self.log.sweep()
        self.login_pace.sweep(now_ms)

    def request_counter(self, api_key: int, version: int) -> CounterChild:
        """Return the child of requests_total; versions that no schema knows share a label."""
        label = str(version) if is_known(api_key, version) else OTHER
        return self.instruments.requests_total.of(api_name(api_key), label)

    def times_of(self, api_key: int) -> ApiTimes:
        """Return the histograms of an API; keep them on hot paths."""
        name = api_name(api_key)
        if name not in self.times:
            self.times[name] = ApiTimes(self.instruments, name)
        return self.times[name]

    def count_throttled(
        self, charge: ThrottleDecision, hold_ms: float, usage: ClientUsage | None
    ) -> None:
        """Count a response that is held for so long, of a client with this usage."""
        if usage is not None:
            usage.held_ms[quota_direction(charge.meter.kind)] += hold_ms
        self.instruments.throttle_seconds.labels(charge.meter.kind).observe(hold_ms / MS_PER_SECOND)
        self.quotas.held(charge, hold_ms, clock_ms())

    def count_rejected(
        self, reason: str, *, peer: str | None = None, fault: str | None = None, **about: object
    ) -> None:
        """Count and log a client that is turned away; `reason` is one of REJECTIONS.

        `fault`: the event to log where it is lost to one of ours or of the system.
        """
        self.instruments.connections_rejected_total.labels(reason).inc()
        log = self.log.warning if fault is None else self.log.error
        log(fault or "client rejected", reason=reason, peer=peer, **about)

    def count_upstream_error(
        self,
        reason: str,
        node_id: int | None,
        event: str = "upstream failed",
        **about: object,
    ) -> None:
        """Count and log a broker that failed; `reason` is one of UPSTREAM_ERRORS.

        `node_id` is None for any bootstrap server.
        """
        self.instruments.upstream_errors_total.labels(reason).inc()
        self.outages.failed(node_id, reason, event, about, clock_ms())
