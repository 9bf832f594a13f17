"""Follow what some clients read and write: show their messages to those who keep the books.

Fetch and ListOffsets of the clients of known queries go to progress and backpressure, Produce of
the clients of pipelines to these. The messages of all others are not looked into.
"""

from collections.abc import Callable, Set
from functools import partial
from typing import Protocol, TypeAlias

from proxy.backpressure.backpressure import Backpressure
from proxy.backpressure.offset_lookups import OffsetLookups
from proxy.backpressure.query_backpressure import QueryBackpressure
from proxy.progress.query import QueryProgress
from proxy.progress.query_registry import QueryRegistry
from proxy.progress.topics import TopicNames
from proxy.progress.tracker import FetchTracker
from proxy.quota.entities import ClientIdentity
from proxy.quota.manager import QuotaManager
from proxy.wire.apis import FETCH, LIST_OFFSETS, PRODUCE
from proxy.wire.fetch import NO_OFFSET, FetchRequestPartitions, read_fetch_request
from proxy.wire.fetch_response import FetchObserver
from proxy.wire.frames import RequestHead
from proxy.wire.layout import Buffer
from proxy.wire.list_offsets import LATEST, OffsetLookup, read_list_offsets_request
from proxy.wire.produce import ProducedPartition, read_produce_request, read_produce_response
from proxy.wire.topic_partition import TopicPartition

FOLLOWED_APIS = frozenset({PRODUCE, FETCH, LIST_OFFSETS})

ProduceAsk: TypeAlias = tuple[ProducedPartition, ...]

Asked: TypeAlias = FetchRequestPartitions | OffsetLookup | ProduceAsk
"""What a followed request asks for."""


class Appends(Protocol):
    """Who is told what the clients of pipelines write."""

    generation: int
    """Changes whenever `follows` may give another answer."""

    def follows(self, client_id: str | None) -> bool:
        """Say whether what a client writes is of interest."""

    def appended(
        self, client_id: str, topic: str, partition: int, start: int, end: int, now_ms: float
    ) -> None:
        """Take note that a client has written the records from `start` up to `end`."""

    def plans(self, client_id: str, partitions: Set[TopicPartition], now_ms: float) -> None:
        """Take note that a driver is about to be told the ends of partitions."""

    def sent(self, client_id: str, count: int, records: int) -> None:
        """Take note that a client has sent so many bytes for so many records."""


class Reads:
    """What a client reads for a query, on one connection.

    Args:
        query: that the client reads for.
        node_id: of the broker that the connection goes to; None for a bootstrap connection.
        names: of the topics.
        pressure: on the query; None when no adaptive rule bounds the client.
        now_ms: the monotonic time.

    """

    __slots__ = ("has_fetched", "lookups", "pressure", "query", "tracker")

    def __init__(
        self,
        query: QueryProgress,
        node_id: int | None,
        names: TopicNames,
        pressure: QueryBackpressure | None,
        now_ms: float,
    ) -> None:
        self.query = query
        self.tracker = FetchTracker(names, query.reader(node_id))
        self.pressure = pressure
        self.has_fetched = False
        """Whether this is an executor's connection."""
        self.lookups = OffsetLookups(query, pressure, now_ms)

    def follow(self, pressure: QueryBackpressure | None) -> None:
        """Go on under the rule that bounds the client now; None: it is not adaptive."""
        self.pressure = pressure
        self.lookups.follow(pressure)

    def fetch_asked(self, version: int, body: Buffer, now_ms: float) -> FetchRequestPartitions:
        """Read a Fetch request that is about to be sent on. Raises MalformedFrame."""
        ask = read_fetch_request(version, body)
        self.has_fetched = True
        self.lookups.fetched()
        self.tracker.asked(ask, now_ms)
        return ask


