"""Which queries are followed: by client id, each with a label of its own, never more than a bound.

Configured queries are always there. Others come with a report or an adaptive rule, and go when
they are away for long or the room is needed.
"""

from collections.abc import Iterator

from .events import EventKind
from .query import QueryProgress, QuerySink
from .settings import ProgressSettings

FORGET_AFTER_MS = 3 * 86_400_000.0
"""For so long a query that is not configured is kept after it was seen last: three days, so that a
daily job finds its progress after a weekend's first day."""


class QueryClients:
    """The followed queries. Times are monotonic milliseconds."""

    def __init__(self, sink: QuerySink) -> None:
        self._sink = sink
        self._queries: dict[str, QueryProgress] = {}
        self._labels: dict[str, QueryProgress] = {}
        self._settings = ProgressSettings()
        self._clients: dict[str, str] = {}
        """Client ids by the names of the configuration."""
        self.generation = 0
        """Changes whenever the set of followed client ids does."""
        self.now_ms = 0.0
        """The latest time that is known."""

    def __iter__(self) -> Iterator[QueryProgress]:
        return iter(self._queries.values())

    def __len__(self) -> int:
        return len(self._queries)

    def get(self, client_id: str) -> QueryProgress | None:
        """Return the query that reads with this client id."""
        return self._queries.get(client_id)

    def labelled(self, label: str) -> QueryProgress | None:
        """Return the query with this label."""
        return self._labels.get(label)

    def client_of(self, name: str) -> str:
        """Return the client id of a query that states only its name."""
        return self._clients.get(name, name)

    def update(self, settings: ProgressSettings) -> None:
        """Take over the configured queries. One that is taken out stays if it was ever seen."""
        self._settings = settings
        self._clients = {each.name: each.client_id for each in settings.queries}
        configured = {each.client_id: each for each in settings.queries}
        for query in list(self):
            query.settings = configured.get(query.client_id)
            if query.settings is None and not query.was_seen:
                self.forget(query)
        for client_id, each in configured.items():
            query = self._queries.get(client_id) or self._make(client_id)
            query.settings = each
        # Those that are configured first: their labels are fixed.
        for query in sorted(self, key=lambda query: query.settings is None):
            self.relabel(query)

    def has_room(self) -> bool:
        """Say whether another query could be followed, if need be in the place of one gone."""
        return len(self._queries) < self._settings.max_queries or self._longest_gone() is not None

    def add(self, client_id: str, *, make_room: bool = True) -> QueryProgress | None:
        """Return the query of a client id, made when there is none; None when there is no room.

        `make_room` lets the one that is gone longest be forgotten for it.
        """
        query = self._queries.get(client_id)
        if query is not None:
            return query
        while len(self._queries) >= self._settings.max_queries:
            gone = self._longest_gone() if make_room else None
            if gone is None:
                return None
            self._report_forgotten(gone, "others needed the room")
            self.forget(gone)
        return self._make(client_id)

    def move(self, query: QueryProgress, client_id: str) -> None:
        """Let a query read with another client id from now on, which no other has."""
        del self._queries[query.client_id]
        query.client_id = client_id
        self._queries[client_id] = query
        self.generation += 1
        self.relabel(query)

    def of_query(self, query_id: str) -> QueryProgress | None:
        """Return a query by its id. Costs a walk over all."""
        return next((query for query in self if query.query_id == query_id), None)

    def forget(self, query: QueryProgress) -> None:
        """Let a query go, and its records."""
        for partition in query.partitions.values():
            partition.is_dropped = True
            self._sink.removed(query, partition)
        del self._queries[query.client_id]
        if self._labels.get(query.name) is query:
            del self._labels[query.name]
        self.generation += 1

    def sweep(self, now_ms: float) -> None:
        """Forget those that were away for long."""
        self.now_ms = now_ms
        for query in list(self):
            seen_ms = query.last_seen_ms
            if seen_ms is None:
                query.first_sweep_ms = now_ms
            elif query.settings is None and now_ms - seen_ms >= FORGET_AFTER_MS:
                self._report_forgotten(query, "it was away for long")
                self.forget(query)

    def relabel(self, query: QueryProgress) -> None:
        """Give a query the label that suits what is known of it, unlike every other label."""
        wanted = _label(query)
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
        if label == query.name and self._labels.get(label) is query:
            return
        old_label, query.name = query.name, label
        if self._labels.get(old_label) is query:
            del self._labels[old_label]
            self._sink.relabelled(query, old_label)
        self._labels[label] = query

    def _make(self, client_id: str) -> QueryProgress:
        query = self._queries[client_id] = QueryProgress(client_id, client_id, self._sink)
        self.generation += 1
        self.relabel(query)
        return query

    def _longest_gone(self) -> QueryProgress | None:
        gone = [
            (query.last_seen_ms if query.last_seen_ms is not None else self.now_ms, number, query)
            for number, query in enumerate(self)
            if query.settings is None and not query.is_live(self.now_ms)
        ]
        return min(gone)[2] if gone else None

    def _report_forgotten(self, query: QueryProgress, why: str) -> None:
        query.add_event(EventKind.FORGOTTEN, None, f"not followed any more: {why}", self.now_ms)


def _label(query: QueryProgress) -> str:
    if query.settings is not None:
        return query.settings.name
    return query.reported_name or query.query_id or query.client_id
