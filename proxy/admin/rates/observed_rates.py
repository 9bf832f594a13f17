"""Keeps for each client how fast it has read and written, by the hour, for up to a week."""

import asyncio
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict
from structlog import get_logger

from metrics.clock import MS_PER_SECOND, clock_ms
from metrics.lock_free import CounterChild
from proxy.quota.entities import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE, ClientIdentity, QuotaKind
from proxy.slices import Slices
from proxy.state import Journal, Json, Record, RecordFormat, StateError, StateWriter, Store
from proxy.wire.apis import FETCH, PRODUCE, api_name

LOOKED_AT_ONCE = 100  # counters in one step of a sample; some 50 microseconds

OBSERVED_INTERVAL_MS = 10_000.0
"""Over so long a rate is taken: as long as Kafka's windows look back on."""

RATES_WRITE_INTERVAL_S = 300.0  # so much is lost when the proxy is killed
WRITTEN_AT_ONCE = 200  # records in one write: some 5 ms to make them
RATES_WRITE_PAUSE_S = 0.2  # between two writes

SECONDS_PER_HOUR = 3600
KEPT_HOURS = 7 * 24
MAX_SKETCHES = 50_000
"""One for each client, direction and hour; about 0.5 kB each. Beyond it the oldest hours go."""

DIRECTIONS = {api_name(FETCH): CONSUMER_BYTE_RATE, api_name(PRODUCE): PRODUCER_BYTE_RATE}
"""What the bytes of an API count for; those of others are few."""

MADE_ANEW = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
"""A UUID: who has one in its client id, as Spark's executors, has another one at each start."""


BUCKETS_PER_DOUBLING = 8  # a bucket's upper edge is 9 % above its lower one


Counters = Mapping[tuple[str, ...], CounterChild]
"""Of bytes by listener, user, client id and API, as the metric `bytes_total` has them."""

SketchKey = tuple["RateSeries", int]
"""What of a series is in one record of the state, with its hour since the Unix epoch."""

_log = get_logger(__name__)


class ObservedClient(NamedTuple):
    """Whom a rule could name."""

    user: str | None
    name: str
    """The client id, or what comes before the part of it that is made anew at each start."""
    is_prefix: bool


class RateSeries(NamedTuple):
    """One direction of a client's traffic."""

    client: ObservedClient
    kind: QuotaKind


class RatesForm(BaseModel):
    """What is kept of a series' hour."""

    model_config = ConfigDict(strict=True)

    user: str | None
    name: str
    is_prefix: bool
    kind: str
    hour: int
    listener: str
    client_id: str
    counts: list[tuple[int, int]]
    peak: float
    total_bytes: int

    def seen(self) -> "SeenSeries":
        """Return what it says. Raises ValueError for a kind that is not known."""
        client = ObservedClient(self.user, self.name, self.is_prefix)
        series = RateSeries(client, QuotaKind(self.kind))
        example = ClientIdentity(self.listener, self.user, self.client_id)
        counts = Counter(dict(self.counts))
        return SeenSeries(series, example, counts, self.peak, self.total_bytes)


@dataclass(slots=True)
class SeenSeries:
    """The rates of a series in one hour, or in several: how often each was seen, to within a tenth.

    They are above 0, in bytes per second, in buckets whose edges grow by the same factor.
    """

    series: RateSeries
    example: ClientIdentity
    """One of the clients."""
    counts: Counter[int] = field(default_factory=Counter)
    """How many rates are in each bucket; its number is that of the upper edge."""
    peak: float = 0.0
    """The highest rate."""
    total_bytes: int = 0

    def add(self, rate: float, size_bytes: int) -> None:
        """Record a rate, and the bytes behind it."""
        self.counts[math.ceil(math.log2(rate) * BUCKETS_PER_DOUBLING)] += 1
        self.peak = max(self.peak, rate)
        self.total_bytes += size_bytes

    def include(self, other: Self) -> None:
        """Record all rates that another one has."""
        self.counts.update(other.counts)
        self.peak = max(self.peak, other.peak)
        self.total_bytes += other.total_bytes

    def quantile(self, share: float) -> float:
        """Return a rate that this share of the rates, 0 to 1, does not exceed.

        At most 9 % above the lowest such rate, and never above the peak. 0 without any rates.
        """
        left = share * self.counts.total()
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                return min(math.exp2(bucket / BUCKETS_PER_DOUBLING), self.peak)
        return self.peak

    def document(self, hour: int = 0) -> dict[str, Json]:
        """Return what RatesForm reads; hour 0 is for several."""
        return {
            **self.series.client._asdict(),
            "kind": str(self.series.kind),
            "hour": hour,
            "listener": self.example.listener,
            "client_id": self.example.client_id or "",
            "counts": list(self.counts.items()),
            "peak": self.peak,
            "total_bytes": self.total_bytes,
        }