class Watch:
    """One followed client on one connection: what it reads for a query, what it writes, or both."""

    __slots__ = ("_appends", "_client_id", "_names", "reads")

    def __init__(
        self, client_id: str, names: TopicNames, reads: Reads | None, appends: Appends | None
    ) -> None:
        self._client_id = client_id
        self._names = names
        self.reads = reads
        self._appends = appends

    def wants(self, api_key: int) -> bool:
        """Say whether requests of this API are to be shown."""
        return (self._appends if api_key == PRODUCE else self.reads) is not None

    def asked(self, head: RequestHead, frame: Buffer, now_ms: float) -> Asked:
        """Read a request that is about to be sent on. Raises MalformedFrame."""
        api_key, version = head.api_key, head.api_version
        body = memoryview(frame)[head.header_end :]
        if api_key == LIST_OFFSETS:
            return read_list_offsets_request(version, body, head.correlation_id)
        if api_key == FETCH:
            assert self.reads is not None
            return self.reads.fetch_asked(version, body, now_ms)
        ask = read_produce_request(version, body)
        assert self._appends is not None
        self._appends.sent(self._client_id, len(frame), sum(each.offsets for each in ask))
        return ask

    # Of a query

    def observer(self, ask: FetchRequestPartitions, now_ms: float) -> FetchObserver:
        """Return who is to be shown the partitions of the answer."""
        assert self.reads is not None
        return self.reads.tracker.observer(ask, now_ms)

    def read(self, count: int) -> None:
        """Take note of a Fetch response of so many bytes."""
        if self.reads is not None and self.reads.pressure is not None:
            self.reads.pressure.record_bytes(count)

    def held(self, start_ms: float, due_ms: float) -> None:
        """Take note that a Fetch response is held from when to when."""
        if self.reads is not None and self.reads.pressure is not None:
            self.reads.pressure.record_hold(start_ms, due_ms)

    def wait_ms(self, ask: OffsetLookup, now_ms: float) -> float:
        """Return how long the answer should still wait for the driver's report; 0: not at all."""
        return self.reads.lookups.wait_ms(ask, now_ms) if self.reads is not None else 0.0

    def answered(self, asked: Asked, version: int, frame: bytes, now_ms: float) -> bytes:
        """Return a ListOffsets or Produce response as the client may see it.

        Raises MalformedResponse.
        """
        if isinstance(asked, OffsetLookup):
            assert self.reads is not None
            self._plans(asked, now_ms)
            return self.reads.lookups.answered(asked, version, frame, now_ms)
        if isinstance(asked, tuple):
            self._appended(asked, version, frame, now_ms)
        return frame

    def _plans(self, ask: OffsetLookup, now_ms: float) -> None:
        if self._appends is None or self.reads is None or self.reads.has_fetched:
            return
        keys = {key for key, timestamp in ask.timestamps.items() if timestamp == LATEST}
        if keys:
            self._appends.plans(self._client_id, keys, now_ms)

    def _appended(self, ask: ProduceAsk, version: int, frame: bytes, now_ms: float) -> None:
        assert self._appends is not None
        sizes = {(each.topic, each.partition): each.offsets for each in ask}
        for topic, index, error_code, base in read_produce_response(version, frame):
            offsets = sizes.get((topic, index), 0)
            if error_code or base == NO_OFFSET or not offsets:
                continue
            tell: Callable[[str], None] = partial(
                self._appends.appended,
                self._client_id,
                partition=index,
                start=base,
                end=base + offsets,
                now_ms=now_ms,
            )
            if isinstance(topic, bytes):
                self._names.when_known(topic, tell)
            else:
                tell(topic)

    def close(self) -> None:
        """Let go: the connection is closed, or the client is followed no more."""
        if self.reads is not None:
            self.reads.lookups.closed()


class Following:
    """Who is followed, and by whom; asked once per client, connection and change of the rules."""

    def __init__(
        self,
        registry: QueryRegistry,
        backpressure: Backpressure,
        names: TopicNames,
        quotas: QuotaManager,
    ) -> None:
        self._registry = registry
        self._backpressure = backpressure
        self._names = names
        self._quotas = quotas
        self.appends: Appends | None = None
        """The pipelines, if there are any."""

    @property
    def generation(self) -> int:
        """Changes whenever `watch` may give another answer."""
        own = self.appends.generation if self.appends is not None else 0
        return self._registry.generation + self._quotas.generation + own

    def watch(
        self, identity: ClientIdentity, node_id: int | None, present: Watch | None, now_ms: float
    ) -> Watch | None:
        """Return who follows a client on a connection; what `present` knows is kept."""
        client_id = identity.client_id
        if client_id is None:
            return None
        reads = self._reads(identity, client_id, node_id, present, now_ms)
        appends = self.appends
        if appends is not None and not appends.follows(client_id):
            appends = None
        if reads is None and appends is None:
            return None
        return Watch(client_id, self._names, reads, appends)

    def _reads(
        self,
        identity: ClientIdentity,
        client_id: str,
        node_id: int | None,
        present: Watch | None,
        now_ms: float,
    ) -> Reads | None:
        pressure = self._backpressure.of_identity(identity, now_ms)
        if pressure is not None:
            self._registry.follow(client_id)
        query = self._registry.query_of(client_id)
        if present is not None and present.reads is not None:
            if query is present.reads.query:
                present.reads.follow(pressure)
                return present.reads
            present.close()
        return Reads(query, node_id, self._names, pressure, now_ms) if query is not None else None
