"""Checks each report completely, then applies it, in its turn and in steps: it may be long."""

import asyncio
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from metrics.clock import MS_PER_SECOND
from proxy.cluster.kafka_client import named
from proxy.slices import Slices
from proxy.wire.topic_partition import TopicPartition

from .events import EventKind
from .offset_ranges import OffsetRanges, SkipReason
from .owns import owns_all
from .partition import PartitionProgress
from .query import MAX_ERROR_SHOWN, MAX_PARTITIONS, LastBatch, QueryProgress
from .query_registry import QueryRegistry
from .query_scope import ALL_QUERIES, QueryScope
from .report import BatchRange, Refusal, Report, ReportRefused

MAX_SENDERS = 1000
"""How many listeners are remembered; the one that reported longest ago is forgotten first."""

MAX_REFUSED_RANGES = 16

_OWN_ID = "give each query a client id of its own: kafka.client.id, or client_options(name)"
_THIS_PROXY = "let the query read through this proxy, and report what it read"


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AcceptedReport:
    """What became of a report."""

    report: Report
    query: QueryProgress
    new_run: bool = False
    """Whether it is the first of its run that was accepted."""
    lost_reports: int = 0
    """How many reports of its sender, of this or another query, were lost just before it."""


@dataclass(slots=True)
class Sender:
    """One listener, by the numbers of its reports; it may start at any number."""

    last: int
    """The highest one that was accepted."""
    lost: int = 0
    """How many below it never came."""
    refused: OffsetRanges = field(default_factory=lambda: OffsetRanges(MAX_REFUSED_RANGES))
    """Higher ones that came and were refused: not lost."""

    def accept(self, number: int, *, counts_lost: bool) -> int:
        """Record a number that is accepted; return how many were lost before it, if that counts."""
        lost, next_number = 0, self.last + 1
        if counts_lost and number > next_number:
            lost = number - next_number - self.refused.covered(next_number, number)
        if self.refused.starts:
            self.refused.remove_below(number + 1)
        self.last = number
        self.lost += lost
        return lost


