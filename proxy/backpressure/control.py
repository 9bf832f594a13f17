"""All queries whose rules are adaptive: who they are, what their reports change, who is gone."""

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from prometheus_client import Gauge

from metrics import BoundedLabels
from proxy.progress.query_clients import FORGET_AFTER_MS
from proxy.progress.report_handler import AcceptedReport
from proxy.quota.entities import ClientIdentity
from proxy.quota.manager import QuotaManager
from proxy.state import Journal, Record

from .pressure import KIND, QueryPressure
from .records import Kept, key_of, read_record

__all__ = ["Backpressure", "QueryPressure"]

MAX_QUERIES = 10_000
"""Further queries keep the bounds of their rules."""

FORGET_MS = FORGET_AFTER_MS
"""After its last report and the last connection of its client a query is kept as long as its
progress."""


class Backpressure:
    """The bounds and batches of all queries whose rules are adaptive. Call `tick` every second.

    Args:
        quotas: says which rule applies to a client, and puts the bounds in force.
        gauges: the metric pid_bound_bytes, labelled by query.

    """

    def __init__(self, quotas: QuotaManager, gauges: BoundedLabels[Gauge]) -> None:
        self._quotas = quotas
        self._gauges = gauges
        self._by_client: dict[str, dict[str, QueryPressure]] = {}
        self._count = 0
        self._generation = quotas.generation
        self._journal = Journal(QueryPressure.record, attrgetter("key"))
        self.on_change: Callable[[], None] = lambda: None
        """Is called when `changes` has something to write."""

    def pressure(self, identity: ClientIdentity, now_ms: float) -> QueryPressure | None:
        """Return what becomes of a client's reading; None when its rule is not adaptive."""
        self._follow_rules(now_ms)
        match = self._quotas.table.match(KIND, identity)
        client_id = identity.client_id
        if match is None or match.rule.adaptive is None or client_id is None:
            return None
        queries = self._by_client.get(client_id, {})
        if match.entity not in queries:
            if self._count >= MAX_QUERIES:
                return None
            self._by_client[client_id] = queries
            self._count += 1
            queries[match.entity] = QueryPressure(
                identity,
                match.entity,
                match.rule,
                self._quotas,
                self._gauges,
                now_ms,
                on_change=self._note_change,
            )
        return queries[match.entity]

    def of_client(self, client_id: str) -> list[QueryPressure]:
        """Return what is adaptive for a client: one, unless rules tell its users apart."""
        return list(self._by_client.get(client_id, {}).values())

    def reported(self, accepted: AcceptedReport, now_ms: float) -> None:
        """Take in a report that the registry has accepted."""
        self._follow_rules(now_ms)
        for query in self.of_client(accepted.query.client_id):
            query.reported(accepted, now_ms)

    def tick(self, now_ms: float) -> None:
        """Do what is due."""
        self._follow_rules(now_ms)
        for query in list(self._all()):
            query.tick(now_ms)
            if now_ms - query.used_ms > FORGET_MS:
                self._drop(query, now_ms)

    @property
    def clients(self) -> list[str]:
        """Client ids of all that is adaptive."""
        return list(self._by_client)

    def changes(self) -> tuple[list[Record], list[str]]:
        """Return the records to write and the keys to delete since the last call.

        A query has a record from the first report of a run until it is forgotten.
        """
        return self._journal.take()

    def changes_failed(self) -> None:
        """Let the next `changes` return what the last one did as well: it was not written."""
        self._journal.give_back()

    def load(self, records: Iterable[Record], now_ms: float) -> list[str]:
        """Take up what an earlier process kept; return which records were not, and why.

        Call it once, before anything else. Damaged ones stay in the state, untouched; those of
        clients that no adaptive rule applies to any more are deleted.
        """
        refused: list[str] = []
        for record in records:
            try:
                self._take_up(read_record(record), now_ms)
            except ValueError as error:
                refused.append(f"pressure record {record.key!r} is left out: {error}")
        return refused

    def _take_up(self, kept: Kept, now_ms: float) -> None:
        identity = ClientIdentity(kept.listener, kept.user, kept.client_id)
        match = self._quotas.table.match(KIND, identity)
        if match is None or match.rule.adaptive is None or match.entity != kept.entity:
            self._journal.mark_deleted(key_of(kept.client_id, kept.entity))
            raise ValueError("no adaptive rule applies to the client any more; it is deleted")
        pressure = self.pressure(identity, now_ms)
        if pressure is None:
            raise ValueError("there are too many queries")
        pressure.resume(kept, now_ms)

    def _note_change(self, query: QueryPressure) -> None:
        self._journal.mark_changed(query)
        self.on_change()

    def _all(self) -> Iterator[QueryPressure]:
        for queries in self._by_client.values():
            yield from queries.values()

    def _follow_rules(self, now_ms: float) -> None:
        """After a change of the rules, see which queries they still make adaptive, and how."""
        if self._generation == self._quotas.generation:
            return
        self._generation = self._quotas.generation
        for query in list(self._all()):
            match = self._quotas.table.match(KIND, query.identity)
            if match is None or match.rule.adaptive is None or match.entity != query.entity:
                self._drop(query, now_ms)
            else:
                query.follow(match.rule, now_ms)

    def _drop(self, query: QueryPressure, now_ms: float) -> None:
        query.detach(now_ms)
        self._journal.mark_removed(query)
        self.on_change()
        client_id = query.identity.client_id or ""
        del self._by_client[client_id][query.entity]
        if not self._by_client[client_id]:
            del self._by_client[client_id]
        self._count -= 1
