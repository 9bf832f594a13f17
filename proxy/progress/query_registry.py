"""Which queries are followed, by client id: what is reported, known and kept of them.

Followed are those configured and, up to a bound, others: they come with a report or an adaptive
rule, and go when away for long or the room is needed. All are this member's; those whose client
another member has are let go, and their records stay.

Sans-I/O and for one thread. `now_ms` is monotonic, `now_s` the same moment on the wall clock.
"""

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

from metrics.clock import MS_PER_SECOND
from proxy.state import UnwrittenRecords
from proxy.wire.topic_partition import TopicPartition

from .events import OnEvent, ProgressEventKind
from .log_offsets import max_end_age_ms
from .partition import PartitionProgress, check_reported_range
from .progress_records import FORMAT, PartitionProgressRecord, ReadRecords
from .query import (
    LIVE_MS,
    MAX_ERROR_SHOWN,
    MAX_PARTITIONS,
    STUCK_AFTER_MS,
    AcceptedReport,
    FollowedQuery,
    GroupCommitStatus,
    PartitionCapacity,
    ProgressSettings,
)
from .report import (
    ALL_QUERIES,
    THIS_PROXY,
    RefusalReason,
    Report,
    ReportableQueries,
    ReportRefused,
    ReportSequence,
)

FORGET_AFTER_MS = 3 * 86_400_000.0
"""A query not configured is kept so long unseen: a daily job finds its progress on a Monday."""

MAX_RECORDS_PER_WRITE = 250
"""Making them takes some 4 ms."""

MAX_SENDERS = 1000
"""How many listeners are remembered; the one that reported longest ago is forgotten first."""


class Ownership(Protocol):
    """What one member owns at one moment. It does not change: who owns more or less has another."""

    def client(self, client_id: str) -> bool:
        """Return whether a client is this member's, with its query and its adaptive bound."""

    def pipeline(self, name: str) -> bool:
        """Return whether a pipeline is this member's, with its ledger."""


class _OwnsAll:
    def client(self, client_id: str) -> bool:  # noqa: ARG002
        return True

    def pipeline(self, name: str) -> bool:  # noqa: ARG002
        return True


owns_all: Ownership = _OwnsAll()
"""Of a member that is alone."""