class ReportTurns:
    """The reports of all queries take turns; each is a generator as of ReportHandler.accepting."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self.turn = asyncio.Lock()
        """To be held, without a wait, by whoever has to come between two reports."""
        self._steps: Iterator[None] | None = None
        """Of the report whose turn it is."""
        self.is_applying = False
        """Whether a report was applied in part."""

    async def take(self, steps: Generator[bool, None, T], *, is_short: bool = False) -> T:
        """Take all steps and return what they return; raise what they raise.

        A caller that is cancelled leaves nothing applied in part. Where they are few, and it is
        nobody's turn, they are taken at once.
        """
        result: list[T] = []
        if is_short and self._steps is None:
            try:
                while True:
                    next(steps)
            except StopIteration as done:
                answer: T = done.value
                return answer
        async with self.turn:
            self._steps = marked = self._marking(steps, result)
            try:
                await self._slices.collect(marked)
            finally:
                self.finish()
                self._steps = None
        return result[0]

    def finish(self) -> None:
        """Apply the rest of a report that was applied in part."""
        if self.is_applying and self._steps is not None:
            for _ in self._steps:
                pass

    def _marking(self, steps: Generator[bool, None, T], result: list[T]) -> Iterator[None]:
        """Take the steps, record after each whether it changed anything, and what they return."""
        try:
            while True:
                self.is_applying = next(steps)
                yield
                self.is_applying = False
        except StopIteration as done:
            result.append(done.value)


@dataclass(slots=True, eq=False)
class ReportHandler:
    """Checks reports against what is known, and applies them.

    An end offset is refused when it is beyond the highest log end that was seen here, and that is
    up to date: the cluster was just asked, or a client of the query looked the end up through this
    proxy in this run, from which the driver has its offsets then.
    """

    _registry: QueryRegistry
    _knows_client: Callable[[str], bool]
    """Returns whether a client id has ever connected."""
    _senders: dict[str, Sender] = field(default_factory=dict)
    """By id, those that reported; the one that did last is last."""

    def refuse(self, error: ReportRefused) -> None:
        """Count a report that `parse_report` refused."""
        self._registry.report_results[error.reason] += 1

    def unknown_ends(self, report: Report) -> set[TopicPartition]:
        """Return the partitions whose log ends are to be asked for, and passed on to `accept`."""
        query = self._registry.query_of(self._client_of(report))
        partitions = query.partitions if query is not None else {}
        return {
            key
            for key, read in report.ranges.items()
            if (known := partitions.get(key)) is None
            or known.log.high_watermark is None
            or known.log.high_watermark < read.end
        }

    def accepting(
        self,
        report: Report,
        now_ms: float,
        now_s: float,
        ends: Mapping[TopicPartition, int] = MappingProxyType({}),
        scope: QueryScope = ALL_QUERIES,
    ) -> Generator[bool, None, AcceptedReport]:
        """Apply a report, step by step; `ends`: log ends that the cluster was just asked for.

        `scope` says which queries its sender may report on.

        Yields after each partition whether anything was changed already; between two steps anything
        may happen but another report. Raises ReportRefused: nothing but counts has changed then.
        """
        query: QueryProgress | None = None
        try:
            client_id = self._client_of(report)
            if not client_id:
                text = f"query {report.query_id} has neither a name nor a client id"
                fix = "name the query with queryName, or tell the listener its Kafka client id"
                raise ReportRefused(Refusal.NO_CLIENT, text, fix)
            ranges = report.ranges
            may_wait = len(ranges) > 1
            # Again at the end: queries may come or go between two steps.
            for checked in (ranges, {}) if may_wait else (ranges,):
                query = self._registry.query_of(client_id) or self._movable(report, scope, now_ms)
                if scope is not ALL_QUERIES:
                    _check_scope(report, client_id, query, scope)
                self._check(report, client_id, query, now_ms)
                known = query.partitions if query is not None else {}
                for key, read in checked.items():
                    _check_range(key, read, known.get(key), ends.get(key), report.run_id)
                    if may_wait:
                        yield False
        except ReportRefused as error:
            self.refuse(error)
            if error.reason is Refusal.NOT_ALLOWED:
                raise  # nor is anything counted for a query or a sender that is another's
            sender = self._senders.get(report.sender)
            if sender is not None and report.number is not None and report.number > sender.last:
                sender.refused.add(report.number, report.number + 1)
            if query is not None:
                query.refused_reports[error.reason] += 1
                if error.reason is Refusal.CLIENT_TAKEN:
                    who = f"another query, {report.name or 'unnamed'} ({report.query_id}),"
                    text = f"{who} says that it reads with client-id {client_id!r} too: {_OWN_ID}"
                    query.advise(EventKind.CLIENT_SHARED, text, now_ms)
            raise
        if query is None:
            query = self._registry.follow(client_id)
            assert query is not None, "there was room"
        elif query.client_id != client_id:
            self._registry.move(query, client_id)
        lost = 0 if report.number is None else self._count(report, report.number, query)
        new_run = False
        if not _is_past(report, query, now_ms):
            new_run = yield from self._applying(report, query, now_ms, now_s)
        elif report.batch is not None:
            yield from query.completing_late(report.run_id, report.ranges, now_ms, now_s)
        return AcceptedReport(report, query, new_run, lost)

    def _count(self, report: Report, number: int, query: QueryProgress) -> int:
        """Count an event that is accepted; return how many of its sender were lost before it."""
        sender = self._senders.pop(report.sender, None) or Sender(number - 1)
        if len(self._senders) >= MAX_SENDERS:
            del self._senders[next(iter(self._senders))]
        self._senders[report.sender] = sender
        # Numbers that are missing here may have gone to other members.
        lost = sender.accept(number, counts_lost=self._registry.owns is owns_all)
        self._registry.report_results["accepted"] += 1
        self._registry.report_results["lost"] += lost
        query.received += 1
        query.lost_reports += lost
        if report.batch is not None:
            query.rows += report.batch.rows
            if report.batch.execution_ms is not None:
                query.batch_seconds.observe(report.batch.execution_ms / MS_PER_SECOND)
        return lost

    def _client_of(self, report: Report) -> str:
        """Return the client id that a report's query reads with; empty: that is not known."""
        name = report.name or ""
        return report.client_id or self._registry.clients.get(name, name)

    def _movable(self, report: Report, scope: QueryScope, now_ms: float) -> QueryProgress | None:
        """Return what is known of the query, if it read with another client id in another run."""
        for query in self._registry.queries:
            names = query.client_id, query.reported_name or query.client_id
            if query.query_id == report.query_id and all(map(scope.covers, names)):
                is_held = query.settings is not None or query.reports_are_fresh(now_ms)
                return None if is_held else query
        return None

    def _check(
        self, report: Report, client_id: str, query: QueryProgress | None, now_ms: float
    ) -> None:
        """Check all but the ranges of the batch."""
        is_unknown = query is None or query.client_id != client_id
        if is_unknown and not self._registry.owns.client(client_id):
            text = f"client {client_id!r} has gone to another member of this proxy"
            raise ReportRefused(Refusal.OWNED_ELSEWHERE, text, "send the report again")
        sender = self._senders.get(report.sender)
        if sender is not None and report.number is not None and report.number <= sender.last:
            text = f"number {report.number} of this sender, or a later one, was taken in before"
            raise ReportRefused(Refusal.REPEATED, text)
        if is_unknown:
            self._check_unknown(report, client_id, query, now_ms)
        if query is not None:
            _check_run(report, client_id, query, now_ms)
        partitions = query.partitions if query is not None else {}
        ranges = report.ranges
        if len(partitions) + len(ranges.keys() - partitions.keys()) > MAX_PARTITIONS:
            text = f"with these the query has more than {MAX_PARTITIONS} partitions"
            raise ReportRefused(Refusal.MALFORMED, text, "split the query")

    def _check_unknown(
        self, report: Report, client_id: str, query: QueryProgress | None, now_ms: float
    ) -> None:
        if report.event == "progress" and not self._knows_client(client_id):
            fix = f"{_THIS_PROXY}, with {client_id!r} as its kafka.client.id; or add it to queries"
            name = report.name
            if name is not None and name != client_id and self._knows_client(name):
                fix = f"a client {name!r} has: say so in QuotaListener(clients=...); or {fix}"
            text = f"no client {client_id!r} has connected, and the configuration has none"
            raise ReportRefused(Refusal.UNKNOWN_QUERY, text, fix)
        self._registry.now_ms = now_ms
        if query is None and not self._registry.has_room():
            count = len(self._registry.queries)
            text = f"{count} queries are followed already, and none of them is gone"
            fix = "raise limits.max_client_entities, or stop queries"
            raise ReportRefused(Refusal.UNKNOWN_QUERY, text, fix)

    def _applying(
        self, report: Report, query: QueryProgress, now_ms: float, now_s: float
    ) -> Generator[bool, None, bool]:
        """Apply what is of the present run, or of a new one; return whether it is a new one."""
        query.last_heard_ms = now_ms  # first: one that is heard of is not forgotten meanwhile
        began_ms = now_ms - report.age_ms
        # A run that is idle, or lives, may have been going for long: it does not begin now.
        known_ms = began_ms if report.event in ("started", "progress") else None
        new_run = query.run_id != report.run_id
        if new_run:
            if query.query_id not in (None, report.query_id):
                text = f"query {report.query_id} takes over from {query.query_id}"
                query.add_event(EventKind.TAKEN_OVER, None, text, now_ms)
            yield from query.beginning_run(report.run_id, known_ms, now_ms)
        elif query.run_began_ms is None:  # it began before this proxy did
            query.run_began_ms = known_ms
        if report.event in ("started", "running"):
            query.run_sender = report.sender
        query.query_id = report.query_id
        query.reported_name = report.name or query.reported_name
        if report.trigger is not None:
            query.trigger_kind = report.trigger.kind
            query.trigger_interval_ms = report.trigger.interval_ms
        self._registry.relabel(query)
        if report.event == "running":
            if report.known_age_ms is not None:
                query.asks_spark = True
                if report.last_batch_id == query.last_batch_id:
                    query.confirm(now_ms - report.known_age_ms)
            return new_run
        query.last_report_ms = now_ms
        query.confirm(began_ms)
        query.idle = report.event == "idle"
        batch = report.batch
        if batch is not None:
            sender_lost = self._senders[report.sender].lost
            gap = _gap(query, report, sender_lost)
            query.sender, query.sender_lost = report.sender, sender_lost
            query.last_batch = LastBatch(batch.batch_id, batch.rows, batch.execution_ms, began_ms)
            yield from query.completing(batch, gap, now_ms, now_s)
        elif report.event == "terminated":
            error = report.error and report.error[:MAX_ERROR_SHOWN]
            yield from query.ending_run(error, now_ms)
        return new_run


