"""Which queries are followed, by client id, and all that is known and kept of them.

Followed are those configured and, up to a bound, others: they come with a report or an adaptive
rule, and go when away for long or the room is needed. All are this member's; those whose client
another member has are let go, and their records stay.

Sans-I/O and for one thread. `now_ms` is monotonic, `now_s` the same moment on the wall clock.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from proxy.state import KeptParts
from proxy.wire.topic_partition import TopicPartition

from .events import EventKind, OnEvent
from .log_edges import end_age_ms
from .owns import Owns, owns_all
from .partition import PartitionProgress
from .progress_records import FORMAT, ProgressRecord, ReadRecords
from .query import MAX_ERROR_SHOWN, STUCK_AFTER_MS, GroupState, ProgressSettings, QueryProgress

FORGET_AFTER_MS = 3 * 86_400_000.0
"""A query not configured is kept so long unseen: a daily job finds its progress on a Monday."""

MAX_RECORDS_PER_WRITE = 250
"""Making them takes some 4 ms."""


class QueryRegistry(KeptParts[QueryProgress]):
    """Who is followed, what they were given and have completed, and what is to be kept of it."""

    def __init__(self, settings: ProgressSettings, on_event: OnEvent) -> None:
        # What is delivered makes no record due: it is written with what is completed.
        super().__init__(MAX_RECORDS_PER_WRITE)
        self._on_event = on_event
        self._queries: dict[str, QueryProgress] = {}
        self._labels: dict[str, QueryProgress] = {}
        self.report_results: Counter[str] = Counter()
        """Reports by what became of them: `accepted` (no heartbeats), `lost`, or why refused."""
        self._readers: dict[TopicPartition, set[PartitionProgress]] = {}
        """Of the partitions that the cluster is asked for; those since gone are still there."""
        self.generation = 0
        """Changes whenever the set of followed client ids does."""
        self.now_ms = 0.0
        """The latest time that is known."""
        self.owns: Owns = owns_all
        """Whose queries are followed here."""
        self.update(settings)

    @property
    def queries(self) -> list[QueryProgress]:
        """All followed queries."""
        return list(self._queries.values())

    def query_of(self, client_id: str | None) -> QueryProgress | None:
        """Return the query that reads with this client id; None when it is not followed."""
        return self._queries.get(client_id) if client_id is not None else None

    def query_named(self, label: str) -> QueryProgress | None:
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

    def own(self, owns: Owns) -> list[QueryProgress]:
        """Follow the queries of these clients only; return those that leave.

        Nothing is read or reported for those any more, but commits of theirs still count and their
        records are written, until `forget_leaving`.
        """
        self.owns = owns
        gone = [query for query in self.queries if not owns.client(query.client_id)]
        for query in gone:
            self._remove(query)
            self.leaving.add(query)
            for partition in query.partitions.values():
                partition.is_dropped = True
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
                query.commit = GroupState()  # nothing is known of what the group has
                for key, partition in query.partitions.items():
                    partition.group_offset = None
                    self._commit_later(query, key)
        self._index_groups()

    def forget_leaving(self) -> bool:
        """Write and commit nothing more of what has left; return whether all of it was written."""
        is_kept = super().forget_leaving()
        self._index_groups()
        return is_kept

    def has_room(self) -> bool:
        """Return whether another query could be followed, if need be in the place of one gone."""
        return len(self._queries) < self._settings.max_queries or self._longest_gone() is not None

    def follow(self, client_id: str, *, make_room: bool = True) -> QueryProgress | None:
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

    def move(self, query: QueryProgress, client_id: str) -> None:
        """Set another client id that a query reads with, which no other has."""
        former_id = query.client_id
        del self._queries[former_id]
        query.client_id = client_id
        self._queries[client_id] = query
        for key in query.partitions:
            self.journal.mark_deleted(FORMAT.key(former_id, *key))
            self.journal.mark_changed(query, key)
        self.generation += 1
        self.relabel(query)

    def forget(self, query: QueryProgress, why: str | None = None) -> None:
        """Remove a query and its records; `why` is for an event, None: without one."""
        if why is not None:
            text = f"not followed any more: {why}"
            query.add_event(EventKind.FORGOTTEN, None, text, self.now_ms)
        for key, partition in query.partitions.items():
            partition.is_dropped = True
            self.journal.mark_removed(query, key)
        self._remove(query)

    def _remove(self, query: QueryProgress) -> None:
        del self._queries[query.client_id]
        if self._labels.get(query.name) is query:
            del self._labels[query.name]
        self.generation += 1

    def _changed(self, query: QueryProgress, key: TopicPartition) -> None:
        """Record that a partition's record, and what is to be committed, may be out of date."""
        is_followed = self._queries.get(query.client_id) is query
        if not is_followed and query not in self.leaving:
            return  # a connection of a client that went to another member may still read
        if key not in query.partitions:
            self.journal.mark_removed(query, key)
            return
        self.journal.mark_changed(query, key)
        if is_followed:
            self._commit_later(query, key)

    def _commit_later(self, query: QueryProgress, key: TopicPartition) -> None:
        if query.commit_group is not None:
            query.commit.due[key] = None

    def relabel(self, query: QueryProgress) -> None:
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

    def _set_label(self, query: QueryProgress, label: str) -> None:
        if self._labels.get(label) is query:
            return
        if self._labels.get(query.name) is query:
            del self._labels[query.name]
            for key in query.partitions:
                self.journal.mark_changed(query, key)  # its record names the label
        query.name = label
        self._labels[label] = query

    def _make(self, client_id: str) -> QueryProgress:
        query = self._queries[client_id] = QueryProgress(client_id, self._on_event, self._changed)
        self.generation += 1
        self.relabel(query)
        return query

    def _longest_gone(self) -> QueryProgress | None:
        every, now_ms = self._queries.values(), self.now_ms
        gone = [each for each in every if each.settings is None and not each.is_live(now_ms)]
        seen = [now_ms if (ms := each.last_seen_ms) is None else ms for each in gone]
        return gone[seen.index(min(seen))] if gone else None

    def sweeping(self, now_ms: float) -> Iterator[None]:
        """Raise alarms and forget what is long gone, every second or so; yield between two steps.

        Between two steps, here and below, other calls may come.
        """
        self.now_ms = now_ms
        for query in self.queries:
            if self._queries.get(query.client_id) is not query:  # it went since the sweep began
                continue
            seen_ms, settings = query.last_seen_ms, query.settings
            if seen_ms is None:
                query.first_sweep_ms = now_ms
            elif settings is None and now_ms - seen_ms >= FORGET_AFTER_MS:
                self.forget(query, "it was away for long")
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
            due_ms = now_ms - end_age_ms(now_ms - seen_ms)
            for each in tuple(query.partitions.values()):
                if each.log.end_ms <= due_ms:
                    yield self._seek(each)

    def log_end(self, topic: str, partition: int, offset: int, now_ms: float) -> None:
        """Record a log end (read_uncommitted) that the proxy has looked up."""
        for each in self._each(topic, partition):
            each.record_lookup_end(offset, now_ms, client_saw_it=False)

    def appended(self, topic: str, partition: int, end: int, now_ms: float) -> None:
        """Record up to where a client has written; a lower end than is known is left out."""
        for each in self._each(topic, partition):
            each.record_high_watermark(end, now_ms)

    def log_start(self, topic: str, partition: int, offset: int, _now_ms: float) -> None:
        """Record a log start that the proxy has looked up."""
        for each in self._each(topic, partition):
            each.log.record_start(offset)

    def _seek(self, partition: PartitionProgress) -> TopicPartition:
        """Return its key; keep who reads it, so that what is learned finds it at once."""
        self._readers.setdefault(partition.key, set()).add(partition)
        return partition.key

    def _each(self, topic: str, partition: int) -> list[PartitionProgress]:
        key = (topic, partition)
        readers = self._readers.get(key)
        if readers is None:
            return [query.partitions[key] for query in self.queries if key in query.partitions]
        return [each for each in readers if not each.is_dropped]

    # The consumer groups of queries

    def _index_groups(self) -> None:
        """Find each group's query anew, also those of queries that leave: no two have one."""
        every = (*self.leaving, *self.queries)
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

    def group_has(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Record what a group had before the first commit to it. It is not moved back by that."""
        if (query := self._groups.get(group)) is not None:
            for key in offsets.keys() & query.partitions.keys():
                query.partitions[key].group_offset = offsets[key]

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
                query.add_event(EventKind.COMMITTED_BACKWARDS, key, text, now_ms)
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
        by_client: dict[str, list[tuple[str, ProgressRecord]]] = {}
        """Each with what was reported last first, and so the clients."""
        for key, entry in sorted(entries, key=lambda item: -item[1].at_s):
            client_id = self.client_of_record(entry.label, entry.client_id)
            by_client.setdefault(client_id, []).append((key, entry))
        for client_id, entries in by_client.items():
            query = self._begin_with(client_id, entries[0][1])
            for key, entry in reversed(entries):
                why = query if isinstance(query, str) else self._restore(query, key, entry)
                if why is not None:
                    refused[key] = why
        return [f"progress record {key!r} is left out: {why}" for key, why in refused.items()]

    def _begin_with(self, client_id: str, entry: ProgressRecord) -> QueryProgress | str:
        """Return the query that its latest record is of, or why there can't be one."""
        query = self.follow(client_id, make_room=False)
        if query is None:
            return "there are too many queries"
        if query.query_id is not None:
            return f"client {client_id!r} is of query {query.query_id}"
        query.query_id = query.progress_id = entry.query_id
        query.run_id, query.reported_name = entry.run_id, entry.name
        self.relabel(query)
        return query

    def _restore(self, query: QueryProgress, key: str, entry: ProgressRecord) -> str | None:
        """Restore a partition from the record of a key; return why that can't be, if so."""
        if entry.query_id != query.query_id:
            return f"it is of query {entry.query_id}, {entry.label!r} is {query.query_id} now"
        partition = query.open(entry.topic, entry.partition, self.now_ms)
        if partition is None:
            return "too many partitions"
        partition.run_id, partition.leader = entry.run_id, entry.leader
        partition.committed_to, partition.committed_at_s = entry.completed, entry.at_s
        partition.delivered.add(entry.completed, entry.delivered)
        partition.may_go_back = entry.backwards
        if entry.topic_id is not None:
            partition.log.topic_id = bytes.fromhex(entry.topic_id)
        self._commit_later(query, partition.key)
        is_moved = key != FORMAT.key(query.client_id, *partition.key)
        if is_moved:
            self.journal.mark_deleted(key)
        if is_moved or query.name != entry.label:
            self.journal.mark_changed(query, partition.key)
        return None
