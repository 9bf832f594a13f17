"""Wires what concerns Spark queries: reports, progress, commits, backpressure, pipelines."""

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Generator, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain

from prometheus_client import CollectorRegistry
from structlog import get_logger

from metrics import Instruments
from metrics.clock import MS_PER_SECOND, clock_ms
from metrics.exposition import MetricTableCollector
from proxy.backpressure.backpressure import OF_BOUNDS, Backpressure
from proxy.backpressure.backpressure_record import BOUND_RECORDS
from proxy.backpressure.query_advice import OUTSIDE, update_query_advice
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.upstream import UpstreamError
from proxy.pipeline.graph import PipelineSettings
from proxy.pipeline.running import OF_NODES, OF_PIPELINES, RunningPipelines
from proxy.pipeline.running_pipeline import RunningPipeline
from proxy.progress.committer import Committer
from proxy.progress.events import ALARMS, ProgressEvent
from proxy.progress.log_offset_poller import LogOffsetPoller
from proxy.progress.progress_collector import ProgressMetricsCollector
from proxy.progress.progress_records import ReadRecords
from proxy.progress.query import FollowedQuery, ProgressSettings
from proxy.progress.query_registry import Ownership, QueryRegistry
from proxy.progress.report import Report, ReportableQueries, ReportRefused, parse_report
from proxy.progress.report_turns import ReportScheduler
from proxy.progress.topics import TopicNames
from proxy.queries.following import FollowedClientServices
from proxy.queries.record_owner import OwnedDifference, OwnedRecords, read_owned
from proxy.quota.manager import QuotaManager
from proxy.quota.rules import Rule
from proxy.relay.intercept_queue import InterceptQueue
from proxy.slices import TimeSlicer
from proxy.state import Document, StateError, Store
from proxy.tasks import wait_at_most
from proxy.wire.topic_partition import TopicPartition

QUERIES_TICK_S = 1.0
"""Between two looks for alarms, bounds that are due to move, and records of progress to write."""

WRITE_PAUSE_S = 0.02
"""At least so long between two writes. What was advertised to a driver is written at once
otherwise: a proxy that is killed must not forget it."""

WRITTEN_LIMIT_S = 2.0
"""How long the answer to a stage's report on a batch waits until that is written."""

RESOLVE_PAUSE_S = 1.0
"""Between two look-ups of topic ids that the cluster did not know."""

RESOLVE_AT_ONCE = 100
"""So many topic ids are asked for in one request: a client may name 20,000 that do not exist."""

RESOLVE_TRIES = 5
"""After so many look-ups an id is given up: a topic that was just made is known a little later."""

PARSED_HERE_BYTES = 16 * 1024
"""A longer report is parsed in a thread: one of 10,000 partitions takes some 30 ms."""

LONG_REST = 4.0
"""After a long one the next is parsed when so many times the time that it took is over: in some of
its steps no other thread goes on."""

LOOK_UP_TIMEOUT_S = 2.0
"""How long a report waits for the log ends that it goes beyond, and before that for the names of
topics; then what is known must do."""

FLUSH_TIMEOUT_S = 3.0
"""How long the last commits may take when the proxy stops, or lets queries go; and, there, the last
writes."""

REWRITE_PAUSE_S = 0.2
"""Between two tries to write what is let go."""

_log = get_logger(__name__)


