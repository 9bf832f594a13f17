"""The relay's interceptor: follow what clients of queries read, and those of pipelines write."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from proxy.backpressure.backpressure import Backpressure, ConnectionLookups, QueryBackpressure
from proxy.pipeline.running import RunningPipelines
from proxy.progress.query_registry import QueryRegistry
from proxy.progress.report_turns import ReportScheduler
from proxy.progress.topics import TopicNames
from proxy.progress.tracker import QueryReader
from proxy.queries.coalesced_fetches import CoalescedFetchRecorder, UnrecordedFetch
from proxy.quota.entities import ClientIdentity
from proxy.quota.manager import QuotaManager
from proxy.relay.intercept_queue import InterceptQueue
from proxy.relay.interceptor import InterceptedRequest, NotOwnerError
from proxy.wire.apis import FETCH, LIST_OFFSETS, PRODUCE
from proxy.wire.fetch import NO_OFFSET, read_fetch_request
from proxy.wire.fetch_response import FetchObserver
from proxy.wire.frames import RequestHead
from proxy.wire.list_offsets import (
    LATEST,
    LookupRequest,
    list_offsets_response,
    read_list_offsets_request,
)
from proxy.wire.produce import ProducedPartition, read_produce_request, read_produce_response

APPLIED_WAIT_MS = 500.0
"""How long a driver's answer waits for reports to be applied: each takes some 0.1 s at the most."""

SLICES_MS = 1.0
"""Between two slices in which what was fetched is shown before a driver's answer."""

SENT_ON_MS = 30_000.0
"""For so long look-ups of a driver are not answered, however often owners change; then its query
reads without a bound. Clients of Spark, of executors as well, give up after default.api.timeout.ms,
60 s. Slots of a member that died have another owner after a quarter of that."""

FORGOTTEN_MS = 5_000.0
"""A driver that asked for nothing in this time begins anew: it was answered elsewhere. One that is
let go asks again within a second or two."""

MAX_VISITORS = 10_000


class RedirectedDrivers:
    """The drivers of queries that another member owns.

    What is advertised to them binds the batches of their query, and its owner alone knows what was.
    Here they would be told the ends of the logs, and plan all that is there. So a look-up of an end
    is not answered, and its connection is let go, as by a broker that restarts: the client looks up
    where that is, which is at the owner, and asks there.
    """

    def __init__(self) -> None:
        self._refused: dict[str, tuple[float, float]] = {}
        """By client id: when it was sent on first, and last."""

    def sends_on(self, client_id: str, ask: LookupRequest, now_ms: float) -> bool:
        """Return whether a driver is to ask elsewhere; if not, its look-up is to be answered."""
        if LATEST not in ask.timestamps.values():
            return False
        first_ms, latest_ms = self._refused.pop(client_id, (now_ms, now_ms))
        if now_ms - latest_ms > FORGOTTEN_MS:
            first_ms = now_ms
        if len(self._refused) >= MAX_VISITORS:
            del self._refused[next(iter(self._refused))]
        self._refused[client_id] = first_ms, now_ms
        return now_ms - first_ms < SENT_ON_MS


@dataclass(frozen=True, slots=True)
class FollowedClientServices:
    """What the followed clients have in common."""

    registry: QueryRegistry
    backpressure: Backpressure
    names: TopicNames
    quotas: QuotaManager
    pipelines: RunningPipelines
    turns: ReportScheduler
    unshown: InterceptQueue
    """What clients have fetched, and waits to be recorded. All of it is before a report is applied
    or a driver is answered."""
    visits: RedirectedDrivers = field(default_factory=RedirectedDrivers)

    def client(self, identity: ClientIdentity, node_id: int | None) -> "FollowedConnection":
        """See Interceptor."""
        return FollowedConnection(self, identity, node_id)


