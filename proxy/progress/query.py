"""One query: its settings, its runs, its partitions, and what happened to it."""

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from metrics.exposition import PREFIX
from metrics.instruments import COMPLETION_BUCKETS_S
from metrics.lock_free import HistogramChild
from proxy.state import Json, Record
from proxy.wire.topic_partition import TopicPartition

from .events import ChangeLog, OnEvent, ProgressEvent, ProgressEventKind
from .offset_ranges import SkipReason
from .partition import PartitionProgress
from .progress_records import FORMAT, PartitionProgressRecord
from .report import (
    OWN_ID,
    BatchRange,
    BatchReport,
    RefusalReason,
    Report,
    ReportRefused,
    TriggerKind,
)

MAX_PARTITIONS = 10_000
"""How many partitions of one query are followed."""

MAX_FORMER = 16
"""How many runs that are over are remembered, so that late reports of them are known."""

LIVE_MS = 60_000.0
"""A query of which nothing was seen for so long is silent."""

LATE_REPORTS_MS = 30_000.0
"""Reports of a query that runs, and heartbeats, should not be older: these come each second."""

LEFT_AFTER_BATCHES = 3
"""A partition that so many batches of a run did not name, and nobody asked for, is let go."""

READ_BATCHES = 2
"""Of so many batches reported here the last was planned through this proxy, the first maybe not."""

STUCK_AFTER_MS = 300_000.0
"""By default, how long nothing may complete while there is lag."""

MAX_QUERIES = 10_000

MAX_OTHER_PARTITIONS = 100_000
"""Of all queries together that no configuration names; each takes some 2 KB."""

MAX_ERROR_SHOWN = 1000
"""Characters of a failure, of a run or of a commit: as many as the listener sends."""

BATCH_SECONDS = PREFIX + "query_batch_seconds"
"""The metric of how long batches take."""

