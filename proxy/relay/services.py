"""What every connection needs from the rest of the program, in one place."""

import asyncio
from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import get_args

from prometheus_client import Counter

from metrics.clock import MS_PER_SECOND, clock_ms
from metrics.instruments import OTHER, Instruments
from metrics.sensor import DEFAULT_EXPIRY_MS
from proxy.quota.client_quotas import ThrottleTime
from proxy.quota.delay_queue import DelayQueue, Reaper
from proxy.quota.entities import ClientIdentity
from proxy.quota.manager import QuotaManager
from proxy.relay.following import Following
from proxy.relay.pipes import PipePool
from proxy.wire.apis import ApiFamily, api_name, api_of, is_known
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

MAX_GONE_CLIENTS = 10_000
"""Clients that left whose byte counters are kept; of more the first to leave are dropped."""


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


class Reapers:
    """The three delay queues, one per API family, with a timer of the event loop each."""

    FAMILIES = ("fetch", "produce", "request")

    def __init__(self, loop: asyncio.AbstractEventLoop, instruments: Instruments) -> None:
        self._loop = loop
        lag = instruments.delay_queue_lag_seconds
        self.fetch, self.produce, self.request = (
            Reaper(DelayQueue(family), clock_ms, self._call_at, lag.observe)
            for family in self.FAMILIES
        )
        self._by_family: dict[ApiFamily, Reaper] = {
            "fetch": self.fetch,
            "produce": self.produce,
            "request": self.request,
        }
        for reaper in self.all:
            gauge = instruments.delay_queue_size.labels(reaper.queue.api)
            gauge.set_function(reaper.queue.__len__)

    @property
    def all(self) -> tuple[Reaper, Reaper, Reaper]:
        """Every reaper."""
        return self.fetch, self.produce, self.request

    def for_api(self, api_key: int) -> Reaper:
        """Return the reaper of this API's family."""
        return self._by_family[api_of(api_key).family]

    def release_all(self) -> None:
        """Let everything go now."""
        for reaper in self.all:
            reaper.release_all()

    def close(self) -> None:
        """Stop the timers."""
        for reaper in self.all:
            reaper.close()

    def _call_at(self, due_ms: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        # The loop's own clock may stand for a whole round; a delay does not depend on it.
        delay = max(due_ms - clock_ms(), 0.0) / MS_PER_SECOND
        return self._loop.call_later(delay, callback)


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
    splice: bool = True
    passes_unknown_apis: bool = False
    """APIs that no table knows are offered and passed on; else they are hidden and refused."""
    following: Following | None = None
    """Follows what the clients of known queries read."""
    _requests: dict[tuple[int, int], Counter] = field(default_factory=dict)
    _users: dict[ClientIdentity, int] = field(default_factory=dict)
    # In the order of their leaving. Not a dict, which is slow to find its first key once many
    # before that were deleted.
    _gone_ms: OrderedDict[ClientIdentity, float] = field(default_factory=OrderedDict)
    # How many of both have a client id.
    _client_ids: Tally[str | None] = field(default_factory=Tally)

    def __post_init__(self) -> None:
        # From the start at 0: Prometheus sees no increase in a series that begins with 1.
        for reason in REJECTIONS:
            self.instruments.connections_rejected_total.labels(reason)
        for reason in UPSTREAM_ERRORS:
            self.instruments.upstream_errors_total.labels(reason)

    def knows_client(self, client_id: str) -> bool:
        """Say whether a client with this id is connected, or was within the hour."""
        return client_id in self._client_ids

    def client_came(self, identity: ClientIdentity) -> None:
        """Note that a connection uses this client's byte counters."""
        users = self._users.get(identity, 0)
        self._users[identity] = users + 1
        if not users and self._gone_ms.pop(identity, None) is None:
            self._client_ids[identity.client_id] += 1

    def client_left(self, identity: ClientIdentity) -> None:
        """Note that a connection does so no longer."""
        self._users[identity] -= 1
        if not self._users[identity]:
            del self._users[identity]
            self._gone_ms[identity] = clock_ms()
            if len(self._gone_ms) > MAX_GONE_CLIENTS:
                self._forget_client(next(iter(self._gone_ms)))

    def forgetting(self, now_ms: float) -> Iterator[ClientIdentity]:
        """Drop the byte counters of clients that left an hour ago, which makes room for others.

        Yields each when that is done. Other calls may come between two steps.
        """
        while self._gone_ms:
            identity, gone_ms = next(iter(self._gone_ms.items()))
            if now_ms - gone_ms < DEFAULT_EXPIRY_MS:
                return
            self._forget_client(identity)
            yield identity

    def _forget_client(self, identity: ClientIdentity) -> None:
        del self._gone_ms[identity]
        self._client_ids[identity.client_id] -= 1
        if not self._client_ids[identity.client_id]:
            del self._client_ids[identity.client_id]
        self.instruments.bytes_total.forget(
            listener=identity.listener,
            user=identity.user or "",
            client_id=identity.client_id or "",
        )

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