@dataclass(slots=True, eq=False)
class FollowedConnection:
    """A client on one connection: what it reads for a query, what it writes, both or neither."""

    _all: FollowedClientServices
    _identity: ClientIdentity
    _node_id: int | None
    _generation: int = -1
    """Of all that says who is followed, when it was last looked up."""
    _writes: bool = False
    _visits: bool = False
    """Whether its rule is adaptive, and another member owns it."""
    _fetches: bool = False
    """Whether a visitor has fetched: it is no driver's then."""
    reader: QueryReader | None = None
    lookups: ConnectionLookups | None = None
    """Like `reader`, None as long as the client reads for no query: for `lookups.query`."""
    _looked_up_first: bool = False
    """Whether it looked up offsets before it fetched, or maybe did. Streaming executors never do:
    their batches are planned. A batch query's do, to find out what to read."""
    pressure: QueryBackpressure | None = None
    """On its query; None when no adaptive rule bounds the client."""
    run: CoalescedFetchRecorder = field(init=False)
    """Its Fetches that wait to be recorded."""

    def __post_init__(self) -> None:
        self.run = CoalescedFetchRecorder(self._all.unshown)

    @property
    def client_id(self) -> str:
        """What the client calls itself; empty where it does not say."""
        return self._identity.client_id or ""

    def wants(self, api_key: int, now_ms: float) -> bool:
        """See ClientInterceptor."""
        parts = self._all
        generation = parts.registry.generation + parts.quotas.generation
        generation += parts.pipelines.generation
        if generation != self._generation:
            self._generation = generation
            self._follow(now_ms)
        if api_key == PRODUCE:
            return self._writes
        if self.lookups is None:
            self._looked_up_first |= api_key == LIST_OFFSETS
            self._fetches |= api_key == FETCH
            return self._visits and api_key == LIST_OFFSETS and not self._fetches
        return True

    def request(self, head: RequestHead, frame: memoryview, now_ms: float) -> InterceptedRequest:
        """See ClientInterceptor."""
        version, body, lookups = head.api_version, frame[head.header_end :], self.lookups
        if head.api_key == PRODUCE:
            self.run.record()
            appended = read_produce_request(version, body)
            written = partial(self._all.pipelines.appended, self.client_id)
            sent = partial(self._all.pipelines.sent, self.client_id, len(frame))
            return _InterceptedProduce(appended, written, sent, self._all.names)
        if lookups is None or self.reader is None:
            self.check_here(read_list_offsets_request(version, body, head.correlation_id), now_ms)
            return InterceptedRequest()
        if head.api_key != LIST_OFFSETS:
            fetch = read_fetch_request(version, body)
            lookups.is_executor = True  # from now on
            return _InterceptedFetch(
                *(self.reader, self._all.names, fetch), client=self, sent_ms=now_ms, run=self.run
            )
        ask = read_list_offsets_request(version, body, head.correlation_id)
        self._looked_up_first |= not lookups.is_executor
        if self.answers_lookups(now_ms):
            offsets = self.reader.fetched_logs.offsets(ask, now_ms)
            if offsets is not None:
                return _AnsweredLookup(list_offsets_response(version, head.correlation_id, offsets))
        self.run.record()
        is_seen = self._writes or self.pressure is not None
        turns = self._all.turns if is_seen and not lookups.is_executor else None
        pipelines = self._all.pipelines if self._writes else None
        return _InterceptedLookup(ask, lookups, self._all.unshown.showing(), turns, self, pipelines)

    def check_here(self, ask: LookupRequest, now_ms: float) -> None:
        """Raise NotOwnerError for the look-up of a driver that another member owns."""
        every = self._all
        is_here = every.registry.owns.client(self.client_id)
        if is_here or not every.backpressure.is_adaptive(self._identity):
            return
        if every.visits.sends_on(self.client_id, ask, now_ms):
            raise NotOwnerError

    def answers_lookups(self, now_ms: float) -> bool:
        """Return whether look-ups are answered here: of executors of a streaming query that lives.

        A batch query may read with the client id of a query that is followed, and takes what it
        looks up for the end of what it reads. Only streaming queries have a listener's reports.
        """
        lookups = self.lookups
        return (
            self._all.registry.answers_lookups
            and lookups is not None
            and lookups.is_executor
            and not self._looked_up_first
            and lookups.query.reports_are_fresh(now_ms)
        )

    def gated(self, start_ms: float, now_ms: float) -> None:
        """See ClientInterceptor."""
        if self.wants(FETCH, now_ms) and self.pressure is not None:
            self.pressure.record_hold(start_ms, now_ms)

    def close(self) -> None:
        """See ClientInterceptor."""
        self.run.record()
        if self.lookups is not None:
            self.lookups.closed()

    def _follow(self, now_ms: float) -> None:
        """Find out what the client does now; what is known of the query it reads for is kept."""
        every, client_id, lookups = self._all, self._identity.client_id, self.lookups
        if client_id is None:
            return
        self._writes = every.pipelines.follows(client_id)
        owned = every.registry.owns.client(client_id)
        self._visits = not owned and every.backpressure.is_adaptive(self._identity)
        self.pressure = every.backpressure.of_identity(self._identity, now_ms)
        if self.pressure is not None:
            every.registry.follow(client_id)
        query = every.registry.query_of(client_id)
        if lookups is not None:
            if lookups.query is query:
                lookups.follow(self.pressure)
                return
            self._fetches |= lookups.is_executor
            lookups.closed()
        self.reader = self.lookups = None
        if query is not None:
            self.reader = QueryReader(query, self._node_id)
            self.lookups = ConnectionLookups(now_ms, query=query)
            self.lookups.follow(self.pressure)


