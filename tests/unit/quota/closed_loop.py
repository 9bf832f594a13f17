"""Clients, a gate and a broker on virtual time, wired as the relay does it."""

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from parts.quota_world import QuotaWorld, taken

from proxy.quota.client_quotas import ClientQuotas
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.gate import FetchSizes, GateWaiter, InFlightFetch
from proxy.quota.manager import QuotaManager
from proxy.quota.meter import LEASE_MS
from proxy.quota.rules import QuotaManagerSettings, Rule
from proxy.quota.turns import TURN_BYTES

CONSUMER = QuotaKind.CONSUMER_BYTE_RATE
PRODUCER = QuotaKind.PRODUCER_BYTE_RATE
MB = 1_000_000
BROKER_MS = 2.0
WINDOW_MS = 11_000.0
MOST_BY_LANE_BYTES = 64 << 10
"""Of a response that is not held."""
HEAD_BYTES = 60
"""Of a Produce request, without records."""


def make_manager(bound: float, **settings) -> QuotaManager:
    rule = Rule(client_id="c", bounds={CONSUMER: bound, PRODUCER: bound})
    return QuotaWorld(rule, **settings).quotas


@dataclass
class ClosedLoop:
    """One client with any number of connections; `run` it, then look at what it got."""

    manager: QuotaManager
    now_ms: float = 0.0
    delivered: list[tuple[float, int]] = field(default_factory=list)
    """(time, bytes), when the client has them, or for Produce when the broker has."""
    holds: list[tuple[float, float]] = field(default_factory=list)
    """(since when, for how long) of every response, in milliseconds; 0 if it was not held."""
    latencies_ms: list[float] = field(default_factory=list)
    under_way: dict[int, float] = field(default_factory=dict)
    """Requests without answer: connection -> since when."""
    bounds: list[tuple[float, float]] = field(default_factory=list)
    """(since when, bound), of `change_bound`."""

    def __post_init__(self) -> None:
        self.client = self.manager.client(ClientIdentity("l", None, "c"))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, at_ms: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(at_ms, self.now_ms), next(self._numbers), action))

    def run(self, end_ms: float) -> None:
        while self._events and self._events[0][0] <= end_ms:
            self.now_ms, _, action = heapq.heappop(self._events)
            action()
        self.now_ms = end_ms

    def rate(self, start_ms: float, end_ms: float) -> float:
        """Bytes per second between the first and the last delivery in the time."""
        inside = sorted(each for each in self.delivered if start_ms <= each[0] <= end_ms)
        seconds = (inside[-1][0] - inside[0][0]) / 1000
        return sum(size for at_ms, size in inside if at_ms > inside[0][0]) / seconds

    def change_bound(self, bound: float) -> None:
        """Put another bound in force now, as an override does."""
        rule = Rule(client_id="c", bounds={CONSUMER: bound, PRODUCER: bound})
        burst_ms = self.manager.settings.burst_ms
        self.manager.update(QuotaManagerSettings(rules=(rule,), burst_ms=burst_ms))
        self.bounds.append((self.now_ms, bound))
        for kind in tuple(self.client.meters):  # as the relay does where responses are held
            self.client.owed_ms(kind, self.now_ms)

    def allowed(self, start_ms: float, end_ms: float) -> float:
        """Bytes that the bounds of `change_bound` allow in a time."""
        total = 0.0
        ends = [since_ms for since_ms, _ in self.bounds[1:]] + [math.inf]
        for (since_ms, bound), until_ms in zip(self.bounds, ends, strict=True):
            seconds = (min(until_ms, end_ms) - max(since_ms, start_ms)) / 1000
            total += bound * max(seconds, 0.0)
        return total

    def most_in(self, window_ms: float = WINDOW_MS) -> int:
        """The most bytes that any time of this length has seen."""
        most = total = 0
        inside: list[tuple[float, int]] = []
        for at_ms, size in sorted(self.delivered):
            inside.append((at_ms, size))
            total += size
            while inside[0][0] <= at_ms - window_ms:
                total -= inside.pop(0)[1]
            most = max(most, total)
        return most

    @property
    def longest_latency_ms(self) -> float:
        waiting = (self.now_ms - since_ms for since_ms in self.under_way.values())
        return max((*self.latencies_ms, *waiting), default=0.0)


