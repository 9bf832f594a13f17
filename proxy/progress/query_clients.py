"""Which queries are followed, by client id: those configured and, up to a bound, others.

Others come with a report or an adaptive rule, and go when away for long or the room is needed. All
are this member's; those whose client another member has are let go, and their records stay.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from proxy.state import Journal
from proxy.wire.topic_partition import TopicPartition

from .events import EventKind, OnEvent
from .owns import Owns, owns_all
from .progress_records import FORMAT, key_of, record_of
from .query import GroupState, ProgressSettings, QueryProgress

FORGET_AFTER_MS = 3 * 86_400_000.0
"""A query not configured is kept so long unseen: a daily job finds its progress on a Monday."""


MAX_ERROR_CHARS = 1000


class Commits:
    """What is due of the followed queries. A group goes back only where the query itself did."""

    def __init__(self, queries: Callable[[], Iterable[QueryProgress]]) -> None:
        self._queries = queries

    def drop(self, groups: Collection[str]) -> None:
        """Forget what is due to these groups: another member commits to them from now on."""
        for query in self._queries():
            if query.commit_group in groups:
                query.commit.due.clear()

    def due(self) -> dict[str, dict[TopicPartition, int]]:
        """Return by group the offset of the first record that is not complete."""
        by_group: dict[str, dict[TopicPartition, int]] = {}
        for query in self._queries():
            if query.commit_group is None:
                continue
            for key in list(query.commit.due):
                partition = query.partitions.get(key)
                if partition is None or (due := partition.due_to_commit) is None:
                    del query.commit.due[key]
                else:
                    by_group.setdefault(query.commit_group, {})[key] = due
        return by_group

    def group_has(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Record what a group had before the first commit to it. It is not moved back by that."""
        for query, _ in self._of_group(group):
            for key in offsets.keys() & query.partitions.keys():
                query.partitions[key].group_offset = offsets[key]

    def committed(self, group: str, offsets: Mapping[TopicPartition, int], now_ms: float) -> None:
        """Record that these offsets are in the group: they are due no more."""
        for query, state in self._of_group(group):
            state.last_ms, state.error = now_ms, None
            for key in offsets.keys() & query.partitions.keys():
                partition, offset = query.partitions[key], offsets[key]
                before, partition.group_offset = partition.group_offset, offset
                if before is not None and offset < before:
                    state.backwards += 1
                    text = f"group {group} was moved back from {before} to {offset}"
                    query.changes.add_event(EventKind.COMMITTED_BACKWARDS, key, text, now_ms)
                if partition.may_go_back and offset == partition.committed_to:
                    partition.may_go_back = False
                    query.changes.changed(key)  # its record says so

    def failed(self, group: str, message: str) -> None:
        """Record why what is due could not be committed, all or some of it."""
        for _, state in self._of_group(group):
            state.error = message[:MAX_ERROR_CHARS]

    def _of_group(self, group: str) -> list[tuple[QueryProgress, GroupState]]:
        return [(each, each.commit) for each in self._queries() if each.commit_group == group]


class QueryClients:
    """The followed queries, and what of them is to be written and committed; times: monotonic."""

    def __init__(self, settings: ProgressSettings, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._queries: dict[str, QueryProgress] = {}
        self._leaving: dict[str, QueryProgress] = {}
        """Followed no more, and not yet committed and written to the end."""
        self._labels: dict[str, QueryProgress] = {}
        self.journal = Journal(record_of, key_of)
        self.commits = Commits(self._with_groups)
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
        return self._clients.get(label, client_id)

    def update(self, settings: ProgressSettings) -> None:
        """Set the configured queries. One that is taken out stays if it was ever seen."""
        self._settings = settings
        self._max_queries = settings.max_queries
        self.answers_lookups = settings.answers_lookups
        self._clients = {each.name: each.client_id for each in settings.queries}
        configured = set(self._clients.values())
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
            self._leaving[query.client_id] = query
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

    def _with_groups(self) -> Iterator[QueryProgress]:
        """Yield those of the queries that may have a group, also of those that leave."""
        for each in self._settings.queries:
            if (query := self._queries.get(each.client_id)) is not None:
                yield query
        yield from self._leaving.values()

    def forget_leaving(self) -> None:
        """Write and commit nothing more of the queries that leave; their records stay."""
        gone, self._leaving = list(self._leaving.values()), {}
        for query in gone:
            for partition in query.partitions.values():
                partition.is_dropped = True
        if gone:
            self.journal.forget((query, key) for query in gone for key in query.partitions)

    def has_room(self) -> bool:
        """Return whether another query could be followed, if need be in the place of one gone."""
        return len(self._queries) < self._max_queries or self._longest_gone() is not None

    def follow(self, client_id: str, *, make_room: bool = True) -> QueryProgress | None:
        """Return a client id's query, made if it is new; None: no room, or not this member's."""
        if (query := self._queries.get(client_id)) is not None:
            return query
        if not self.owns.client(client_id):
            return None
        while len(self._queries) >= self._max_queries:
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
            self.journal.mark_changed((query, key))
        self.generation += 1
        self.relabel(query)

    def forget(self, query: QueryProgress, why: str | None = None) -> None:
        """Remove a query and its records; `why` is for an event, None: without one."""
        if why is not None:
            text = f"not followed any more: {why}"
            query.changes.add_event(EventKind.FORGOTTEN, None, text, self.now_ms)
        for key, partition in query.partitions.items():
            partition.is_dropped = True
            self.journal.mark_removed((query, key))
        self._remove(query)

    def _remove(self, query: QueryProgress) -> None:
        del self._queries[query.client_id]
        if self._labels.get(query.name) is query:
            del self._labels[query.name]
        self.generation += 1

    def forget_gone(self, now_ms: float) -> None:
        """Forget those that were away for long."""
        self.now_ms = now_ms
        for query in self.queries:
            seen_ms = query.last_seen_ms
            if seen_ms is None:
                query.first_sweep_ms = now_ms
            elif query.settings is None and now_ms - seen_ms >= FORGET_AFTER_MS:
                self.forget(query, "it was away for long")

    def _changed(self, query: QueryProgress, key: TopicPartition) -> None:
        """Record that a partition's record, and what is to be committed, may be out of date."""
        is_followed = self._queries.get(query.client_id) is query
        if not is_followed and self._leaving.get(query.client_id) is not query:
            return  # a connection of a client that went to another member may still read
        if key not in query.partitions:
            self.journal.mark_removed((query, key))
            return
        self.journal.mark_changed((query, key))
        if query.client_id not in self._leaving:
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
        old_label = query.name
        if label == old_label and self._labels.get(label) is query:
            return
        query.changes.label = label
        if self._labels.get(old_label) is query:
            del self._labels[old_label]
            for key in query.partitions:
                self.journal.mark_changed((query, key))  # its record names the label
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