def _check_scope(
    report: Report, client_id: str, query: QueryProgress | None, scope: QueryScope
) -> None:
    """Check that a sender may report on the query by all of its names that count."""
    configured = query.settings.name if query is not None and query.settings is not None else None
    names = {"client id": client_id, "name": report.name, "name in the configuration": configured}
    for what, name in names.items():
        if name is not None and not scope.covers(name):
            text = f"this token may not report on the query with the {what} {name!r}"
            fix = "use the token for that query, or add it to this one's queries in admin.tokens"
            raise ReportRefused(Refusal.NOT_ALLOWED, text, fix)


def _gap(query: QueryProgress, report: Report, sender_lost: int) -> SkipReason | None:
    """Return why a batch may begin behind the end of the one before; None: reports were lost."""
    if query.progress_id not in (None, report.query_id):
        return SkipReason.NEW_CHECKPOINT
    # A run that ends in a crash reports its last batch no more, and this proxy may have been away.
    began = query.run_batches == 0
    if began or query.sender != report.sender or query.sender_lost != sender_lost:
        return None
    # Numbers do not tell all that was lost: another member gets some of them, and a listener may
    # not have learned of a batch.
    batch, last = report.batch, query.last_batch_id
    was_lost = batch is not None and last is not None and batch.batch_id != last + 1
    return None if was_lost else SkipReason.UNEXPLAINED


