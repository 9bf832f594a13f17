"""The clients that are connected, or were lately: their byte counters, and their usage.

Usage is what a client does beside its bytes: connections, holds, and by samples its topics.

Of a client's Fetches, and of its Produce requests, one in some is walked for the bytes of its
topics. Each has the same chance, whatever came before it, and stands for so many as the chance is
one in (Horvitz and Thompson's estimate): no habit of a client makes a topic look larger.
"""

from collections import Counter as Tally
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from random import random
from typing import Literal, TypeAlias

from metrics import BoundedLabels, CounterChild
from metrics.clock import clock_ms
from metrics.sensor import DEFAULT_EXPIRY_MS
from proxy.progress.topics import TopicNames
from proxy.quota.entities import PRODUCER_BYTE_RATE, ClientIdentity, QuotaKind
from proxy.relay.lane import Kind
from proxy.relay.topic_traffic import RECORDS_BYTES
from proxy.wire.apis import FETCH, PRODUCE, api_name
from proxy.wire.fetch import FetchedPartition, TopicKey
from proxy.wire.fetch_response import FetchObserver

Direction: TypeAlias = Literal["read", "write"]

WALKED_AT_FIRST = 1000
"""So many requests of a client are all walked."""

LIKEWISE = 2 * WALKED_AT_FIRST
REQUESTS_PER_WEIGHT = 500
"""Of later requests, up to LIKEWISE like the one at it, one in 1 + number / REQUESTS_PER_WEIGHT is
walked: what the weights are above 1 adds up to n² / 1000 at most, after n requests, and a topic's
part of them is wrong by sqrt(n² / 1000 / 4) / n at worst. Three times that is 4.7 %."""

MAX_SAMPLED_TOPICS = 1000
"""Of a client between two times that they are taken; the bytes of further ones have no topic."""


MAX_GONE_CLIENTS = 10_000
"""Clients that left whose byte counters are kept; of more the first to leave are dropped."""