class QueryRegistry:
    """Who is followed, what they were given and have completed, and what is to be kept of it.

    `knows_client` returns whether a client id has ever connected.
    """

    def __init__(
        self, settings: ProgressSettings, on_event: OnEvent, knows_client: Callable[[str], bool]
    ) -> None:
        # What is delivered makes no record due: it is written with what is completed.
        self.unwritten = UnwrittenRecords(MAX_RECORDS_PER_WRITE)
        self._on_event = on_event
        self.knows_client = knows_client
        self._queries: dict[str, FollowedQuery] = {}
        self._labels: dict[str, FollowedQuery] = {}
        self.report_results: Counter[str] = Counter()
        """Reports by what became of them: `accepted` (no heartbeats), `lost`, or why refused."""
        self._senders: dict[str, ReportSequence] = {}
        """By id, those that reported; the one that did last is last."""
        self._room = PartitionCapacity(settings.max_other_partitions)
        self._readers: dict[TopicPartition, set[PartitionProgress]] = {}
        """Of the partitions that the cluster is asked for; those since gone are still there."""
        self.generation = 0
        """Changes whenever the set of followed client ids does."""
        self.now_ms = 0.0
        """The latest time that is known."""
        self.owns: Ownership = owns_all
        """Whose queries are followed here."""
        self.update(settings)

    @property
    def queries(self) -> list[FollowedQuery]:
        """All followed queries."""
        return list(self._queries.values())

    def query_of(self, client_id: str | None) -> FollowedQuery | None:
        """Return the query that reads with this client id; None when it is not followed."""
        return self._queries.get(client_id) if client_id is not None else None

    def query_named(self, label: str) -> FollowedQuery | None:
        """Return the query with this label; None when it is not known."""
        return self._labels.get(label)

    def client_of_record(self, label: str, client_id: str) -> str:
        """Return whose query a record is of: a configured one may have another client id now."""
        return self.clients.get(label, client_id)

    def update(self, settings: ProgressSettings) -> None:
        """Set the configured queries. One that is taken out stays if it was ever seen."""
        self._settings = settings
        self.answers_lookups = settings.answers_lookups
        self.clients = {each.name: each.client_id for each in settings.queries}
        configured = set(self.clients.values())
        for query in self.queries:
            was_seen = query.partitions or query.last_heard_ms is not None
            if query.client_id not in configured and not was_seen:
                self.forget(query)
        self._configure()

    def own(self, owns: Ownership) -> list[FollowedQuery]:
        """Follow the queries of these clients only; return those that leave.

        Nothing is read or reported for those any more, but commits of theirs still count and their
        records are written, until `forget_leaving`.
        """
        self.owns = owns
        gone = [query for query in self.queries if not owns.client(query.client_id)]
        for query in gone:
            self._remove(query)
            self.unwritten.leaving.add(query)
        self._configure()
        return gone

    def _configure(self) -> None:
        """Follow the configured queries that are this member's, each with its settings."""
        groups = {query: query.commit_group for query in self.queries}
        every = self._settings.queries
        configured = {each.client_id: each for each in every if self.owns.client(each.client_id)}
        for client_id in configured:
            if client_id not in self._queries:
                self._make(client_id)
        for query in self.queries:
            query.settings = configured.get(query.client_id)
        # Those that are configured first: their labels are fixed.
        for query in sorted(self.queries, key=lambda query: query.settings is None):
            self.relabel(query)
            if query.commit_group != groups.get(query):
                query.commit = GroupCommitStatus()  # nothing is known of what the group has
                for key, partition in query.partitions.items():
                    partition.group_offset = None
                    self._commit_later(query, key)
        self._index_groups()

    def forget_leaving(self) -> bool:
        """Write and commit nothing more of what has left; return whether all of it was written."""
        is_kept = self.unwritten.forget_leaving()
        self._index_groups()
        return is_kept

    def has_room(self) -> bool:
        """Return whether another query could be followed, if need be in the place of one gone."""
        return len(self._queries) < self._settings.max_queries or self._longest_gone() is not None

    def follow(self, client_id: str, *, make_room: bool = True) -> FollowedQuery | None:
        """Return a client id's query, made if it is new; None: no room, or not this member's."""
        if (query := self._queries.get(client_id)) is not None:
            return query
        if not self.owns.client(client_id):
            return None
        while len(self._queries) >= self._settings.max_queries:
            gone = self._longest_gone() if make_room else None
            if gone is None:
                return None
            self.forget(gone, "others needed the room")
        return self._make(client_id)

    def move(self, query: FollowedQuery, client_id: str) -> None:
        """Set another client id that a query reads with, which no other has."""
        former_id = query.client_id
        del self._queries[former_id]
        query.client_id = client_id
        self._queries[client_id] = query
        for key in query.partitions:
            self.unwritten.mark_deleted(FORMAT.key(former_id, *key))
            self.unwritten.mark_changed(query, key)
        self.generation += 1
        self.relabel(query)

    def forget(self, query: FollowedQuery, why: str | None = None) -> None:
        """Remove a query and its records; `why` is for an event, None: without one."""
        if why is not None:
            text = f"not followed any more: {why}"
            query.add_event(ProgressEventKind.FORGOTTEN, None, text, self.now_ms)
        for key in query.partitions:
            self.unwritten.mark_removed(query, key)
        self._remove(query)

    def _remove(self, query: FollowedQuery) -> None:
        for partition in query.partitions.values():
            partition.is_dropped = True
        del self._queries[query.client_id]
        if self._labels.get(query.name) is query:
            del self._labels[query.name]
        self.generation += 1

    def _changed(self, query: FollowedQuery, key: TopicPartition) -> None:
        """Record that a partition's record, and what is to be committed, may be out of date."""
        is_followed = self._queries.get(query.client_id) is query
        if not is_followed and query not in self.unwritten.leaving:
            return  # a connection of a client that went to another member may still read
        if key not in query.partitions:
            self.unwritten.mark_removed(query, key)
            return
        self.unwritten.mark_changed(query, key)
        if is_followed:
            self._commit_later(query, key)

    def _commit_later(self, query: FollowedQuery, key: TopicPartition) -> None:
        if query.commit_group is not None:
            query.commit.due[key] = None

    def relabel(self, query: FollowedQuery) -> None:
        """Set the label that suits what is known of a query, unlike every other label."""
        known = query.reported_name or query.query_id or query.client_id
        wanted = query.settings.name if query.settings is not None else known
        holder = self._labels.get(wanted)
        if holder is query:
            return
        if holder is not None and query.settings is not None:
            self._set_label(holder, self._free_label(wanted, holder.client_id))
        elif holder is not None:
            wanted = self._free_label(wanted, query.client_id)
        self._set_label(query, wanted)

    def _free_label(self, wanted: str, client_id: str) -> str:
        label = f"{wanted} ({client_id})"
        while label in self._labels and self._labels[label].client_id != client_id:
            label += "'"
        return label

    def _set_label(self, query: FollowedQuery, label: str) -> None:
        if self._labels.get(label) is query:
            return
        if self._labels.get(query.name) is query:
            del self._labels[query.name]
            for key in query.partitions:
                self.unwritten.mark_changed(query, key)  # its record names the label
        query.name = label
        self._labels[label] = query

    def _make(self, client_id: str) -> FollowedQuery:
        query = self._queries[client_id] = FollowedQuery(
            client_id, self._on_event, self._changed, self._room
        )
        self.generation += 1
        self.relabel(query)
        return query

    def _longest_gone(self) -> FollowedQuery | None:
        every, now_ms = self._queries.values(), self.now_ms
        gone = [each for each in every if each.settings is None and not each.is_live(now_ms)]
        seen = [now_ms if (ms := each.last_seen_ms) is None else ms for each in gone]
        return gone[seen.index(min(seen))] if gone else None

    # What listeners report

    def refuse(self, error: ReportRefused) -> None:
        """Count a report that `parse_report` refused."""
        self.report_results[error.reason] += 1

    def unknown_ends(self, report: Report) -> set[TopicPartition]:
        """Return the partitions whose log ends are to be asked for, and given to `accepting`."""
        query = self._queries.get(self._client_of(report))
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
        scope: ReportableQueries = ALL_QUERIES,
    ) -> Generator[bool, None, AcceptedReport]:
        """Check a report completely, then apply it, step by step: it may be long.

        `ends` are log ends that the cluster was just asked for, `scope` says which queries its
        sender may report on.

        Yields after each partition whether anything was changed already; between two steps anything
        may happen but another report. Raises ReportRefused: nothing but counts has changed then.
        """
        query: FollowedQuery | None = None
        try:
            client_id = self._client_of(report)
            if not client_id:
                text = f"query {report.query_id} has neither a name nor a client id"
                fix = "name the query with queryName, or tell the listener its Kafka client id"
                raise ReportRefused(RefusalReason.NO_CLIENT, text, fix)
            ranges = report.ranges
            may_wait = len(ranges) > 1
            # Again at the end: queries may come or go between two steps.
            for checked in (ranges, {}) if may_wait else (ranges,):
                query = self._queries.get(client_id) or self._movable(report, scope, now_ms)
                self._check(report, client_id, query, scope, now_ms)
                known = query.partitions if query is not None else {}
                for key, read in checked.items():
                    check_reported_range(key, read, known.get(key), ends.get(key), report.run_id)
                    if may_wait:
                        yield False
        except ReportRefused as error:
            self._count_refused(error, report, query, now_ms)
            raise
        if query is None:
            query = self.follow(client_id)
            assert query is not None, "there was room"
        elif query.client_id != client_id:
            self.move(query, client_id)
        lost = 0 if report.number is None else self._count(report, report.number, query)
        new_run = False
        if not query.is_past(report, now_ms):
            new_run = yield from query.hearing(report, now_ms)
            self.relabel(query)
            yield from query.applying(report, now_ms, now_s)
        elif report.batch is not None:
            yield from query.completing_late(report.run_id, report.ranges, now_ms, now_s)
        return AcceptedReport(report, query, new_run, lost)

    def _count(self, report: Report, number: int, query: FollowedQuery) -> int:
        """Count an event that is accepted; return how many of its sender were lost before it."""
        sender = self._senders.pop(report.sender, None) or ReportSequence(number - 1)
        if len(self._senders) >= MAX_SENDERS:
            del self._senders[next(iter(self._senders))]
        self._senders[report.sender] = sender
        # Numbers that are missing here may have gone to other members.
        lost = sender.accept(number, counts_lost=self.owns is owns_all)
        self.report_results["accepted"] += 1
        self.report_results["lost"] += lost
        query.received += 1
        query.lost_reports += lost
        if report.batch is not None:
            query.rows += report.batch.rows
            if report.batch.execution_ms is not None:
                query.batch_seconds.observe(report.batch.execution_ms / MS_PER_SECOND)
        return lost

    def _count_refused(
        self, error: ReportRefused, report: Report, query: FollowedQuery | None, now_ms: float
    ) -> None:
        self.refuse(error)
        if error.reason is RefusalReason.NOT_ALLOWED:
            return  # nor is anything counted for a query or a sender that is another's
        sender = self._senders.get(report.sender)
        if sender is not None and report.number is not None and report.number > sender.last:
            sender.refused.add(report.number, report.number + 1)
        if query is not None:
            query.refused_reports[error.reason] += 1
            if error.reason is RefusalReason.CLIENT_TAKEN:
                query.advise_shared(report, now_ms)

    def _client_of(self, report: Report) -> str:
        """Return the client id that a report's query reads with; empty: that is not known."""
        name = report.name or ""
        return report.client_id or self.clients.get(name, name)

    def _movable(
        self, report: Report, scope: ReportableQueries, now_ms: float
    ) -> FollowedQuery | None:
        """Return what is known of the query, if it read with another client id in another run."""
        for query in self.queries:
            names = query.client_id, query.reported_name or query.client_id
            if query.query_id == report.query_id and all(map(scope.covers, names)):
                is_held = query.settings is not None or query.reports_are_fresh(now_ms)
                return None if is_held else query
        return None

    def _check(
        self,
        report: Report,
        client_id: str,
        query: FollowedQuery | None,
        scope: ReportableQueries,
        now_ms: float,
    ) -> None:
        """Check all but the ranges of the batch. Raises ReportRefused."""
        if scope is not ALL_QUERIES:
            settings = query.settings if query is not None else None
            in_file = settings.name if settings is not None else None
            names = {"client id": client_id, "name": report.name}
            scope.check({**names, "name in the configuration": in_file})
        is_unknown = query is None or query.client_id != client_id
        if is_unknown and not self.owns.client(client_id):
            text = f"client {client_id!r} has gone to another member of this proxy"
            raise ReportRefused(RefusalReason.OWNED_ELSEWHERE, text, "send the report again")
        sender = self._senders.get(report.sender)
        if sender is not None and report.number is not None and report.number <= sender.last:
            text = f"number {report.number} of this sender, or a later one, was taken in before"
            raise ReportRefused(RefusalReason.REPEATED, text)
        if is_unknown:
            self._check_unknown(report, client_id, query, now_ms)
        if query is not None:
            query.check_run(report, client_id, now_ms)
        partitions = query.partitions if query is not None else {}
        ranges = report.ranges
        if len(partitions) + len(ranges.keys() - partitions.keys()) > MAX_PARTITIONS:
            text = f"with these the query has more than {MAX_PARTITIONS} partitions"
            raise ReportRefused(RefusalReason.MALFORMED, text, "split the query")

    def _check_unknown(
        self, report: Report, client_id: str, query: FollowedQuery | None, now_ms: float
    ) -> None:
        if report.event == "progress" and not self.knows_client(client_id):
            fix = f"{THIS_PROXY}, with {client_id!r} as its kafka.client.id; or add it to queries"
            name = report.name
            if name is not None and name != client_id and self.knows_client(name):
                fix = f"a client {name!r} has: say so in QuotaListener(clients=...); or {fix}"
            text = f"no client {client_id!r} has connected, and the configuration has none"
            raise ReportRefused(RefusalReason.UNKNOWN_QUERY, text, fix)
        self.now_ms = now_ms
        if query is None and not self.has_room():
            text = f"{len(self._queries)} queries are followed already, and none of them is gone"
            fix = "raise limits.max_client_entities, or stop queries"
            raise ReportRefused(RefusalReason.UNKNOWN_QUERY, text, fix)

    def sweeping(self, now_ms: float) -> Iterator[None]:
        """Raise alarms and forget what is long gone, every second or so; yield between two steps.

        Between two steps, here and below, other calls may come.
        """
        self.now_ms = now_ms
        others = (len(each.partitions) for each in self.queries if each.settings is None)
        self._room.left = self._settings.max_other_partitions - sum(others)
        for query in self.queries:
            if self._queries.get(query.client_id) is not query:  # it went since the sweep began
                continue
            seen_ms, settings = query.last_seen_ms, query.settings
            if seen_ms is None:
                query.first_sweep_ms = now_ms
            elif settings is None and now_ms - seen_ms >= FORGET_AFTER_MS:
                self.forget(query, "it was away for long")
                continue
            elif settings is None and self._room.left <= 0 and now_ms - seen_ms >= LIVE_MS:
                self._room.left += len(query.partitions)
                self.forget(query, "others needed the room")
                continue
            stuck_after_ms = settings.stuck_after_ms if settings else STUCK_AFTER_MS
            yield from query.sweeping(now_ms, stuck_after_ms)

    def partitions(self) -> Iterator[TopicPartition]:
        """Yield the partitions whose log ends are worth asking for: of each query that reads it."""
        self._readers = {}
        for partitions in [tuple(query.partitions.values()) for query in self.queries]:
            yield from map(self._seek, partitions)

    def stale(self, now_ms: float) -> Iterator[TopicPartition]:
        """Yield those of them that a query at work reads, and whose end was not learned lately."""
        for query in self.queries:
            seen_ms = query.last_seen_ms
            if query.ended or seen_ms is None:
                continue
            due_ms = now_ms - max_end_age_ms(now_ms - seen_ms)
            for each in tuple(query.partitions.values()):
                if each.log.end_ms <= due_ms:
                    yield self._seek(each)

    def readers_of(self, topic: str, partition: int) -> list[PartitionProgress]:
        """Return the partition as each query reads it that reads it."""
        key = (topic, partition)
        readers = self._readers.get(key)
        if readers is None:
            return [query.partitions[key] for query in self.queries if key in query.partitions]
        return [each for each in readers if not each.is_dropped]

    def _seek(self, partition: PartitionProgress) -> TopicPartition:
        """Return its key; keep who reads it, so that what is learned finds it at once."""
        self._readers.setdefault(partition.key, set()).add(partition)
        return partition.key

    # The consumer groups of queries

    def _index_groups(self) -> None:
        """Find each group's query anew, also those of queries that leave: no two have one."""
        every = (*self.unwritten.leaving, *self.queries)
        self._groups = {each.commit_group: each for each in every if each.commit_group is not None}

    def drop_commits(self, groups: Collection[str]) -> None:
        """Forget what is due to these groups: another member commits to them from now on."""
        for group in self._groups.keys() & groups:
            self._groups[group].commit.due.clear()

    def due_commits(self) -> dict[str, dict[TopicPartition, int]]:
        """Return what is due to each group that something is due to; see `due_to`."""
        return {group: due for group in self._groups if (due := self.due_to(group))}

    def due_to(self, group: str) -> dict[TopicPartition, int]:
        """Return for a group the offset of the first record that is not complete.

        It goes back only where the query itself did.
        """
        found: dict[TopicPartition, int] = {}
        if (query := self._groups.get(group)) is None:
            return found
        for key in list(query.commit.due):
            partition = query.partitions.get(key)
            if partition is None or (due := partition.due_to_commit) is None:
                del query.commit.due[key]
            else:
                found[key] = due
        return found

    def group_has(self, group: str, offsets: Mapping[TopicPartition, int | None]) -> None:
        """Record what a group had before the first commit to it. It is not moved back by that.

        None: it has nothing of the partition, so what is completed is due.
        """
        if (query := self._groups.get(group)) is not None:
            for key in offsets.keys() & query.partitions.keys():
                query.partitions[key].group_offset = offsets[key]
                if offsets[key] is None:
                    self._commit_later(query, key)

    def committed(self, group: str, offsets: Mapping[TopicPartition, int], now_ms: float) -> None:
        """Record that these offsets are in the group: they are due no more."""
        if (query := self._groups.get(group)) is None:
            return
        query.commit.last_ms, query.commit.error = now_ms, None
        for key in offsets.keys() & query.partitions.keys():
            partition, offset = query.partitions[key], offsets[key]
            before, partition.group_offset = partition.group_offset, offset
            if before is not None and offset < before:
                query.commit.backwards += 1
                text = f"group {group} was moved back from {before} to {offset}"
                query.add_event(ProgressEventKind.COMMITTED_BACKWARDS, key, text, now_ms)
            if partition.may_go_back and offset == partition.committed_to:
                partition.may_go_back = False
                query.changed(key)  # its record says so

    def commit_failed(self, group: str, message: str) -> None:
        """Record why what is due could not be committed, all or some of it."""
        if (query := self._groups.get(group)) is not None:
            query.commit.error = message[:MAX_ERROR_SHOWN]

    # What is kept

    def load(self, read: ReadRecords) -> list[str]:
        """Restore what an earlier process kept, or another member; return which were not, and why.

        Call it before anything is known of their queries. Refused ones stay in the state. Of one
        query what was reported last is taken: others were left by one that it took over from. A
        configured query is found by its name, any other by its client id. A record that has another
        key by that is moved.
        """
        refused = {key: said for key, said in read.items() if isinstance(said, str)}
        entries = [(key, said) for key, said in read.items() if not isinstance(said, str)]
        by_client: dict[str, list[tuple[str, PartitionProgressRecord]]] = {}
        """Each with what was reported last first, and so the clients."""
        for key, entry in sorted(entries, key=lambda item: -item[1].at_s):
            client_id = self.client_of_record(entry.label, entry.client_id)
            by_client.setdefault(client_id, []).append((key, entry))
        for client_id, entries in by_client.items():
            query = self.follow(client_id, make_room=False)
            if query is None or query.query_id is not None:
                why = "there are too many queries"
                if query is not None:
                    why = f"client {client_id!r} is of query {query.query_id}"
                refused |= {key: why for key, _ in entries}
                continue
            query.begin_with(entries[0][1])
            self.relabel(query)
            for key, entry in reversed(entries):
                problem = query.restore(entry, self.now_ms)
                if problem is not None:
                    refused[key] = problem
                    continue
                partition = entry.topic, entry.partition
                self._commit_later(query, partition)
                is_moved = key != query.key(partition)
                if is_moved:
                    self.unwritten.mark_deleted(key)
                if is_moved or query.name != entry.label:
                    self.unwritten.mark_changed(query, partition)
        return [f"progress record {key!r} is left out: {why}" for key, why in refused.items()]