@dataclass(slots=True, eq=False, kw_only=True)
class _InterceptedFetch(UnrecordedFetch, InterceptedRequest):
    client: FollowedConnection

    takes_whole = False

    def read_from(self, start: int) -> None:
        self.ask.read_from(start)

    def sent(self, *, at_once: bool = False) -> None:
        if at_once:
            self.record_alone()
        else:
            self.run.asked(self)

    def measured(self, count: int) -> None:
        if self.client.pressure is not None:
            self.client.pressure.record_bytes(count)

    def held(self, start_ms: float, due_ms: float) -> None:
        if self.client.pressure is not None:
            self.client.pressure.record_hold(start_ms, due_ms)

    def observer(self, now_ms: float) -> FetchObserver:
        logs = self.reader.fetched_logs
        logs.begin_response(self.sent_ms)
        self.logs = logs if self.client.answers_lookups(now_ms) else None
        self.answered_ms = now_ms
        return self


@dataclass(slots=True, eq=False)
class _AnsweredLookup(InterceptedRequest):
    answer: bytes


@dataclass(slots=True, eq=False)
class _InterceptedLookup(InterceptedRequest):
    ask: LookupRequest
    lookups: ConnectionLookups
    show_fetched: Iterator[None]
    """See InterceptQueue; not begun where `turns` is None."""
    turns: ReportScheduler | None
    """What its answer is to see all of; None when it sees nothing of reports."""
    client: FollowedConnection
    pipelines: RunningPipelines | None
    """What is to be prepared for a driver's answer; None when the client writes nothing."""
    _since_ms: float | None = None
    """Since when the answer waits for a report to be applied."""

    def wait_ms(self, now_ms: float) -> float:
        if self.turns is None:
            return self.lookups.wait_ms(self.ask, now_ms)
        if not self.turns.slices.take(self.show_fetched, []):
            return SLICES_MS
        if self.turns.is_applying:
            if self._since_ms is None:
                self._since_ms = now_ms
            left_ms = self._since_ms + APPLIED_WAIT_MS - now_ms
            if left_ms > 0:
                return left_ms
            self.turns.finish()
        return self.lookups.wait_ms(self.ask, now_ms)

    def response(self, version: int, frame: bytes, now_ms: float) -> bytes:
        if self.turns is not None:
            self.turns.finish()  # another report may have come since
        if not self.lookups.is_executor:
            self.client.check_here(self.ask, now_ms)  # it was let go since
            if self.pipelines is not None:
                asked = self.ask.timestamps.items()
                if keys := {key for key, timestamp in asked if timestamp == LATEST}:
                    self.pipelines.plans(self.client.client_id, keys, now_ms)
        return self.lookups.answered(self.ask, version, frame, now_ms)


@dataclass(slots=True, eq=False)
class _InterceptedProduce(InterceptedRequest):
    asked: tuple[ProducedPartition, ...]
    appended: Callable[..., None]
    sent_records: Callable[[int], None]
    names: TopicNames

    def response(self, version: int, frame: bytes, now_ms: float) -> bytes:
        sizes, records = {(each.topic, each.partition): each.offsets for each in self.asked}, 0
        for topic, index, error_code, base in read_produce_response(version, frame):
            offsets = sizes.get((topic, index), 0)
            if error_code or base == NO_OFFSET or not offsets:
                continue
            written = index, base, base + offsets, now_ms
            self.names.when_known(topic, self.appended, *written)
            records += offsets
        self.sent_records(records)  # a request may claim any number
        return frame
