"""Meters clients: reads the counters that there are, and makes a record of each for an interval.

Nothing is counted for it but what `relay.clients` records. What a counter has counted is taken
once, when it is read: the sum over all records is what the counters say, to the byte. A client's
bytes are divided by topic exactly where all was walked, else in the sampled proportions; whatever
was walked, the parts add up to the bytes.
"""

import asyncio
import hmac
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import time

from structlog import get_logger

from metrics import BoundedLabels, CounterChild
from metrics.clock import MS_PER_SECOND, clock_ms
from metrics.exposition import OTHER
from proxy.quota.entities import ClientIdentity
from proxy.quota.rules import RuleTable
from proxy.quota.shares import apportion_by_weight
from proxy.relay.clients import ClientUsage, Direction, TopicByteTally
from proxy.slices import TimeSlicer
from proxy.usage.usage_record import KIND_OF, UsageRecord, rate_bucket_of
from proxy.usage.usage_topic import UsageWriter
from proxy.wire.apis import FETCH, PRODUCE, api_name

RATE_INTERVAL_MS = 10_000.0
"""Over so long a rate is taken: as long as Kafka's windows look back on."""

MAX_OFF_MS = 1000.0
"""An interval ends when it should by the clock of the day, unless that was set meanwhile."""

LOOKED_AT_ONCE = 100  # counters in one step; some 50 microseconds

READ_API, WRITE_API = api_name(FETCH), api_name(PRODUCE)
"""Whose bytes make a rate, and are of topics."""

UsageLabels = tuple[str, ...]
"""Listener, user, client id and API of a counter of bytes; of a client those before the API."""


_log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class TopicShares:
    """What was walked of a client in one direction and is not written yet."""

    sizes: Counter[str | None] = field(default_factory=Counter)
    total_bytes: int = 0
    is_sampled: bool = False
    _last: dict[str | None, int] = field(default_factory=dict)
    """The proportions of the last time that there were any: they stand for what had none."""

    def take(self, sampler: TopicByteTally) -> None:
        """Take from a sampler what it has."""
        self.sizes.update(sampler.sizes)
        self.total_bytes += sampler.total_bytes
        self.is_sampled |= sampler.is_sampled
        sampler.clear()

    def divide(self, count: int) -> tuple[dict[str | None, int], bool]:
        """Divide so many bytes by topic, None for no topic; say whether that is an estimate.

        Where all was walked, what is more than `count` stays for the next time: its head was not
        counted yet.
        """
        walked = sum(self.sizes.values())
        if not self.total_bytes:
            if count and self._last:
                return apportion_by_weight(count, self._last), True
            return {None: count}, False
        sizes, is_sampled = self.sizes, self.is_sampled
        self._last = {None: max(self.total_bytes - walked, 0), **sizes}
        self.sizes, self.total_bytes, self.is_sampled = Counter(), 0, False
        if is_sampled:
            return apportion_by_weight(count, self._last), True
        if walked <= count:
            return {None: count - walked, **sizes}, False
        parts = {None: 0, **apportion_by_weight(count, sizes)}
        self.sizes.update({topic: size - parts[topic] for topic, size in sizes.items()})
        self.total_bytes = sum(self.sizes.values())
        return parts, False