_SPARK_IS_SILENT = (
    "the listener lives, but Spark does not tell it which batches are done, so lag and progress "
    "are older than they look (report_age_s): see whether the driver is short of CPU or memory, "
    "or other listeners are slow"
)
_LISTENER_IS_SILENT = (
    "the query reads, but its listener is not heard, so lag and progress are older than they look "
    "(report_age_s): see what the driver's logger quota_listener says, and whether the driver "
    "reaches the proxy's admin address"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySettings:
    """One query of the configuration."""

    name: str
    client_id: str
    commit_group: str | None = None
    """The consumer group that completed offsets are committed to; None: to none."""
    stuck_after_ms: float = STUCK_AFTER_MS
    """Above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSettings:
    """The configured queries, no two with one name, client id or group: `proxy.config` checks."""

    queries: tuple[QuerySettings, ...] = ()
    max_queries: int = MAX_QUERIES
    """With those that only reports or rules name, 1 or more; configured ones are all followed."""
    max_other_partitions: int = MAX_OTHER_PARTITIONS
    """Of the queries that are not configured, together."""
    answers_lookups: bool = True
    """Whether look-ups of executors are answered from what was fetched just before."""


@dataclass(slots=True)
class PartitionCapacity:
    """How many more partitions may be followed of the queries that are not configured."""

    left: int = MAX_OTHER_PARTITIONS


@dataclass(slots=True)
class GroupCommitStatus:
    """How committing to a query's group goes: when it last did, and why it failed since, if so."""

    last_ms: float | None = None
    error: str | None = None
    backwards: int = 0
    """How many partitions were moved back, each for a reset of its query or a topic made anew."""
    due: dict[TopicPartition, None] = field(default_factory=dict)
    """Partitions whose completed offset may have changed."""


class QueryState(StrEnum):
    """What a query is doing."""

    RUNNING = "running"
    IDLE = "idle"
    """Its last report said that there was nothing to do."""
    ENDED = "ended"
    FAILED = "failed"
    SILENT = "silent"
    """Neither ended nor heard of, nor reading, for LIVE_MS."""


@dataclass(frozen=True, slots=True)
class LastBatch:
    """The batch that was reported last."""

    batch_id: int
    rows: int
    duration_ms: int | None
    """From the trigger to the end of its work."""
    ended_ms: float


class FollowedQuery(ChangeLog):
    """What the client of one query was given and has completed. Times: monotonic milliseconds."""

    def __init__(
        self,
        client_id: str,
        on_event: OnEvent,
        changed: Callable[["FollowedQuery", TopicPartition], None],
        room: PartitionCapacity | None = None,
    ) -> None:
        super().__init__(client_id, on_event, partial(changed, self))
        self._room = room or PartitionCapacity()
        self.client_id = client_id
        self.settings: QuerySettings | None = None
        self.commit = GroupCommitStatus()
        self.reported_name: str | None = None
        self.query_id: str | None = None
        """Of the checkpoint: who reads with the client id."""
        self.progress_id: str | None = None
        """Of the query whose batches completed what the partitions say: another one from when a
        query takes over the client id until its first batch."""
        self.former_runs: deque[str] = deque(maxlen=MAX_FORMER)
        self.last_batch: LastBatch | None = None
        self.batch_seconds = HistogramChild(BATCH_SECONDS, COMPLETION_BUCKETS_S)
        """How long batches of all runs took, from their trigger on; of those that say so."""
        self.rows = 0
        """Of the batches of all runs."""
        self.last_report_ms: float | None = None
        """When the last report of an event was accepted."""
        self.last_heard_ms: float | None = None
        """When its listener last reported anything, if only that the run lives."""
        self.first_sweep_ms: float | None = None
        """When the first sweep found it, if it had neither read nor reported by then."""
        self.partitions: dict[TopicPartition, PartitionProgress] = {}
        self._too_many = False
        self.received = 0
        self.lost_reports = 0
        """Numbers that its sender left out, seen at its reports."""
        self.refused_reports: Counter[RefusalReason] = Counter()
        self._reset_run(None, None)

    def _reset_run(self, run_id: str | None, began_ms: float | None) -> None:
        self.run_id = run_id
        self.run_began_ms = began_ms
        """None when it began before this process, and has reported no batch to it."""
        self.run_sender: str | None = None
        """The listener that reported the present run's start or life: what it reports of other
        runs of the query is older."""
        self.run_batches = 0
        self.last_batch_id: int | None = None
        self.trigger_kind: TriggerKind | None = None
        """None: not known."""
        self.trigger_interval_ms: float | None = None
        """Between the starts of two batches; 0: as fast as it can; None: not known."""
        self.confirmed_ms: float | None = None
        """Up to when reports say what this run has completed."""
        self.asks_spark = False
        """Whether its listener can ask Spark which batches are done."""
        self.is_outside = False
        """Whether it reads past this proxy, as far as is known, and no configuration names it."""
        self.ended = False
        self.idle = False
        self.error: str | None = None
        self.advice: dict[ProgressEventKind, ProgressEvent] = {}
        """What is to be mended for this run; it is not among the events."""
        self.advised_by: tuple[object, ...] = ()
        """What its advice follows of, but for late reports and shared clients."""
        self._advised: set[ProgressEventKind] = set()
        """What of it was passed on."""

    @property
    def has_failed(self) -> bool:
        """Whether its run has ended with an exception, and no other one has begun."""
        return self.ended and self.error is not None

    @property
    def has_read(self) -> bool:
        """Whether its run had a batch with rows that was planned while this proxy was there."""
        batch = self.last_batch
        return self.run_batches >= READ_BATCHES and batch is not None and batch.rows > 0

    @property
    def commit_group(self) -> str | None:
        """The group that its offsets are committed to."""
        return self.settings.commit_group if self.settings is not None else None

    @property
    def last_read_ms(self) -> float | None:
        """When a partition was last asked for. Costs a walk over all of them."""
        return _latest(each.read_ms for each in self.partitions.values())

    @property
    def last_seen_ms(self) -> float | None:
        """When it last read or was heard of, or was taken up."""
        return _latest((self.last_read_ms, self.last_heard_ms, self.first_sweep_ms))

    def confirm(self, at_ms: float) -> None:
        """Record that all is reported that the run had completed by then."""
        if self.confirmed_ms is None or at_ms > self.confirmed_ms:
            self.confirmed_ms = at_ms

    def report_age_ms(self, now_ms: float) -> float | None:
        """Return for how long nothing says what the run has completed; None: not known, or over."""
        return None if self.ended or self.confirmed_ms is None else now_ms - self.confirmed_ms

    def reports_are_fresh(self, now_ms: float) -> bool:
        """Return whether its run has not ended and its listener was heard lately."""
        last_ms = self.last_heard_ms
        return not self.ended and last_ms is not None and now_ms - last_ms < LIVE_MS

    def is_live(self, now_ms: float) -> bool:
        """Return whether its listener was heard lately, its run not having ended, or it reads."""
        if self.reports_are_fresh(now_ms):
            return True
        read_ms = self.last_read_ms
        return read_ms is not None and now_ms - read_ms < LIVE_MS

    def state(self, now_ms: float) -> QueryState:
        """Return what it is doing."""
        if self.ended:
            return QueryState.FAILED if self.has_failed else QueryState.ENDED
        if not self.is_live(now_ms):
            return QueryState.SILENT
        return QueryState.IDLE if self.idle else QueryState.RUNNING

    def log_end(self, topic: str, partition: int, offset: int, now_ms: float) -> None:
        """Record a log end that a client of the query has looked up."""
        if (progress := self.open(topic, partition, now_ms)) is not None:
            progress.record_lookup_end(offset, now_ms, client_saw_it=True)

    def log_start(self, topic: str, partition: int, offset: int, now_ms: float) -> None:
        """Record a log start that a client of the query has looked up."""
        if (progress := self.open(topic, partition, now_ms)) is not None:
            progress.log.record_start(offset)

    def open(self, topic: str, partition: int, now_ms: float) -> PartitionProgress | None:
        """Return a partition, made when it is new; None: there is no room."""
        progress = self.partitions.get((topic, partition))
        has_room = self.settings is not None or self._room.left > 0
        if progress is None and has_room and len(self.partitions) < MAX_PARTITIONS:
            progress = PartitionProgress(topic, partition, self)
            self.partitions[topic, partition] = progress
            self._room.left -= self.settings is None
        elif progress is None and not self._too_many:
            self._too_many = True
            text = f"more than {MAX_PARTITIONS} partitions: the others are not followed"
            if not has_room:
                text = "no room for more partitions: name the query under queries"
            self.add_event(ProgressEventKind.TOO_MANY, None, text, now_ms)
        return progress

    # What is kept

    def key(self, key: TopicPartition) -> str:
        """Return the key of a partition's record."""
        return FORMAT.key(self.client_id, *key)

    def record(self, key: TopicPartition) -> Record | None:
        """Return the record of a partition; None while nothing of it is completed."""
        partition = self.partitions.get(key)
        if partition is None or self.progress_id is None or partition.committed_to is None:
            return None
        completed, topic_id = partition.committed_to, partition.log.topic_id
        value: Json = {
            "label": self.name,
            "client_id": self.client_id,
            "query_id": self.progress_id,
            "run_id": partition.run_id,
            "name": self.reported_name,
            "topic": partition.topic,
            "topic_id": topic_id.hex() if topic_id is not None else None,
            "partition": partition.partition,
            "leader": partition.leader,
            "completed": completed,
            "delivered": max(partition.position or 0, completed),
            "backwards": partition.may_go_back,
            "at_s": partition.committed_at_s,
        }
        return FORMAT.record((self.client_id, *key), value)

    def begin_with(self, entry: PartitionProgressRecord) -> None:
        """Begin with the query that the latest of its records is of."""
        self.query_id = self.progress_id = entry.query_id
        self.run_id, self.reported_name = entry.run_id, entry.name

    def restore(self, entry: PartitionProgressRecord, now_ms: float) -> str | None:
        """Restore a partition from its record; return why that can't be, if so."""
        if entry.query_id != self.query_id:
            return f"it is of query {entry.query_id}, {entry.label!r} is {self.query_id} now"
        partition = self.open(entry.topic, entry.partition, now_ms)
        if partition is None:
            return "too many partitions"
        partition.run_id, partition.leader = entry.run_id, entry.leader
        partition.committed_to, partition.committed_at_s = entry.completed, entry.at_s
        partition.delivered.add(entry.completed, entry.delivered)
        partition.may_go_back = entry.backwards
        if entry.topic_id is not None:
            partition.log.topic_id = bytes.fromhex(entry.topic_id)
        return None

    # What a report says. What is applied yields True between partitions: others may do their work.

    def check_run(self, report: Report, client_id: str, now_ms: float) -> None:
        """Check that an event may come now, of its run and batch. Raises ReportRefused."""
        is_same = report.run_id == self.run_id
        is_former = report.run_id in self.former_runs
        if self.query_id not in (None, report.query_id):
            if is_same:
                text = f"run {report.run_id} is one of query {self.query_id}"
                raise ReportRefused(
                    RefusalReason.IMPOSSIBLE, text, "report the ids that Spark gives"
                )
            if report.event != "started" and self.reports_are_fresh(now_ms):
                holder = f"query {self.name!r} ({self.query_id})"
                text = f"{holder} reads with the client id {self.client_id!r}, and was heard lately"
                raise ReportRefused(RefusalReason.CLIENT_TAKEN, text, OWN_ID)
        if report.event == "started" and (is_same or is_former):
            raise ReportRefused(RefusalReason.REPEATED, "the run has begun before")
        if report.event == "running":
            return
        batch, last = report.batch, self.last_batch_id
        if is_same and self.ended:
            reason = (
                RefusalReason.REPEATED
                if report.event == "terminated"
                else RefusalReason.OUT_OF_ORDER
            )
            raise ReportRefused(reason, "the run has ended before")
        if is_same and batch is not None and last is not None and batch.batch_id <= last:
            reason = (
                RefusalReason.REPEATED if batch.batch_id == last else RefusalReason.OUT_OF_ORDER
            )
            raise ReportRefused(reason, f"batch {batch.batch_id} after batch {last}")
        is_moved = report.query_id != self.query_id or client_id != self.client_id
        if is_former and not is_same and is_moved:
            text = f"run {report.run_id} is over: another one has begun"
            raise ReportRefused(RefusalReason.OUT_OF_ORDER, text, OWN_ID)

    def is_past(self, report: Report, now_ms: float) -> bool:
        """Return whether it is of a run that is known to be over, or of one that never was.

        Spark calls listeners at the start of a run at once, and of all else in order, but later:
        the last events of a run come after the start of the next when that follows at once. A
        driver that lives on without its queries may report that they run: while another one reports
        another run of the query, that is believed. A driver itself reports its latest run only.
        """
        is_heartbeat, is_starter = report.event == "running", report.sender == self.run_sender
        if report.run_id == self.run_id:
            return is_heartbeat and self.ended
        is_same_query = report.query_id == self.query_id
        if report.run_id in self.former_runs:
            return is_heartbeat or is_same_query
        if is_heartbeat:
            return is_same_query and not is_starter and self.reports_are_fresh(now_ms)
        return is_same_query and is_starter and report.event != "started"

    def hearing(self, report: Report, now_ms: float) -> Generator[bool, None, bool]:
        """Record who reports on which run; return whether it is a new one."""
        self.last_heard_ms = now_ms  # first: one that is heard of is not forgotten meanwhile
        # A run that is idle, or lives, may have been going for long: it does not begin now.
        is_first = report.event in ("started", "progress")
        began_ms = now_ms - report.age_ms if is_first else None
        is_new = self.run_id != report.run_id
        if is_new:
            if self.query_id not in (None, report.query_id):
                text = f"query {report.query_id} takes over from {self.query_id}"
                self.add_event(ProgressEventKind.TAKEN_OVER, None, text, now_ms)
            yield from self.beginning_run(report.run_id, began_ms, now_ms)
        elif self.run_began_ms is None:  # it began before this proxy did
            self.run_began_ms = began_ms
        if report.event in ("started", "running"):
            self.run_sender = report.sender
        self.query_id = report.query_id
        self.reported_name = report.name or self.reported_name
        if report.trigger is not None:
            self.trigger_kind = report.trigger.kind
            self.trigger_interval_ms = report.trigger.interval_ms
        return is_new

    def beginning_run(self, run_id: str, began_ms: float | None, now_ms: float) -> Iterator[bool]:
        """Record a new run, which began then, if that is known; what was pending has failed."""
        former_run, known = self.run_id, list(self.partitions.values())
        if former_run is not None:
            self.former_runs.append(former_run)
        self._reset_run(run_id, began_ms)
        for partition in known:
            if former_run is not None:
                partition.fail_pending()
            partition.begin_run(began_ms, now_ms)
            yield True

    def applying(self, report: Report, now_ms: float, now_s: float) -> Iterator[bool]:
        """Record what an event says of the present run."""
        if report.event == "running":
            if report.known_age_ms is not None:
                self.asks_spark = True
                if report.last_batch_id == self.last_batch_id:
                    self.confirm(now_ms - report.known_age_ms)
            return
        happened_ms = now_ms - report.age_ms
        self.last_report_ms = now_ms
        self.confirm(happened_ms)
        self.idle = report.event == "idle"
        batch = report.batch
        if batch is not None:
            self.last_batch = LastBatch(batch.batch_id, batch.rows, batch.execution_ms, happened_ms)
            yield from self.completing(batch, now_ms, now_s)
        elif report.event == "terminated":
            yield from self._ending_run(report.error and report.error[:MAX_ERROR_SHOWN], now_ms)

    def completing(self, batch: BatchReport, now_ms: float, now_s: float) -> Iterator[bool]:
        """Record a batch of this run; see PartitionProgress.complete."""
        assert self.run_id is not None, "reports begin a run"
        # A run that ends in a crash does not report its last batch, or this proxy was away. Spark
        # numbers batches one by one; numbers of reports do not tell all that was lost: another
        # member gets some of them, and a listener may not have learned of a batch.
        is_next = batch.batch_id - 1 == self.last_batch_id
        gap = SkipReason.UNEXPLAINED if is_next else None
        if self.progress_id not in (None, self.query_id):
            gap = SkipReason.NEW_CHECKPOINT
            for partition in list(self.partitions.values()):
                if partition.key not in batch.ranges and partition.committed_to is not None:
                    self.revoke(partition, "the query that took over does not read it", now_ms)
                    yield True
        self.progress_id = self.query_id
        for number, (key, read) in enumerate(batch.ranges.items()):
            if number:
                yield True
            opened = self.open(*key, now_ms)
            if opened is not None:  # others may have taken the room since the check
                opened.complete(read, self.run_id, gap, now_ms, now_s)
        self.run_batches += 1
        self.last_batch_id = batch.batch_id

    def completing_late(
        self, run_id: str, ranges: Mapping[TopicPartition, BatchRange], now_ms: float, now_s: float
    ) -> Iterator[bool]:
        """Record a batch of an earlier run. Nothing goes back, nor does it end this run."""
        if self.progress_id not in (None, self.query_id):
            return
        self.progress_id = self.query_id
        for key, read in ranges.items():
            partition = self.open(*key, now_ms)
            if partition is not None and partition.run_id != self.run_id:
                done = partition.committed_to
                is_more = done is None or read.end > done
                if is_more and (read.start is None or read.start <= read.end):
                    partition.complete(read, run_id, None, now_ms, now_s)
            yield True

    def _ending_run(self, error: str | None, now_ms: float) -> Iterator[bool]:
        self.ended, self.error = True, error
        for partition in list(self.partitions.values()):
            partition.end_alarm("the query has ended", now_ms)
            if error is not None:
                partition.fail_pending()
            yield True

    def sweeping(self, now_ms: float, stuck_after_ms: float) -> Iterator[None]:
        """Raise alarms, and forget partitions that the run does not read; yield after each."""
        for partition in list(self.partitions.values()):
            if partition.is_dropped:  # since the sweep began
                continue
            if self._has_left(partition):
                self.revoke(partition, "the query reads it no more", now_ms)
            elif not self.ended:
                partition.check_stuck(now_ms, stuck_after_ms)
            yield
        self.advise(ProgressEventKind.REPORTS, self._late_reports(now_ms), now_ms)

    def revoke(self, partition: PartitionProgress, why: str, now_ms: float) -> None:
        """Forget a partition."""
        partition.is_dropped = True
        del self.partitions[partition.key]
        self._too_many = False
        self.add_event(ProgressEventKind.LEFT, partition.key, why, now_ms)
        self.changed(partition.key)

    def advise(self, kind: ProgressEventKind, text: str | None, now_ms: float) -> None:
        """Set what is to be mended, and pass it on once for each run; None: nothing is."""
        if text is None:
            self.advice.pop(kind, None)
            return
        event = self.advice.get(kind)
        if event is None or event.text != text:
            event = self.advice[kind] = ProgressEvent(kind, self.name, None, None, text, now_ms)
        if kind not in self._advised:
            self._advised.add(kind)
            self.on_event(event)

    def advise_shared(self, report: Report, now_ms: float) -> None:
        """Advise what to do about a report that another query reads with the client id, too."""
        who = f"another query, {report.name or 'unnamed'} ({report.query_id}),"
        text = f"{who} says that it reads with client-id {self.client_id!r} too: {OWN_ID}"
        self.advise(ProgressEventKind.CLIENT_SHARED, text, now_ms)

    def _late_reports(self, now_ms: float) -> str | None:
        """Return what to do about reports that are late although the query runs."""
        heard_ms, age_ms = self.last_heard_ms, self.report_age_ms(now_ms)
        if self.ended or heard_ms is None:
            return None
        if now_ms - heard_ms < LATE_REPORTS_MS:
            is_late = self.asks_spark and age_ms is not None and age_ms >= LATE_REPORTS_MS
            return _SPARK_IS_SILENT if is_late else None
        read_ms = self.last_read_ms
        is_running = read_ms is not None and read_ms - heard_ms >= LATE_REPORTS_MS
        return _LISTENER_IS_SILENT if is_running else None

    def _has_left(self, partition: PartitionProgress) -> bool:
        if self.run_batches < LEFT_AFTER_BATCHES or partition.run_id == self.run_id:
            return False
        read_ms, began_ms = partition.read_ms, self.run_began_ms
        return read_ms is None or began_ms is None or read_ms < began_ms


@dataclass(frozen=True, slots=True)
class AcceptedReport:
    """What became of a report."""

    report: Report
    query: FollowedQuery
    new_run: bool = False
    """Whether it is the first of its run that was accepted."""
    lost_reports: int = 0
    """How many reports of its sender, of this or another query, were lost just before it."""


def _latest(times: Iterable[float | None]) -> float | None:
    return max((time for time in times if time is not None), default=None)