RATES_FORMAT = RecordFormat("rates", 1, RatesForm)


def observed_client(user: str, client_id: str) -> ObservedClient:
    """Return whom a client counts as; an empty user is none."""
    made_anew = MADE_ANEW.search(client_id)
    name = client_id if made_anew is None else client_id[: made_anew.start()]
    return ObservedClient(user or None, name, made_anew is not None)


@dataclass(slots=True)
class ObservedRates:
    """All that was observed. `max_clients`: further ones are only counted.

    `run` it; `close` it before the store is closed.
    """

    counters: Counters
    max_clients: int
    max_sketches: int = MAX_SKETCHES
    clock_ms: Callable[[], float] = clock_ms
    slices: Slices = field(default_factory=Slices)
    hours: dict[int, dict[RateSeries, SeenSeries]] = field(default_factory=dict)
    """What was seen in each hour since the Unix epoch."""
    left_out: set[ObservedClient] = field(default_factory=set)
    """Those for whom there was no room; at most `max_clients` of them are counted."""
    journal: Journal[SketchKey] = field(init=False)
    _known: set[RateSeries] = field(default_factory=set)
    """Those in any hour."""
    _seen: dict[tuple[str, ...], float] = field(default_factory=dict)
    """What each counter said at the last sample."""
    _sampled_ms: float | None = None
    _hour: int = 0
    writes: bool = True
    """Whether this process keeps them, where several have one state; see `keep`."""
    _store: Store | None = None
    _writer: StateWriter | None = None
    _is_read: bool = False
    """Whether what was kept is known here."""
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.journal = Journal(self._record, _key)

    def sample(self, now_ms: float, now_s: float) -> Iterator[None]:
        """Take a sample in small steps; one every OBSERVED_INTERVAL_MS.

        Times are on the monotonic clock and since the Unix epoch. The first sample only begins.
        """
        sampled_ms, self._sampled_ms = self._sampled_ms, now_ms
        sizes: dict[RateSeries, float] = defaultdict(float)
        moved: dict[RateSeries, tuple[str, ...]] = {}
        before = self._seen
        seen: dict[tuple[str, ...], float] = {}
        for number, (labels, counter) in enumerate(tuple(self.counters.items())):
            if not number % LOOKED_AT_ONCE:
                yield
            if labels[-1] not in DIRECTIONS:
                continue
            value = seen[labels] = counter.value
            size = value - before.get(labels, 0.0)
            if size:
                series = _series(labels)
                # One that is lower was dropped, and made anew since.
                sizes[series] += size if size > 0 else value
                moved[series] = labels
        self._seen = seen
        if sampled_ms is not None and now_ms > sampled_ms:
            seconds = (now_ms - sampled_ms) / MS_PER_SECOND
            hour = int(now_s // SECONDS_PER_HOUR)
            of_hour = self.hours.setdefault(hour, {})
            for series, size in sizes.items():
                if series in self._known or self._has_room(series.client):
                    if series not in of_hour:
                        self._known.add(series)
                        listener, user, client_id, _ = moved[series]
                        example = ClientIdentity(listener, user or None, client_id)
                        of_hour[series] = SeenSeries(series, example)
                    of_hour[series].add(size / seconds, int(size))
                    self.journal.mark_changed((series, hour))
                yield
            if hour != self._hour:
                self._hour = hour
                yield from self._forget_old(hour)

    def load(self, records: Iterable[Record], now_s: float) -> list[str]:
        """Resume what earlier processes kept; return which records were not, and why.

        Of several that ran beside each other each kept what it had seen, in records of its own.
        """
        refused: list[str] = []
        self._hour = int(now_s // SECONDS_PER_HOUR)
        for record in records:
            try:
                form = RATES_FORMAT.read(record)
                seen = form.seen()
            except ValueError as error:
                refused.append(f"rates record {record.key!r} is left out: {error}")
                continue
            self._known.add(seen.series)
            add_seen(self.hours.setdefault(form.hour, {}), seen)
            if record.key != _key(own := (seen.series, form.hour)):
                self.journal.mark_changed(own)
                self.journal.mark_deleted(record.key)
        for _ in self._forget_old(self._hour):
            pass
        return refused

    def use(self, store: Store) -> None:
        """Write to this store; at first, with the start of `run`, read what others wrote there."""
        self._store, self._writer = store, StateWriter(store)

    async def keep(self, *, keeps: bool) -> None:
        """Keep them from now on, or leave that to another process.

        What was kept is known to the one that keeps it: if all knew it, it would count for each.
        """
        if not keeps:
            await self.write()
            if not self.journal:
                self.hours, self._known, self.left_out = {}, set(), set()
                self._is_read = False
        self.writes = keeps
        if keeps:
            await self._read_kept()

    async def run(self) -> None:
        """Sample and write, until cancelled."""
        if self.writes:
            await self._read_kept()
        next_s = time.monotonic() + RATES_WRITE_INTERVAL_S
        while True:
            try:
                await self.slices.collect(self.sample(self.clock_ms(), time.time()))
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + RATES_WRITE_INTERVAL_S
                    await self.write(RATES_WRITE_PAUSE_S)
            except Exception as error:  # a defect of ours must not end the proxy
                _log.error("unexpected error about observed rates", exc_info=error)
            await asyncio.sleep(OBSERVED_INTERVAL_MS / MS_PER_SECOND)

    async def close(self) -> None:
        """Write what is not written yet, and nothing more."""
        await self.write()
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.close()

    async def write(self, pause_s: float = 0.0) -> None:
        """Write what is not written yet."""
        async with self._writing:
            while self.writes and self._is_read and (writer := self._writer) and self.journal:
                records, deleted = self.journal.take(WRITTEN_AT_ONCE)
                try:
                    await writer.put_many(records, delete=deleted)
                except StateError as error:
                    self.journal.give_back()
                    _log.error("observed rates not kept, trying again", error=str(error))
                    return
                await asyncio.sleep(pause_s)

    async def _read_kept(self) -> None:
        """Read what was kept, then write; once, whoever asks for it meanwhile."""
        async with self._writing:
            store = self._store
            if self._is_read or store is None or self._writer is None:
                return
            try:
                # Tens of thousands of records take seconds.
                records = await asyncio.to_thread(store.items, RATES_FORMAT.prefix)
                problems = await asyncio.to_thread(self.load, records, time.time())
            except StateError as error:
                _log.error("observed rates are neither read nor kept", error=str(error))
                return
            self._is_read = True
        for problem in problems:
            _log.warning("observed rates not taken up", problem=problem)

    def since(self, first_hour: int) -> Iterator[SeenSeries]:
        """Yield what was seen in each hour from one on."""
        for hour, seen in tuple(self.hours.items()):  # a thread may still load more
            if hour >= first_hour:
                yield from tuple(seen.values())

    def _has_room(self, client: ObservedClient) -> bool:
        if len(self._known) < len(DIRECTIONS) * self.max_clients:
            return True
        if len(self.left_out) < self.max_clients:
            self.left_out.add(client)
        return False

    def _forget_old(self, hour: int) -> Iterator[None]:
        """Drop what is older than is kept, and the oldest hours where there is too much."""
        kept = sum(map(len, self.hours.values()))
        for oldest in sorted(self.hours):
            if oldest > hour - KEPT_HOURS and (kept <= self.max_sketches or oldest >= hour):
                break
            gone = self.hours.pop(oldest)
            kept -= len(gone)
            for series in gone:
                self.journal.mark_removed((series, oldest))
                yield
        known: set[RateSeries] = set()
        for seen in tuple(self.hours.values()):
            known.update(tuple(seen))
            yield
        if len(known) < len(self._known):
            self.left_out.clear()
        self._known = known

    def _record(self, key: SketchKey) -> Record | None:
        series, hour = key
        seen = self.hours.get(hour, {}).get(series)
        return None if seen is None else RATES_FORMAT.record(_key_parts(key), seen.document(hour))


@dataclass(slots=True)
class Observed:
    """What was seen from an hour on, by one process or by several."""

    by_series: dict[RateSeries, SeenSeries] = field(default_factory=dict)
    left_out: int = 0
    """How many clients there was no room for, at least."""

    def adding(self, rates: ObservedRates, first_hour: int) -> Iterator[None]:
        """Add in small steps what this process has seen."""
        self.left_out += len(rates.left_out)
        for seen in rates.since(first_hour):
            add_seen(self.by_series, seen)
            yield

    def adding_documents(self, documents: Iterable[Mapping[str, Any]]) -> Iterator[None]:
        """Add in small steps what `SeenSeries.document` gave. Raises ValueError for others."""
        for each in documents:
            add_seen(self.by_series, RatesForm.model_validate(each, strict=False).seen())
            yield


def add_seen(by_series: dict[RateSeries, SeenSeries], seen: SeenSeries) -> None:
    """Add what was seen of a series to what is known of it."""
    by_series.setdefault(seen.series, SeenSeries(seen.series, seen.example)).include(seen)


def _key(key: SketchKey) -> str:
    return RATES_FORMAT.key(*_key_parts(key))


def _key_parts(key: SketchKey) -> tuple[Hashable, ...]:
    """Return what tells the record of a series' hour from others; no user is not an empty one."""
    (client, kind), hour = key
    user = "-" if client.user is None else f"={client.user}"
    return hour, str(kind), "prefix" if client.is_prefix else "id", user, f"={client.name}"


@lru_cache(MAX_SKETCHES)
def _series(labels: tuple[str, ...]) -> RateSeries:
    """Return what a counter counts for, one of an API in DIRECTIONS."""
    _, user, client_id, api = labels
    return RateSeries(observed_client(user, client_id), DIRECTIONS[api])