@dataclass(slots=True)
class DirectionUsage:
    """What a client has done in one direction since its last record."""

    bytes: int = 0
    topic_bytes: int = 0
    """Those of Fetch or Produce."""
    rated_bytes: int = 0
    """Those of them since the last rate."""
    requests: int = 0
    connections: int = 0
    held_ms: float = 0.0
    would_be_s: float = 0.0
    rates: Counter[int] = field(default_factory=Counter)
    peak: float = 0.0
    shares: TopicShares = field(default_factory=TopicShares)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to write."""
        counts = self.bytes, self.requests, self.connections, self.held_ms, self.would_be_s
        return not (any(counts) or self.rates)


@dataclass(slots=True, eq=False)
class UsageMeter:
    """All clients of a process, metered from now on."""

    _bytes_total: BoundedLabels[CounterChild]
    _usage: Mapping[ClientIdentity, ClientUsage]
    _table: Callable[[], RuleTable]
    hash_key: bytes | None = None
    """Names are hashed with it, None: they are not. May be replaced at any time."""
    showing: Callable[[], Iterable[None]] = tuple
    """Walks what waits of followed queries, in steps."""
    _seen: dict[UsageLabels, tuple[CounterChild, float, float]] = field(default_factory=dict)
    """Each counter, with the bytes and requests that were taken of it."""
    _clients: dict[UsageLabels, dict[Direction, DirectionUsage]] = field(default_factory=dict)

    def reading(self) -> Iterator[None]:
        """Add in small steps what each counter has more than before."""
        before, self._seen = self._seen, {}
        for number, (labels, counter) in enumerate(self._bytes_total.counted()):
            if not number % LOOKED_AT_ONCE:
                yield
            known = before.pop(labels, None)
            if known is not None and known[0] is not counter:  # it was dropped, and made anew
                self._take(labels, known)
                known = None
            self._seen[labels] = self._take(labels, known or (counter, 0.0, 0.0))
        for labels, known in before.items():
            self._take(labels, known)
            yield

    def rating(self, seconds: float) -> Iterator[None]:
        """Record each client's rate over so many seconds, those since the last time."""
        for client in tuple(self._clients.values()):
            for usage in client.values():
                if usage.rated_bytes:
                    rate, usage.rated_bytes = usage.rated_bytes / seconds, 0
                    usage.rates[rate_bucket_of(rate)] += 1
                    usage.peak = max(usage.peak, rate)
            yield

    def recording(
        self, make: Callable[..., UsageRecord], put: Callable[[UsageRecord], None]
    ) -> Iterator[None]:
        """Make the records since the last time, and put each; `make` knows when and where."""
        yield from self.showing()
        for identity, recorded in tuple(self._usage.items()):
            self._take_usage(identity, recorded)
            yield
        table = self._table()
        for labels, client in tuple(self._clients.items()):
            for direction, usage in client.items():
                if not usage.is_idle:
                    for figures in self._records(labels, direction, usage, table):
                        put(make(**figures))
                    # What has made no rate yet, or no part of a topic, stays.
                    left = DirectionUsage(rated_bytes=usage.rated_bytes, shares=usage.shares)
                    client[direction] = left
            # Those who are together under OTHER have a client of that name as long as we run.
            if labels not in self._bytes_total.last_values and OTHER not in labels:
                del self._clients[labels]
            yield

    def _take(
        self, labels: UsageLabels, known: tuple[CounterChild, float, float]
    ) -> tuple[CounterChild, float, float]:
        """Take what a counter has counted beyond what is known; return what is known now."""
        counter, bytes_before, requests_before = known
        now = counter, counter.value, counter.requests
        count = round(now[1] - bytes_before)
        requests = round(now[2] - requests_before)
        if count or requests:
            api = labels[-1]
            usage = self._of(labels[:-1], "write" if api == WRITE_API else "read")
            usage.bytes += count
            usage.requests += requests
            if api in (READ_API, WRITE_API):
                usage.topic_bytes += count
                usage.rated_bytes += count
        return now

    def _of(self, labels: UsageLabels, direction: Direction) -> DirectionUsage:
        return self._clients.setdefault(labels, {}).setdefault(direction, DirectionUsage())

    def _take_usage(self, identity: ClientIdentity, usage: ClientUsage) -> None:
        """Take what was recorded of a client, for the labels under which its bytes are counted."""
        labels = identity.listener, identity.user or "", identity.client_id or ""
        if labels not in self._bytes_total.last_values and labels not in self._clients:
            if not self._bytes_total.is_full:
                return  # nothing was counted yet
            labels = identity.listener, OTHER, OTHER
        sampled = {"read": usage.fetched, "write": usage.produced}
        for direction in KIND_OF:
            connections = usage.connections if direction == "read" else 0
            held_ms, would_be_s = usage.held_ms[direction], usage.would_be_s[direction]
            sampler = sampled[direction]
            if connections or held_ms or would_be_s or sampler.total_bytes or sampler.sizes:
                into = self._of(labels, direction)
                into.connections += connections
                into.held_ms += held_ms
                into.would_be_s += would_be_s
                into.shares.take(sampler)
        usage.clear()

    def _records(
        self, labels: UsageLabels, direction: Direction, usage: DirectionUsage, table: RuleTable
    ) -> Iterator[Mapping[str, object]]:
        """Yield the figures of each record, the one with most bytes first."""
        listener, user, client_id = labels
        match = table.match(
            KIND_OF[direction], ClientIdentity(listener, user or None, client_id or None)
        )
        rule = None if match is None else match.rule
        parts, sampled = usage.shares.divide(usage.topic_bytes)
        parts[None] = parts.get(None, 0) + usage.bytes - usage.topic_bytes
        weights: Mapping[str | None, int] = parts if usage.bytes else {None: 1}
        requests = apportion_by_weight(usage.requests, weights)
        topics = [each for each in sorted(parts, key=lambda each: -parts[each]) if parts[each]]
        for number, topic in enumerate(topics or [None]):
            yield {
                "listener": listener,
                "user": self._named(user) if user else None,
                "client_id": self._named(client_id) if client_id else "",
                "hashed": self.hash_key is not None,
                "rule": None if rule is None else self._named(rule.shared_entity),
                "budget": rule.share.budget.name if rule is not None and rule.share else None,
                "topic": topic,
                "direction": direction,
                "bytes": parts.get(topic, 0),
                "requests": requests.get(topic, 0),
                "connections": 0 if number else usage.connections,
                "held_seconds": 0.0 if number else usage.held_ms / MS_PER_SECOND,
                "would_be_seconds": 0.0 if number else usage.would_be_s,
                "sampled": sampled,
                "rates": {} if number else dict(usage.rates),
                "peak": 0.0 if number else usage.peak,
            }

    def _named(self, name: str) -> str:
        return name if self.hash_key is None else hashed_name(self.hash_key, name)


