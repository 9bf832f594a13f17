"""What every connection needs from the rest of the program, in one place."""

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import get_args

from prometheus_client import Counter
from structlog import get_logger

from metrics.clock import MS_PER_SECOND, clock_ms
from metrics.instruments import OTHER, Instruments
from proxy.quota.client_quotas import ThrottleTime
from proxy.quota.manager import QuotaManager
from proxy.relay.clients import ClientRegistry
from proxy.relay.interceptor import Interceptor
from proxy.relay.pipes import PipePool
from proxy.relay.reapers import Reapers
from proxy.wire.apis import api_name, is_known
from proxy.wire.malformed import FrameFault

REJECTIONS = (
    *get_args(FrameFault),
    "client_not_reading",
    "internal_error",
    "no_request",
    "out_of_files",
    "slow_frame",
    "tls_handshake",
    "too_many_connections",
    "too_many_connections_per_ip",
    "truncated_frame",
    "unsupported_sasl",
    "unsupported_version",
)
"""Every reason of `connections_rejected_total`; explained in docs/limits.md."""

UPSTREAM_ERRORS = (
    "bad_response",
    "closed",
    "dns",
    "local",
    "login_refused",
    "quotas_refused",
    "refused",
    "timeout",
    "tls",
)
"""Every reason of `upstream_errors_total`; explained in docs/limits.md."""

_log = get_logger(__name__)


class ThrottleMode(Enum):
    """How a client is slowed down."""

    DELAY = "delay"
    """Its response is held."""

    MUTE = "mute"
    """It is answered at once, told to wait, and not read from for that time (KIP-219)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the relay; durations in seconds. docs/limits.md says what happens at each."""

    max_connections: int = 10_000
    max_connections_per_ip: int = 1_000
    max_request_bytes: int = 100 * 1024 * 1024
    max_in_flight_requests: int = 64
    idle_timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    drain_timeout_s: float = 10.0


@dataclass(slots=True)
class Services:
    """Shared by all connections of one proxy."""

    loop: asyncio.AbstractEventLoop
    limits: Limits
    mode: ThrottleMode
    quotas: QuotaManager
    reapers: Reapers
    instruments: Instruments
    pipes: PipePool
    clients: ClientRegistry
    interceptor: Interceptor | None = None
    splice: bool = True
    passes_unknown_apis: bool = False
    """APIs that no table knows are offered and passed on; else they are hidden and refused."""
    _requests: dict[tuple[int, int], Counter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # From the start at 0: Prometheus sees no increase in a series that begins with 1.
        for reason in REJECTIONS:
            self.instruments.connections_rejected_total.labels(reason)
        for reason in UPSTREAM_ERRORS:
            self.instruments.upstream_errors_total.labels(reason)

    def count_request(self, api_key: int, version: int) -> None:
        """Count a request; versions that no schema knows share a label."""
        counter = self._requests.get((api_key, version))
        if counter is None:
            label = str(version) if is_known(api_key, version) else OTHER
            counter = self.instruments.requests_total.of(api_name(api_key), label)
            if is_known(api_key, version):
                self._requests[api_key, version] = counter
        counter.inc()

    def count_throttled(self, charge: ThrottleTime, hold_s: float) -> None:
        """Count a response that is held for `hold_s` seconds."""
        self.instruments.throttle_seconds.labels(charge.kind).observe(hold_s)
        self.instruments.throttled_responses_total.of(charge.entity, charge.kind).inc()
        self.quotas.held(charge, hold_s * MS_PER_SECOND, clock_ms())

    def count_rejected(self, reason: str, **about: object) -> None:
        """Count and log a client that is turned away; `reason` is one of REJECTIONS."""
        self.instruments.connections_rejected_total.labels(reason).inc()
        _log.warning("client rejected", reason=reason, **about)

    def count_upstream_error(
        self, reason: str, event: str = "upstream failed", **about: object
    ) -> None:
        """Count and log a broker that failed; `reason` is one of UPSTREAM_ERRORS."""
        self.instruments.upstream_errors_total.labels(reason).inc()
        _log.warning(event, reason=reason, **about)