@dataclass
class Consumer:
    """One connection that always asks for more.

    `batch_bytes` is what the broker sends at least; `think_ms` passes before the next request.
    """

    world: ClosedLoop
    number: int
    asked_bytes: int
    batch_bytes: int = 1
    think_ms: float = 0.2
    broker_ms: float = BROKER_MS
    mutes: bool = False
    ends_ms: float = float("inf")
    by_lane: bool = True
    """Whether it is sent on by the lane where that may, as a client that is known is."""
    sizes: FetchSizes = field(default_factory=FetchSizes)
    client: ClientQuotas = None  # type: ignore[assignment]
    """Whose connection it is; None: the world's client's."""
    got: list[tuple[float, float, int]] = field(default_factory=list)
    """(when asked, when it came, bytes) of each response."""

    def __post_init__(self) -> None:
        self.client = self.client or self.world.client
        self._waiter = GateWaiter(lambda at_ms: self.world.at(at_ms, self._try))
        self._waits = self._is_by_lane = False
        self._renewed_ms, self._granted = -math.inf, 0
        self._lent: InFlightFetch | None = None

    def ask(self) -> None:
        world = self.world
        if world.now_ms < self.ends_ms:
            world.under_way[self.number] = world.now_ms
            self._waits = True
            self._try()

    def _try(self) -> None:
        world, client = self.world, self.client
        if not self._waits:
            return
        size = self.sizes.last_bytes
        expected: InFlightFetch | None = None
        self._is_by_lane = self._may_pass(0)
        if self._is_by_lane:
            granted = self._granted
        elif client.admit(CONSUMER, self._waiter, size, world.now_ms, holds=not self.mutes):
            self._waiter.since_ms = None
            granted, expected = self._grant()
        else:
            return
        self._waits = False
        # Whole batches within the limit, and at least one.
        batches = max(granted // self.batch_bytes, 1)
        world.at(
            world.now_ms + self.broker_ms,
            lambda: self.answered(batches * self.batch_bytes, expected),
        )

    def _grant(self) -> tuple[int, InFlightFetch | None]:
        now_ms = self.world.now_ms
        holds, paid = not self.mutes, self._waiter.paid
        return self.client.grant(self.asked_bytes, self.sizes, now_ms, holds=holds, paid=paid)

    def _may_pass(self, size: int) -> bool:
        """Take so much from the lease, which is renewed as the lane and its owner do."""
        now_ms, client = self.world.now_ms, self.client
        lease = client.lease(CONSUMER)
        if not self.by_lane:
            return False
        if lease and now_ms < self._renewed_ms + LEASE_MS and taken(lease, size, now_ms):
            return True
        if self._lent is not None:
            self._lent.cancel()
        if not client.lends(CONSUMER, self._waiter, now_ms):
            return False
        self._renewed_ms, lease = now_ms, client.lease(CONSUMER)
        self._granted, self._lent = client.lend_fetches(
            self.asked_bytes, self.sizes, now_ms, holds=not self.mutes
        )
        return self._granted > 0 and (lease is None or taken(lease, size, now_ms))

    def answered(self, size: int, expected: InFlightFetch | None) -> None:
        world, charge, is_by_lane = self.world, None, self._is_by_lane
        is_large = self.mutes and size > MOST_BY_LANE_BYTES
        if not is_by_lane or is_large or not self._may_pass(size):
            if is_by_lane:
                _, expected = self._grant()
                if expected is not None:
                    expected.limit = self.asked_bytes
            if expected is not None:
                expected.answered(size)
            charge = self.client.charge(CONSUMER, size, world.now_ms)
        due_ms = charge.due_ms if charge is not None else world.now_ms
        if charge is not None:
            self.client.sensors.held(charge, due_ms - world.now_ms, world.now_ms)
        world.holds.append((world.now_ms, due_ms - world.now_ms))
        if self.mutes:
            self._delivered(size)
            world.at(due_ms + self.think_ms, self.ask)
        else:
            world.at(due_ms, lambda: (self._delivered(size), self.again()))

    def _delivered(self, size: int) -> None:
        world = self.world
        world.delivered.append((world.now_ms, size))
        asked_ms = world.under_way.pop(self.number)
        world.latencies_ms.append(world.now_ms - asked_ms)
        self.got.append((asked_ms, world.now_ms, size))

    def again(self) -> None:
        self.world.at(self.world.now_ms + self.think_ms, self.ask)


@dataclass
class Producer:
    """One connection that always sends more; it waits for answers, or with `reads` False never."""

    world: ClosedLoop
    size: int
    reads: bool = True
    ends_ms: float = float("inf")
    think_ms: float = 0.0
    client: ClientQuotas = None  # type: ignore[assignment]
    """Whose connection it is; None: the world's client's."""
    got: list[tuple[float, float, int]] = field(default_factory=list)
    """(when it began, when it was answered, bytes) of each request."""

    def __post_init__(self) -> None:
        self.client = self.client or self.world.client
        self._began_ms = 0.0
        self._waiter = GateWaiter(lambda at_ms: self.world.at(at_ms, self._try))
        self._waits = False

    def ask(self) -> None:
        if self.world.now_ms < self.ends_ms:
            self._waits = True
            self._began_ms = self.world.now_ms
            self._try()

    def _try(self) -> None:
        world, client = self.world, self.client
        if self._waits and client.admit(PRODUCER, self._waiter, self.size, world.now_ms):
            self._waits = False
            self._waiter.since_ms = None
            charge = client.charge(PRODUCER, self.size, world.now_ms)
            world.delivered.append((world.now_ms, self.size))
            due_ms = charge.due_ms if charge is not None and self.reads else world.now_ms
            world.holds.append((world.now_ms, due_ms - world.now_ms))
            answered_ms = max(due_ms, world.now_ms + BROKER_MS)
            self.got.append((self._began_ms, answered_ms, self.size))
            world.at(answered_ms + self.think_ms, self.ask)


@dataclass
class Announcer:
    """One connection that begins requests, and lets their bodies follow so much later."""

    world: ClosedLoop
    size: int
    later_ms: float = 0.0
    chunk_bytes: int = 65_536
    chunk_ms: float = 0.5
    finished: int = 0
    """Requests that came whole."""
    client: ClientQuotas = None  # type: ignore[assignment]
    """Whose connection it is; None: the world's client's."""
    got: list[tuple[float, float, int]] = field(default_factory=list)
    """(when it came, the same, bytes) of each part of a body."""

    def __post_init__(self) -> None:
        self.client = self.client or self.world.client
        self._waiter = GateWaiter(lambda at_ms: self.world.at(at_ms, self._try))
        self._left = 0
        self._waits = False

    def ask(self) -> None:
        self._waits = True
        self._try()

    def _try(self) -> None:
        world, client = self.world, self.client
        is_begun = self._left > 0
        announced = min(self.size, TURN_BYTES)
        if not self._waits or not client.admit(
            PRODUCER, self._waiter, announced, world.now_ms, came=0 if is_begun else HEAD_BYTES
        ):
            return
        self._waits = False
        self._waiter.since_ms = None
        if not is_begun:
            self._left = self.size
            client.charge(PRODUCER, HEAD_BYTES, world.now_ms)
            world.at(world.now_ms + self.later_ms, self.ask)
            return
        chunk = min(self._left, self.chunk_bytes)
        self._left -= chunk
        charge = client.charge(PRODUCER, chunk, world.now_ms)
        client.took(PRODUCER, chunk, self._waiter)
        world.delivered.append((world.now_ms, chunk))
        self.got.append((world.now_ms, world.now_ms, chunk))
        if self._left:
            world.at(world.now_ms + self.chunk_ms, self.ask)
            return
        self.finished += 1
        due_ms = charge.due_ms if charge is not None else world.now_ms
        world.at(max(due_ms, world.now_ms + BROKER_MS), self.ask)


def consumers(
    world: ClosedLoop, count: int, asked_bytes: int, start_ms: float = 0.0, **options
) -> None:
    """Let so many connections begin, 0.1 ms apart."""
    for number in range(count):
        consumer = Consumer(world, len(world.under_way) + number, asked_bytes, **options)
        world.at(start_ms + 0.1 * number, consumer.ask)