def hashed_name(key: bytes, name: str) -> str:
    """Return what stands for a name: who has the key can find it again, nobody else."""
    return hmac.digest(key, name.encode(), "sha256").hex()


class UsageRecorder:
    """Takes rates and writes records of intervals that begin with the hour; `close` it in the end.

    `member` is who writes, `interval_s` how long an interval is; clocks are of the day, in seconds
    since 1970, and monotonic, in milliseconds.
    """

    def __init__(
        self,
        meter: UsageMeter,
        writer: UsageWriter,
        slices: TimeSlicer,
        *,
        member: str,
        interval_s: float,
        clock_s: Callable[[], float] = time,
        clock_ms: Callable[[], float] = clock_ms,
    ) -> None:
        self.meter, self._writer, self._slices = meter, writer, slices
        self._interval_ms = interval_s * MS_PER_SECOND
        self._clock_s, self._clock_ms = clock_s, clock_ms
        self._start_ms = self._day_ms()
        self._make = partial(UsageRecord, member=member, epoch=self._start_ms, sequence=0)
        self._rated_ms = clock_ms()
        self._plan()

    def _day_ms(self) -> int:
        # A clock that is not set is before 1970, and the interval begins before it ends.
        return max(round(self._clock_s() * MS_PER_SECOND), 1)

    def _plan(self) -> None:
        """Choose the end of the interval: of the day, and by the monotonic clock."""
        now_ms = self._day_ms()
        self._end_ms = (now_ms // self._interval_ms + 1) * self._interval_ms
        self._due_ms = self._clock_ms() + self._end_ms - now_ms

    async def run(self) -> None:
        """Meter, until cancelled."""
        writing = asyncio.create_task(self._writer.run(), name="write usage")
        try:
            while True:
                next_ms = min(self._due_ms, self._rated_ms + RATE_INTERVAL_MS)
                await asyncio.sleep(max(next_ms - self._clock_ms(), 0.0) / MS_PER_SECOND)
                try:
                    await self.tick()
                except Exception as error:  # a defect of ours must not end the proxy
                    _log.error("unexpected error about usage", exc_info=error)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def tick(self) -> None:
        """Take a rate, and end the interval, if it is time."""
        now_ms = self._clock_ms()
        await self._slices.collect(self.meter.reading())
        if now_ms >= self._rated_ms + RATE_INTERVAL_MS:
            seconds, self._rated_ms = (now_ms - self._rated_ms) / MS_PER_SECOND, now_ms
            await self._slices.collect(self.meter.rating(seconds))
        if now_ms >= self._due_ms:
            await self._record()

    async def _record(self) -> None:
        """Write what came since the last time, as an interval that ends now."""
        planned_ms, now_ms = self._end_ms, self._day_ms()
        end_ms = planned_ms if abs(now_ms - planned_ms) < MAX_OFF_MS else now_ms
        # Where the clock was put back the interval has no length that is known.
        start_ms, end_ms = min(self._start_ms, round(end_ms) - 1), round(end_ms)
        make = partial(self._make, start_ms=start_ms, end_ms=end_ms)
        self._start_ms = end_ms
        self._plan()
        await self._slices.collect(self.meter.recording(make, self._writer.add))
        await self._slices.collect(self._writer.coarsening(now_ms))

    async def close(self) -> None:
        """Write the last interval, which is shorter, when `run` has ended and nothing moves."""
        await self._slices.collect(self.meter.reading())
        await self._record()
        await self._writer.close()
