"""All queries whose rules are adaptive: who they are, what their reports change, who is gone."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import attrgetter

from prometheus_client import Gauge

from metrics import BoundedLabels
from proxy.progress.owns import Owns, owns_all
from proxy.progress.query import MAX_QUERIES
from proxy.progress.query_registry import FORGET_AFTER_MS
from proxy.progress.report_handler import AcceptedReport
from proxy.quota.entities import ClientIdentity
from proxy.quota.manager import QuotaManager
from proxy.quota.rules import Match
from proxy.state import Journal, Record

from .backpressure_record import BOUND_RECORDS, read_bound_record
from .query_backpressure import KIND, QueryBackpressure


class Backpressure:
    """The bounds and batches of all queries whose rules are adaptive. Call `tick` every second.

    `gauges`: the metric adaptive_bound_bytes by query; `withheld`: adaptive_withheld_records;
    `on_change`: called when `changes` has something new.
    """

    def __init__(
        self,
        quotas: QuotaManager,
        gauges: BoundedLabels[Gauge],
        withheld: BoundedLabels[Gauge],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._quotas = quotas
        self._gauges = gauges, withheld
        self._by_client: dict[str, list[QueryBackpressure]] = {}
        """One of each client, unless rules tell its users apart."""
        self._generation = quotas.generation
        self._journal = Journal(QueryBackpressure.record, attrgetter("key"))
        self.changes, self.changes_failed = self._journal.take, self._journal.give_back
        """See Journal. A query has a record from a run's first report until it is forgotten."""
        self._on_change = on_change
        self._owns = owns_all
        self._leaving: list[QueryBackpressure] = []
        """Adapted no more, and not yet written to the end."""

    def of_identity(self, identity: ClientIdentity, now_ms: float) -> QueryBackpressure | None:
        """Return that of a client, made when it is new.

        None when its rule is not adaptive, or the client is not this member's. Beyond MAX_QUERIES,
        too: further queries keep the bounds of their rules.
        """
        self._follow_rules(now_ms)
        match, client_id = self._match(identity), identity.client_id
        if match is None or client_id is None or not self._owns.client(client_id):
            return None
        for query in self._by_client.get(client_id, ()):
            if query.entity == match.entity:
                return query
        if sum(map(len, self._by_client.values())) >= MAX_QUERIES:
            return None
        shared = self._quotas, self._gauges, self._changed
        query = QueryBackpressure(identity, match.rule, match.entity, now_ms, *shared)
        self._by_client.setdefault(client_id, []).append(query)
        return query

    def is_adaptive(self, identity: ClientIdentity) -> bool:
        """Return whether a client's rule is adaptive, whoever owns the client."""
        return self._match(identity) is not None

    def own(self, owns: Owns, now_ms: float) -> None:
        """Adapt the bounds of these clients only; what is due of others is still in `changes`."""
        self._owns = owns
        for query in self._all():
            if not owns.client(query.client_id):
                self._changed(query)
                self._leaving.append(query)
                self._remove(query, now_ms)

    def forget_leaving(self) -> None:
        """Write nothing more of what is adapted no more; its records stay."""
        gone, self._leaving = self._leaving, []
        if gone:
            self._journal.forget(gone)

    def of_client(self, client_id: str) -> list[QueryBackpressure]:
        """Return what is adaptive for a client: one, unless rules tell its users apart."""
        return list(self._by_client.get(client_id, ()))

    def record_report(self, accepted: AcceptedReport, now_ms: float) -> QueryBackpressure | None:
        """Record a report that was accepted; return what it is about, the first if several."""
        self._follow_rules(now_ms)
        queries = self._by_client.get(accepted.query.client_id, ())
        for query in queries:
            query.record_report(accepted, now_ms)
        return queries[0] if queries else None

    def tick(self, now_ms: float) -> None:
        """Do what is due; a query without reports and connections is kept as long as progress."""
        self._follow_rules(now_ms)
        for query in self._all():
            query.tick(now_ms)
            if now_ms - query.used_ms > FORGET_AFTER_MS:
                self._drop(query, now_ms)

    @property
    def clients(self) -> list[str]:
        """Client ids of all that is adaptive."""
        return list(self._by_client)

    def load(self, records: Iterable[Record], now_ms: float) -> list[str]:
        """Resume what an earlier process kept, or another member; return which were not, and why.

        Call it before anything is known of their clients. Damaged ones stay; those that no
        adaptive rule applies to are deleted.
        """
        refused: list[str] = []
        for record in records:
            try:
                kept = read_bound_record(record)
                identity = ClientIdentity(kept.listener, kept.user, kept.client_id)
                match = self._match(identity)
                if match is None or match.entity != kept.entity:
                    self._journal.mark_deleted(BOUND_RECORDS.key(kept.client_id, kept.entity))
                    raise ValueError(
                        "no adaptive rule applies to the client any more; it is deleted"
                    )
                query = self.of_identity(identity, now_ms)
                if query is None:
                    raise ValueError("there are too many queries")
                query.resume(kept, now_ms)
            except ValueError as error:
                refused.append(f"pressure record {record.key!r} is left out: {error}")
        return refused

    def _match(self, identity: ClientIdentity) -> Match | None:
        match = self._quotas.table.match(KIND, identity)
        if match is None or match.rule.adaptive is None:
            return None
        # A pause gives some clients a sensor of their own; a query stays the same.
        return replace(match, entity=match.rule.entity(identity))

    def _changed(self, query: QueryBackpressure) -> None:
        if query in self._by_client.get(query.client_id, ()):
            # Else a driver's answer came after the query was let go.
            self._journal.mark_changed(query)
            self._on_change()

    def _all(self) -> list[QueryBackpressure]:
        return [query for queries in self._by_client.values() for query in queries]

    def _follow_rules(self, now_ms: float) -> None:
        """Set the rules that apply after a change of them; drop the queries that none does."""
        if self._generation == self._quotas.generation:
            return
        self._generation = self._quotas.generation
        for query in self._all():
            match = self._match(query.identity)
            if match is None or match.entity != query.entity:
                self._drop(query, now_ms)
            else:
                query.set_rule(match.rule, now_ms)

    def _drop(self, query: QueryBackpressure, now_ms: float) -> None:
        self._journal.mark_removed(query)
        self._on_change()
        self._remove(query, now_ms)

    def _remove(self, query: QueryBackpressure, now_ms: float) -> None:
        query.detach(now_ms)
        queries = self._by_client[query.client_id]
        queries.remove(query)
        if not queries:
            del self._by_client[query.client_id]