class TopicByteTally:
    """The bytes of a client's topics in one direction, as far as they were walked."""

    __slots__ = ("_most", "_names", "_requests", "is_sampled", "sizes", "total_bytes")

    def __init__(self, names: TopicNames, sample_every: int) -> None:
        self._names, self._most = names, sample_every
        self._requests = 0
        """How many requests those stand for that were walked."""
        self.clear()

    def clear(self) -> None:
        """Forget the bytes, but not how many requests were walked."""
        self.sizes: defaultdict[str, int] = defaultdict(int)
        """Of records, by topic."""
        self.total_bytes = 0
        """Of requests and responses that were walked, heads included."""
        self.is_sampled = False
        """Whether anything in `sizes` stands for more than itself."""

    @property
    def weight(self) -> int:
        """How many requests the next one that is walked stands for."""
        if self._requests < WALKED_AT_FIRST:
            return 1
        return min(self._most, 1 + max(self._requests, LIKEWISE) // REQUESTS_PER_WEIGHT)

    def add(self, topic: TopicKey, size: int, weight: int) -> None:
        """Record what one of `weight` requests has of a topic; of an id when its name is known."""
        self._names.when_known(topic, self._add, size * weight)

    def walked(self, size: int, weight: int, requests: int = 1) -> None:
        """Record requests and their responses, of so many bytes, that stand for `weight` each."""
        self.total_bytes += size * weight
        self._requests += requests * weight
        self.is_sampled |= weight > 1

    def add_all(self, sizes: Mapping[TopicKey, int], weight: int) -> None:
        """Record what a part of one of `weight` requests has of some topics."""
        for topic, size in sizes.items():
            self.add(topic, size, weight)

    def _add(self, name: str, size: int) -> None:
        if name in self.sizes or len(self.sizes) < MAX_SAMPLED_TOPICS:
            self.sizes[name] += size


class RequestSampler:
    """Draws which of a connection's requests of a kind are walked."""

    __slots__ = ("_left", "_weight", "lane", "sampler")

    def __init__(self, sampler: TopicByteTally) -> None:
        self.sampler = sampler
        self.lane: Kind | None = None
        """Counts in its place while it sends requests on."""
        self._left = self._draw()

    def _draw(self) -> int:
        """Return which request from here on is walked, 1 for the next one."""
        self._weight = weight = self.sampler.weight
        return 1 if weight == 1 else 1 + int(log(1.0 - random()) / log(1.0 - 1.0 / weight))

    def join(self, lane: Kind) -> None:
        """Have the lane count; what comes before it counts no longer, as in any draw."""
        lane.until_shown, self.lane = self._draw(), lane

    def taken(self) -> int:
        """Count a request that is not sent on by the lane; return its weight, 0: not walked."""
        lane, weight = self.lane, 0
        left = (self._left if lane is None else lane.until_shown) - 1
        if left <= 0:
            weight, left = self._weight, self._draw()
        if lane is None:
            self._left = left
        else:
            lane.until_shown = left
        return weight


class ClientUsage:
    """What one client has done since it was last taken; shared by its connections."""

    __slots__ = ("connections", "fetched", "held_ms", "produced", "would_be_s")

    def __init__(self, names: TopicNames, sample_every: int) -> None:
        self.fetched = TopicByteTally(names, sample_every)
        self.produced = TopicByteTally(names, sample_every)
        self.clear()

    def clear(self) -> None:
        """Begin anew, but for the topics."""
        self.connections = 0
        """That it has opened."""
        self.held_ms: defaultdict[Direction, float] = defaultdict(float)
        self.would_be_s: defaultdict[Direction, float] = defaultdict(float)
        """Seconds in which a quota was exceeded that is not enforced."""

    def turn(self, api_key: int) -> RequestSampler | None:
        """Return who draws the requests of an API that are walked, None: none of them."""
        samplers = {FETCH: self.fetched, PRODUCE: self.produced}
        return RequestSampler(samplers[api_key]) if api_key in samplers else None


@dataclass(slots=True, eq=False)
class SampledFetchObserver(FetchObserver):
    """Records what a Fetch response that is walked has of each topic.

    It stands for `weight` requests like it, or is the last of a run of `requests` that all had
    records of its topic, `records_bytes` together; None: it is alone.
    """

    sampler: TopicByteTally
    size: int
    weight: int = 1
    requests: int = 1
    records_bytes: int | None = None

    def partitions(self, topic: TopicKey, fetched: Sequence[FetchedPartition]) -> None:
        """See FetchObserver."""
        size = self.records_bytes
        if size is None:
            size = sum([each[RECORDS_BYTES] for each in fetched])
        if size > 0:
            self.sampler.add(topic, size, self.weight)

    def ended(self) -> None:
        """See FetchObserver."""
        self.sampler.walked(self.size, self.weight, self.requests)


def quota_direction(kind: QuotaKind) -> Direction:
    """Return which direction a quota holds."""
    return "write" if kind is PRODUCER_BYTE_RATE else "read"


@dataclass(slots=True, eq=False)
class ClientRegistry:
    """Who uses which byte counters, those of the metric `bytes_total`."""

    _bytes_total: BoundedLabels[CounterChild]
    _new_usage: Callable[[], ClientUsage] | None = None
    """Makes what further is recorded of a client; None: nothing is."""
    usage: dict[ClientIdentity, ClientUsage] = field(default_factory=dict)
    """Of all whose byte counters are kept."""
    connections: Tally[ClientIdentity] = field(default_factory=Tally)
    """How many connections each client has; who is not connected is not in it."""
    _gone_ms: OrderedDict[ClientIdentity, float] = field(default_factory=OrderedDict)
    """In the order of their leaving. Not a dict, which is slow to find its first key once many
    before that were deleted."""
    _client_ids: Tally[str | None] = field(default_factory=Tally)
    """How many of both have a client id."""

    def knows(self, client_id: str) -> bool:
        """Return whether a client with this id is connected, or was within the hour."""
        return client_id in self._client_ids

    def connected(self, identity: ClientIdentity) -> None:
        """Record that a connection uses this client's byte counters."""
        self.connections[identity] += 1
        if self._new_usage is not None:
            if identity not in self.usage:
                self.usage[identity] = self._new_usage()
            self.usage[identity].connections += 1
        if self.connections[identity] == 1 and self._gone_ms.pop(identity, None) is None:
            self._client_ids[identity.client_id] += 1

    def disconnected(self, identity: ClientIdentity) -> None:
        """Record that a connection does so no longer."""
        self.connections[identity] -= 1
        if not self.connections[identity]:
            del self.connections[identity]
            self._gone_ms[identity] = clock_ms()
            if len(self._gone_ms) > MAX_GONE_CLIENTS:
                self._forget(next(iter(self._gone_ms)))

    def would_throttle(self, identity: ClientIdentity, kind: QuotaKind) -> None:
        """Record a second in which a client exceeded a quota which is not enforced."""
        if identity in self.usage:
            self.usage[identity].would_be_s[quota_direction(kind)] += 1

    def byte_counter(self, identity: ClientIdentity, api_key: int) -> CounterChild:
        """Return the child of bytes_total for a client and an API."""
        return self._bytes_total.of(
            identity.listener, identity.user or "", identity.client_id or "", api_name(api_key)
        )

    def forgetting(self, now_ms: float) -> Iterator[ClientIdentity]:
        """Drop the byte counters of clients that left an hour ago, which makes room for others.

        Yields each when that is done. Other calls may come between two steps.
        """
        while self._gone_ms:
            identity, gone_ms = next(iter(self._gone_ms.items()))
            if now_ms - gone_ms < DEFAULT_EXPIRY_MS:
                return
            self._forget(identity)
            yield identity

    def _forget(self, identity: ClientIdentity) -> None:
        del self._gone_ms[identity]
        self.usage.pop(identity, None)
        self._client_ids[identity.client_id] -= 1
        if not self._client_ids[identity.client_id]:
            del self._client_ids[identity.client_id]
        user, client_id = identity.user or "", identity.client_id or ""
        self._bytes_total.forget(identity.listener, user, client_id)
