"""Adds up the records of the last days: how fast each client reads and writes, for suggestions."""

import re
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from pydantic import ValidationError

from proxy.cluster.kafka_client import Bootstrap
from proxy.cluster.upstream import UpstreamError
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.slices import TimeSlicer
from proxy.usage.usage_record import (
    KIND_OF,
    UsageRecord,
    quantile_of,
    rate_bucket_of,
    rates_descending,
)
from proxy.usage.usage_topic import UsageTopic, fetched_values

READ_LIMIT_S = 25.0
"""How long records are read: the command waits 30 s for the answer."""

MAX_SUMMED = 200_000
"""So many rates are kept by interval, of clients whose names are made anew; about 20 MB."""

MAX_AT_ONCE = 10_000
"""Of one record; so many are of 28 hours. Each record of an interval is added to all of its rates.
"""

ROOM_BYTES = 20_000
"""So much is kept of each client on average, about: its names, and which rates were seen."""

BUCKET_BYTES = 80  # of a rate that was seen
SERIES_BYTES = 1000
CHAR_BYTES = 4

MAX_WRITERS = 100_000
"""Of further members and epochs those of which nothing came for longest are forgotten, and doubles
of theirs count."""

MADE_ANEW = re.compile("[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
"""A UUID: who has one in its client id, as Spark's executors, has another one at each start."""


class ObservedClient(NamedTuple):
    """Whom a rule could name."""

    user: str | None
    name: str
    """The client id, or what comes before the part of it that is made anew at each start."""
    is_prefix: bool
    is_hashed: bool = False
    """Whether the names are hashed, so that no rule can name it after all."""


@dataclass(slots=True)
class RateDistribution:
    """One direction of a client's traffic: its rates above 0 in bytes per second, to within 5 %."""

    example: ClientIdentity
    """One of the clients."""
    counts: Counter[int] = field(default_factory=Counter)
    """How many rates are in each bucket, by its number."""
    peak: float = 0.0
    """The highest rate."""
    total_bytes: int = 0
    by_end: dict[int, list[float]] = field(default_factory=dict)
    """Of clients with one bound together the rates of each interval, the highest first, until they
    are counted."""

    def quantile(self, share: float) -> float:
        """Return a rate that this share of the rates, 0 to 1, does not exceed."""
        return quantile_of(self.counts, share, self.peak)


@dataclass(slots=True)
class ObservedUsage:
    """What was seen; `max_clients`: further ones are only counted."""

    max_clients: int
    by_client: dict[ObservedClient, dict[QuotaKind, RateDistribution]] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)
    """Hashes of clients for whom there was no room; at most `max_clients` are counted."""
    unread: int = 0
    """Messages that are no records, or of a newer version."""
    is_cut: bool = False
    """Whether there was no time for all records."""
    _last: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """The number of the last record by the hash of partition, member and epoch: doubles come
    later."""
    _kept_bytes: int = 0
    _summed_count: int = 0
    """How many rates are kept by interval."""

    def adding(self, topic: str, part: Any, positions: dict[int, int]) -> Iterator[None]:
        """Add in small steps what was fetched of a partition; see `fetched_values`."""
        for value in fetched_values(topic, part, positions):
            self.add_message(part.partition_index, value)
            yield

    def add_message(self, partition: int, value: bytes | None) -> None:
        """Add what a message says, but not twice."""
        try:
            record = UsageRecord.model_validate_json(value or b"")
        except ValidationError:
            self.unread += 1
            return
        writer = hash((partition, record.member, record.epoch))
        last = self._last.pop(writer, -1)
        self._last[writer] = max(last, record.sequence)
        if len(self._last) > MAX_WRITERS:
            self._last.popitem(last=False)
        if record.sequence > last:
            self.add(record)

    def add(self, record: UsageRecord) -> None:
        """Add a record, of which there was none before."""
        client = normalized_client(record.user, record.client_id, is_hashed=record.hashed)
        is_full = client not in self.by_client and len(self.by_client) >= self.max_clients
        if is_full or self._kept_bytes >= self.max_clients * ROOM_BYTES:
            if len(self.left_out) < self.max_clients:
                self.left_out.add(hash(client))
            return
        by_kind, kind = self.by_client.setdefault(client, {}), KIND_OF[record.direction]
        if (seen := by_kind.get(kind)) is None:
            example = ClientIdentity(record.listener, record.user, record.client_id)
            seen = by_kind[kind] = RateDistribution(example)
            names = len(record.listener) + len(record.user or "") + len(record.client_id)
            self._kept_bytes += SERIES_BYTES + CHAR_BYTES * names
        seen.total_bytes += record.bytes
        count = sum(record.rates.values())
        room = min(MAX_AT_ONCE, MAX_SUMMED - self._summed_count)
        if client.is_prefix and record.rates and count <= room:
            self._add_at_once(seen.by_end, record)
        else:
            self._kept_bytes -= BUCKET_BYTES * len(seen.counts)
            seen.counts.update(record.rates)
            self._kept_bytes += BUCKET_BYTES * len(seen.counts)
            seen.peak = max(seen.peak, record.peak)

    def _add_at_once(self, by_end: dict[int, list[float]], record: UsageRecord) -> None:
        """Add the rates of one of several clients that share a bound, the highest to the highest.

        They move at the same times, as the executors of a query; if not, the sum is too high.
        """
        before, own = by_end.get(record.end_ms, ()), rates_descending(record.rates)
        rates = by_end[record.end_ms] = list(map(sum, zip_longest(before, own, fillvalue=0.0)))
        self._summed_count += len(rates) - len(before)

    def finishing(self) -> Iterator[None]:
        """Make in small steps the series of who share a bound; drop what has no rates."""
        for client, by_kind in tuple(self.by_client.items()):
            for kind, seen in tuple(by_kind.items()):
                for rates in seen.by_end.values():
                    seen.counts.update(map(rate_bucket_of, rates))
                    seen.peak = max((seen.peak, *rates))
                    yield
                seen.by_end.clear()
                if not seen.counts:
                    del by_kind[kind]
                yield
            if not by_kind:
                del self.by_client[client]


async def read_observed(
    way: Bootstrap, topic_name: str, since_ms: int, max_clients: int, slices: TimeSlicer
) -> ObservedUsage:
    """Return what the records of a time and later say, of all members.

    Raises UpstreamError, NonRetriableError and StateError.
    """
    observed = ObservedUsage(max_clients)
    with closing(UsageTopic(way, topic_name)) as topic:
        try:
            async with topic.within(READ_LIMIT_S):
                if await topic.is_there():
                    await _read(topic, since_ms, observed, slices)
        except UpstreamError:
            if not observed.by_client:
                raise
            observed.is_cut = True
    await slices.collect(observed.finishing())
    return observed


async def _read(
    topic: UsageTopic, since_ms: int, observed: ObservedUsage, slices: TimeSlicer
) -> None:
    positions, ends = await topic.positions_at(since_ms)
    while left := {at: start for at, start in positions.items() if start < ends[at]}:
        for part in await topic.retry(partial(topic.fetch, left)):
            number = part.partition_index
            before = positions[number]
            await slices.collect(observed.adding(topic.name, part, positions))
            if positions[number] == before and part.records:  # what cannot be read is passed over
                positions[number] = ends[number]


def normalized_client(user: str | None, client_id: str, *, is_hashed: bool) -> ObservedClient:
    """Return whom a client counts as."""
    made_anew = None if is_hashed else MADE_ANEW.search(client_id)
    name = client_id if made_anew is None else client_id[: made_anew.start()]
    return ObservedClient(user, name, made_anew is not None, is_hashed)