class Queries:
    """All that this member does for Structured Streaming queries.

    Where clients are shared among members, only for those that it owns: `load` says whose these
    are, `assign` and `revoke` what has changed. Of what another member owns nothing is known here.

    `knows_client` returns whether a client id has connected lately; `metrics` gets collectors. For
    `unshown` see FollowedClientServices.
    """

    def __init__(
        self,
        progress: ProgressSettings,
        pipelines: Iterable[PipelineSettings],
        quotas: QuotaManager,
        bootstrap: Bootstrap,
        instruments: Instruments,
        *,
        metrics: CollectorRegistry,
        knows_client: Callable[[str], bool],
        unshown: InterceptQueue,
    ) -> None:
        self._quotas, self._knows_client = quotas, knows_client
        self._to_write = asyncio.Event()
        """Set when there are records that are to be written at once."""
        self._written: asyncio.Event | None = None
        """Set when what has changed by now was written, or could not be; None: nobody writes."""
        on_change = self._to_write.set
        self.registry = QueryRegistry(progress, _log_event, self._knows)
        self.backpressure = Backpressure(quotas, on_change)
        self.running = RunningPipelines(
            *(pipelines, self.registry, self.backpressure, quotas, instruments),
            on_change=on_change,
        )
        self.committer = Committer(self.registry, partial(KafkaClient, bootstrap))
        self.log_offset_poller = LogOffsetPoller(self.registry, KafkaClient(bootstrap))
        self._unwritten = [
            each.unwritten for each in (self.registry, self.backpressure, self.running)
        ]
        self._client = KafkaClient(bootstrap, limit_s=None)
        self._names_wanted = asyncio.Event()
        self._names = TopicNames(self._names_wanted.set)
        self._name_tries: dict[bytes, int] = {}
        """By topic id that is still wanted: how many look-ups did not find it."""
        self._names_looked_up = asyncio.Event()
        self._slices = TimeSlicer()
        self._turns = ReportScheduler(self._slices)
        self.following = FollowedClientServices(
            *(self.registry, self.backpressure, self._names, quotas, self.running, self._turns),
            unshown,
        )
        self._store: Store | None = None
        self._writing = asyncio.Lock()
        self._handing_over = asyncio.Lock()
        self._parsing, self._parse_from_ms = asyncio.Lock(), 0.0
        tables = (
            (OF_BOUNDS, self.backpressure.shown),
            (OF_PIPELINES, self.running.shown),
            (OF_NODES, self.running.shown_nodes),
        )
        metrics.register(MetricTableCollector(tables, clock_ms, progress.max_queries))
        metrics.register(ProgressMetricsCollector(self.registry, clock_ms, progress.max_queries))

    def load(self, store: Store, owns: Ownership) -> None:
        """Read what an earlier process wrote there of these; write there from now on.

        Call it once, before anything is known of any client.
        """
        self.resume(store)
        read = read_owned(store, owns, self.registry.client_of_record)
        self._take(*read, owns, is_handed_over=False)

    async def assign(self, store: Store, *, owns: Ownership) -> None:
        """Resume what these own more than before, from what is written there of it.

        Call it when those who had it have let it go: they write nothing of it any more. Raises
        StateError: then nothing has changed.
        """
        async with self._handing_over:
            came = OwnedDifference(owns, self.registry.owns, is_others=False)
            client_of = self.registry.client_of_record
            read = await asyncio.to_thread(read_owned, store, came, client_of)
            self._take(*read, owns, is_handed_over=True)

    async def revoke(self, *, owns: Ownership) -> bool:
        """Commit and write what is due of what these do not own any more, and forget it.

        From the start on nothing of it is followed, and reports on it are refused. Return whether
        all went out in 2 * FLUSH_TIMEOUT_S: what did not is lost, as if this process had died.
        """
        async with self._handing_over:
            async with self._turns.turn:
                self.running.revoke(owns)
                gone = self._own(owns)
            groups = {query.commit_group for query in gone if query.commit_group is not None}
            try:
                is_done = await self.committer.revoke(groups, FLUSH_TIMEOUT_S)
                is_done &= await self._write_leaving()
            finally:  # without a wait since the last write
                is_kept = self._forget_leaving()
            is_done &= is_kept
        if not is_done:
            _log.error("not all was committed and kept of what another member has now")
        return is_done

    async def _write_leaving(self) -> bool:
        """Write what is due, in tries as long as there is time; return whether all was written."""
        until_ms = clock_ms() + FLUSH_TIMEOUT_S * MS_PER_SECOND
        while not await self._write():
            if self._store is None or clock_ms() > until_ms:
                return False
            await asyncio.sleep(REWRITE_PAUSE_S)
        return True

    def _own(self, owns: Ownership) -> list[FollowedQuery]:
        """Follow the queries and bounds of these clients only; return the queries that leave."""
        self.backpressure.own(owns, clock_ms())
        return self.registry.own(owns)

    def _forget_leaving(self) -> bool:
        """Write nothing more of what has left; return whether all of it was written."""
        parts = self.registry, self.backpressure.unwritten, self.running.unwritten
        are_kept = [each.forget_leaving() for each in parts]
        return all(are_kept)

    def _take(
        self, progress: ReadRecords, records: OwnedRecords, owns: Ownership, *, is_handed_over: bool
    ) -> None:
        """Follow what is of these, from these records; of others nothing is left."""
        self._own(owns)
        self._forget_leaving()
        for problem in self.registry.load(progress):
            _log.warning("progress not taken up", problem=problem)
        for problem in self.backpressure.load(records[BOUND_RECORDS.namespace], clock_ms()):
            _log.warning("backpressure not taken up", problem=problem)
        for client_id in self.backpressure.clients:
            self.registry.follow(client_id)  # its reports may come before it connects
        self.running.assign(chain(*records.values()), owns, is_handed_over=is_handed_over)

    def resume(self, store: Store) -> None:
        """Write to a store again after `close`, beginning with what has changed meanwhile."""
        self._store = self.running.store = store

    def update(self, progress: ProgressSettings, pipelines: Iterable[PipelineSettings]) -> None:
        """Follow the queries and pipelines of another configuration."""
        self.registry.update(progress)
        self.running.update(pipelines)

    def works(self) -> Iterable[Callable[[], Coroutine[None, None, None]]]:
        """Return what is to run until it is cancelled."""
        runs = (self.committer.run, self.log_offset_poller.run, self.running.run)
        return (*runs, self._resolve_names, self._tick, self._write_on)

    async def close(self) -> None:
        """Commit and write what is due, and write nothing more: the store may be closed then."""
        await self.committer.flush(FLUSH_TIMEOUT_S)
        self._client.close()
        self.running.store = None
        await self._write()
        self._store = None

    async def accept(self, raw: bytes, scope: ReportableQueries) -> Document:
        """Record a report on a query of a scope; return what came of it. Raises ReportRefused."""
        try:
            is_short = len(raw) <= PARSED_HERE_BYTES
            report = parse_report(raw) if is_short else await self._parse_long(raw)
        except ReportRefused as error:
            self.registry.refuse(error)
            raise
        if self._names.queue:
            await self._await_names()
        unknown = self.registry.unknown_ends(report)
        if not is_short:
            await asyncio.sleep(0)  # there may be thousands: other work comes between two walks
        is_stage = self._is_stage(report.client_id, report.name)
        if is_stage:
            unknown |= self.running.lost_ends(report)
        ends = await self._ends(unknown) if unknown else {}
        if self.following.unshown.waiting:
            await self._slices.collect(self.following.unshown.showing())
        steps = self._accepting(report, ends, scope)
        taken = await self._turns.take(steps, is_short=len(report.ranges) <= 1)
        if is_stage and report.batch is not None and self._written is not None:
            # Who is told that it was taken does not send it again, to whoever has the ledger then.
            self._to_write.set()
            await wait_at_most(WRITTEN_LIMIT_S, self._written.wait())
        return taken

    async def _parse_long(self, raw: bytes) -> Report:
        async with self._parsing:
            await asyncio.sleep((self._parse_from_ms - clock_ms()) / MS_PER_SECOND)
            began_ms = clock_ms()
            try:
                return await asyncio.to_thread(parse_report, raw)
            finally:
                self._parse_from_ms = clock_ms() + LONG_REST * (clock_ms() - began_ms)

    def _accepting(
        self, report: Report, ends: Mapping[TopicPartition, int], scope: ReportableQueries
    ) -> Generator[bool, None, Document]:
        """Apply a report; return what came of it. See QueryRegistry.accepting."""
        now_ms = clock_ms()
        accepted = yield from self.registry.accepting(report, now_ms, time.time(), ends, scope)
        query = accepted.query
        pressed = self.backpressure.record_report(accepted, now_ms)
        yield True
        if accepted.new_run or self._is_stage(query.client_id, query.name):
            self.running.reported(accepted, now_ms, ends)
        if report.run_id == query.run_id:
            self._advise(query, pressed.rule if pressed else None, now_ms)
        return {
            "accepted": True,
            "lost_reports": accepted.lost_reports,
            "advice": [event.text for event in query.advice.values()] if query.advice else [],
            "information": [OUTSIDE] if query.is_outside else [],
            "rate": pressed.rate if pressed else None,
            "bound": pressed.bound if pressed else None,
        }

    def _knows(self, client_id: str) -> bool:
        # Those of a stage may have connected to the member that had it before.
        return self._knows_client(client_id) or self._is_stage(client_id)

    def _is_stage(self, *names: str | None) -> bool:
        return not self.running.stages.keys().isdisjoint(names)

    def _advise(self, query: FollowedQuery, rule: Rule | None, now_ms: float) -> None:
        """Give advice anew, by a walk over all rules, if what it follows of has changed."""
        table, name = self._quotas.table, query.reported_name or ""
        knows = self._knows_client
        basis = (
            *(table, rule, self.running.generation, query.settings, query.run_id),
            *(query.client_id, name, knows(query.client_id), knows(name), query.has_read),
            *(query.trigger_kind, query.trigger_interval_ms),
        )
        if basis == query.advised_by:
            return
        query.advised_by = basis
        is_followed = query.settings is not None or self.running.follows(query.client_id)
        update_query_advice(
            query, table, rule, is_followed=is_followed, knows_client=knows, now_ms=now_ms
        )

    async def _await_names(self) -> None:
        """Wait until each topic of which only the id is known was looked up once.

        Else a report could pass what its query's executors wrote and read before it.
        """
        new = set(self._names.wanted()) - self._name_tries.keys()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                while new:
                    await self._names_looked_up.wait()
                    new &= set(self._names.wanted()) - self._name_tries.keys()

    async def _ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Return log ends that a report goes beyond; none if the cluster does not answer."""
        try:
            async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                return await self.log_offset_poller.look_up(partitions)
        except (UpstreamError, TimeoutError) as error:
            _log.warning("log ends not looked up for a report", error=str(error) or "no answer")
            return {}

    def progress(self) -> Iterable[FollowedQuery]:
        """Return the queries that are followed."""
        return self.registry.queries

    def pressure(self) -> Mapping[str, Document]:
        """Return what backpressure does to each query that has it, by its label."""
        now_ms = clock_ms()
        return {
            query.name: pressed.document(now_ms)
            for query in self.registry.queries
            for pressed in self.backpressure.of_client(query.client_id)
        }

    def pipelines(self) -> Iterable[RunningPipeline]:
        """Return the pipelines that are at work."""
        return self.running.running.values()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(QUERIES_TICK_S)
            now_ms = clock_ms()
            try:
                await self._slices.collect(self.registry.sweeping(now_ms))
                self.backpressure.tick(now_ms)
            except Exception as error:  # a defect of ours must not end the proxy
                _log.error("unexpected error about queries", exc_info=error)

    async def _write_on(self) -> None:
        self._written = asyncio.Event()
        while True:
            await wait_at_most(QUERIES_TICK_S, self._to_write.wait())
            self._to_write.clear()
            written, self._written = self._written, asyncio.Event()
            await self._write()
            written.set()
            await asyncio.sleep(WRITE_PAUSE_S)

    async def _write(self) -> bool:
        """Write what has changed; what can't be written is tried again. Return whether it was."""
        async with self._writing:
            while (store := self._store) is not None:
                changes = [unwritten.take() for unwritten in self._unwritten]
                records = [record for changed, _ in changes for record in changed]
                deleted = [key for _, gone in changes for key in gone]
                if not records and not deleted:
                    return True
                try:
                    await store.write(records, delete=deleted)
                except StateError as error:
                    for unwritten in self._unwritten:
                        unwritten.give_back()
                    _log.error("progress not kept, trying again", error=str(error))
                    return False
        return False

    async def _resolve_names(self) -> None:
        while True:
            await self._names_wanted.wait()
            self._names_wanted.clear()
            while wanted := self._names.wanted():
                try:
                    for at in range(0, len(wanted), RESOLVE_AT_ONCE):
                        asked = wanted[at : at + RESOLVE_AT_ONCE]
                        self._names.resolved(await self._client.topic_names(asked))
                except UpstreamError as error:
                    _log.warning("topic names not looked up, trying again", error=str(error))
                else:
                    before, wanted = self._name_tries, self._names.wanted()
                    self._name_tries = {each: before.get(each, 0) + 1 for each in wanted}
                    self._names_looked_up.set()
                    self._names_looked_up.clear()
                    tries = self._name_tries.items()
                    unknown = {each for each, count in tries if count >= RESOLVE_TRIES}
                    self._names.unresolvable(unknown)
                    if unknown:
                        text = "topics without a name, what was seen of them is lost"
                        _log.warning(text, ids=len(unknown), seen=self._names.lost)
                if self._names.wanted():
                    await asyncio.sleep(RESOLVE_PAUSE_S)


def _log_event(event: ProgressEvent) -> None:
    log = _log.warning if event.kind in ALARMS else _log.info
    about = {"query": event.query, "topic": event.topic, "partition": event.partition}
    log(event.text, kind=str(event.kind), **about)