def _is_past(report: Report, query: QueryProgress, now_ms: float) -> bool:
    """Return whether it is of a run that is known to be over, or of one that never was.

    Spark calls listeners at the start of a run at once, and of all else in order, but later: the
    last events of a run come after the start of the next when that follows at once. A driver that
    lives on without its queries may report that they run: while another one reports another run of
    the query, that is believed. A driver itself reports its latest run only.
    """
    is_heartbeat, is_starter = report.event == "running", report.sender == query.run_sender
    if report.run_id == query.run_id:
        return is_heartbeat and query.ended
    is_same_query = report.query_id == query.query_id
    if report.run_id in query.former_runs:
        return is_heartbeat or is_same_query
    if is_heartbeat:
        return is_same_query and not is_starter and query.reports_are_fresh(now_ms)
    return is_same_query and is_starter and report.event != "started"


def _check_run(report: Report, client_id: str, query: QueryProgress, now_ms: float) -> None:
    """Check that an event may come now, of this run and batch."""
    is_same = report.run_id == query.run_id
    is_former = report.run_id in query.former_runs
    if query.query_id not in (None, report.query_id):
        if is_same:
            text = f"run {report.run_id} is one of query {query.query_id}"
            raise ReportRefused(Refusal.IMPOSSIBLE, text, "report the ids that Spark gives")
        if report.event != "started" and query.reports_are_fresh(now_ms):
            holder = f"query {query.name!r} ({query.query_id})"
            text = f"{holder} reads with the client id {query.client_id!r}, and was heard lately"
            raise ReportRefused(Refusal.CLIENT_TAKEN, text, _OWN_ID)
    if report.event == "started" and (is_same or is_former):
        raise ReportRefused(Refusal.REPEATED, "the run has begun before")
    if report.event == "running":
        return
    batch, last = report.batch, query.last_batch_id
    if is_same and query.ended:
        reason = Refusal.REPEATED if report.event == "terminated" else Refusal.OUT_OF_ORDER
        raise ReportRefused(reason, "the run has ended before")
    if is_same and batch is not None and last is not None and batch.batch_id <= last:
        reason = Refusal.REPEATED if batch.batch_id == last else Refusal.OUT_OF_ORDER
        raise ReportRefused(reason, f"batch {batch.batch_id} after batch {last}")
    is_moved = report.query_id != query.query_id or client_id != query.client_id
    if is_former and not is_same and is_moved:
        text = f"run {report.run_id} is over: another one has begun"
        raise ReportRefused(Refusal.OUT_OF_ORDER, text, _OWN_ID)


def _check_range(
    key: TopicPartition,
    read: BatchRange,
    partition: PartitionProgress | None,
    asked_end: int | None,
    run_id: str,
) -> None:
    """Raise ReportRefused when a batch cannot have completed this of a partition."""
    start, end = read.start, read.end
    seen = partition.log.high_watermark if partition is not None else None
    is_fresh = asked_end is not None or (partition is not None and partition.client_saw_end)
    log_end = seen if asked_end is None or (seen is not None and seen > asked_end) else asked_end
    if is_fresh and log_end is not None and end > log_end:
        text = f"{named((key,))} ends at {end}, beyond the log's end {log_end}"
        raise ReportRefused(Refusal.IMPOSSIBLE, text, _THIS_PROXY)
    # Spark goes back with a log that is another one, if it is told not to fail on data loss.
    another = partition is not None and partition.may_be_another_log(
        end if start is None else start
    )
    if start is not None and end < start and not another:
        text = f"{named((key,))} ends at {end}, below its start {start}"
        raise ReportRefused(Refusal.IMPOSSIBLE, text, "report the batch's own offsets")
    done = partition.committed_to if partition is not None else None
    if partition is None or done is None or partition.run_id != run_id or another:
        return
    low = end if start is None else min(start, end)
    if low < done:
        again = start is not None and start < end <= done
        reason = Refusal.REPEATED if again else Refusal.OUT_OF_ORDER
        text = f"{named((key,))} begins at {low}, but this run has completed all below {done}"
        raise ReportRefused(reason, text)
