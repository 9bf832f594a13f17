"""Describes bounded clients: rate, bound, holds, and which rule it is and why."""

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from metrics.clock import MS_PER_SECOND
from proxy.admin.admin_parts import AdminParts
from proxy.admin.history import History, Largest, share
from proxy.admin.rule_documents import rule_name
from proxy.admin.written_values import picked, rounded
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.meter import QuotaRow
from proxy.quota.rule_sources import RuleEntry
from proxy.quota.rules import RuleTable
from proxy.state import Document

FRESH_MS = 500.0
"""How long measured rows are shown again: with 10,000 sensors they take some 0.1 s of computing
time to make, and many may be looking."""

_KINDS = list(QuotaKind)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that belong together, at least one: of one client, or of what several share."""

    rows: Sequence[QuotaRow]

    @property
    def urgency(self) -> tuple[bool, float]:
        """Throttled ones are above the others, then those closer to their bound."""
        return any(row.throttled for row in self.rows), max(map(share, self.rows))

    @property
    def client(self) -> ClientIdentity | None:
        """The only client; None if several share the quotas, or all have left."""
        counts = [row.client_count for row in self.rows]
        return self.rows[counts.index(1)].clients[0] if max(counts) == 1 else None

    @property
    def has_left(self) -> bool:
        """Whether none of its clients is connected any more."""
        return not any(row.client_count for row in self.rows)

    def in_order(self) -> list[QuotaRow]:
        """Return the rows in an order that stays while figures change."""
        return sorted(self.rows, key=lambda row: (_KINDS.index(row.kind), row.entity))


def names_of(groups: Iterable[RowGroup]) -> Iterator[tuple[str, RowGroup]]:
    """Yield each group with a name that no other has: its entity, if it is one."""
    taken: set[str] = set()
    for group in groups:
        client, name = group.client, group.rows[0].entity
        if client and (name in taken or any(row.entity != name for row in group.rows)):
            name = f"client={json.dumps([client.listener, client.user, client.client_id])}"
        elif name in taken:
            name += ",shared"
        taken.add(name)
        yield name, group


@dataclass(slots=True)
class ClientCounts:
    """How many clients are measured: connected ones, and who has left and is not forgotten.

    Those that have left are known by their entity alone: several that shared one count once.
    """

    bounded: int = 0
    """All of them."""
    throttled: int = 0
    held: int = 0
    """Of which a response waits."""
    left: int = 0
    shown: int = 0
    """Those that what was chosen is about."""

    def add_left(self, rows: Sequence[QuotaRow]) -> None:
        """Count a group of rows whose clients have left."""
        self.bounded += 1
        self.left += 1
        self.throttled += any(row.throttled for row in rows)
        self.held += any(row.hold_until_ms is not None for row in rows)

    def add_connected(
        self, quotas: QuotaManager, shown: Sequence[RowGroup], now_ms: float
    ) -> Iterator[None]:
        """Count the connected clients, one in each step, and what is shown of all."""
        self.shown += sum(group.has_left for group in shown)
        sensors = {(row.kind, row.entity) for group in shown for row in group.rows}
        for client in quotas.clients():
            meters = quotas.sensors_of(client)
            self.bounded += bool(meters)
            self.throttled += any(meter.is_throttled for meter in meters)
            self.held += any(meter.hold_until_ms(now_ms) is not None for meter in meters)
            self.shown += any((meter.kind, meter.entity) in sensors for meter in meters)
            yield


@dataclass(slots=True)
class FoundRows:
    """The rows that a request chose, and how many there are in all."""

    by_client: bool
    """Whether it chose clients, with all rows of each; else each group is one row."""
    groups: Sequence[RowGroup] = ()
    clients: ClientCounts = field(default_factory=ClientCounts)
    total: int = 0
    throttled: int = 0
    held: int = 0
    """Sensors of which a response waits."""


class ClientDocuments:
    """Bounded clients as documents for JSON."""

    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts
        self._measuring = asyncio.Lock()
        self._found: dict[tuple[str, int, bool], tuple[float, FoundRows]] = {}
        """By what was asked for, with the time from which on it is not shown any more."""

    async def closest_to_bound(self, text: str, limit: int, *, by_client: bool) -> FoundRows:
        """Return the rows of the throttled clients, then of those closest to their bound.

        They come from a walk over all sensors that ended at most `FRESH_MS` ago: at most `limit`,
        0 or more, that have `text`, in lower case, in their entity, or in the user or client id of
        a connected client. `by_client` chooses, and counts, groups with all their rows.
        """
        async with self._measuring:
            now_ms = self._parts.clock_ms()
            self._found = {key: each for key, each in self._found.items() if now_ms < each[0]}
            known = self._found.get((text, limit, by_client))
            if known is None:
                found = await self._walk(text, limit, by_client=by_client)
                known = self._parts.clock_ms() + FRESH_MS, found
                self._found[text, limit, by_client] = known
            return known[1]

    async def of_entity(self, entity: str) -> list[QuotaRow]:
        """Return a row for each sensor of an entity."""
        rows = self._parts.quotas.rows(self._parts.clock_ms)
        found = (row if row is not None and row.entity == entity else None for row in rows)
        return [row for row in await self._parts.slices.collect(found) if row is not None]

    async def _walk(self, text: str, limit: int, *, by_client: bool) -> FoundRows:
        found = FoundRows(by_client)
        # The other rows are not kept: that many at once would bring on Python's full collections.
        most: Largest[RowGroup] = Largest(limit)

        def count() -> Iterator[None]:
            for rows in self._parts.quotas.row_groups(self._parts.clock_ms):
                found.total += len(rows)
                found.throttled += sum(row.throttled for row in rows)
                found.held += sum(row.hold_until_ms is not None for row in rows)
                if rows and not any(row.client_count for row in rows):
                    found.clients.add_left(rows)
                for each in (rows,) if by_client else ((row,) for row in rows):
                    if any(_has(row, text) for row in each):
                        group = RowGroup(each)
                        most.add(group.urgency, group)
                yield
            found.groups = most.descending()
            yield from found.clients.add_connected(
                self._parts.quotas, found.groups, self._parts.clock_ms()
            )

        await self._parts.slices.collect(count())
        return found

    async def describe(self, rows: Iterable[tuple[QuotaRow, Document]]) -> list[Document]:
        """Return the document of each row, with what it says besides."""
        in_force, adaptive = self._parts.rules.in_force(), await self._parts.queries.adaptive()
        now_ms = self._parts.clock_ms()
        return await self._parts.slices.collect(
            {**_row(row, in_force, adaptive, now_ms), **more} for row, more in rows
        )

    async def describe_found(
        self, found: FoundRows, history: History | None = None
    ) -> list[Document]:
        """Return the document of each row that was found, with its history if there is one."""

        def rows() -> Iterator[tuple[QuotaRow, Document]]:
            for name, group in names_of(found.groups):
                about = {"group": name, "shares": self._shares(group)} if found.by_client else {}
                for row in group.in_order():
                    charted = {} if history is None else {"history": history.document(row)}
                    yield row, {**about, **charted}

        return await self.describe(rows())

    def _shares(self, group: RowGroup) -> list[Document]:
        """Return the quotas that the only client of a group shares with others."""
        client = group.client
        own = {(row.kind, row.entity) for row in group.rows}
        return [
            {"quota": str(each.kind), "entity": each.entity, "throttled": each.is_throttled}
            for each in (() if client is None else self._parts.quotas.sensors_of(client))
            if (each.kind, each.entity) not in own
        ]

    async def explain(self, row: QuotaRow) -> list[Document]:
        """Return for each connected client the rules that were looked at, and what came of it."""
        # In a thread: of 10,000 rules it takes some 50 ms for each client.
        return await asyncio.to_thread(
            self._explain, row, self._parts.rules.in_force(), self._parts.quotas.table
        )

    @staticmethod
    def _explain(
        row: QuotaRow, in_force: Mapping[str, RuleEntry], table: RuleTable
    ) -> list[Document]:
        documents: list[Document] = []
        for client in row.clients:
            rules: dict[QuotaKind, list[Document]] = {kind: [] for kind in QuotaKind}
            for each in table.explain(client):
                rules[each.kind].append(
                    {
                        **rule_name(each.rule, in_force),
                        "bound": each.rule.bounds[each.kind],
                        "chosen": each.chosen,
                        "reason": each.reason,
                    }
                )
            quotas = [{"quota": str(kind), "rules": found} for kind, found in rules.items()]
            documents.append({**_client(client), "quotas": quotas})
        return documents

    async def unbounded(self, text: str, limit: int) -> Document:
        """Return how many connected clients no rule bounds, and those of them with most traffic.

        Arguments as above.
        """
        clients, rates = self._parts.quotas.unbounded(), self._parts.connections.client_rates
        found: Largest[ClientIdentity] = Largest(limit)

        def choose() -> Iterator[None]:
            for client in clients:
                if _names(client, text):
                    found.add(rates.get(client, 0.0), client)
                yield

        await self._parts.slices.collect(choose())
        shown = [
            {**_client(client), "rate": rounded(rates.get(client))} for client in found.descending()
        ]
        return {"unbounded": len(clients), "unbounded_clients": shown}


def _row(
    row: QuotaRow,
    in_force: Mapping[str, RuleEntry],
    adaptive: Mapping[str, Document],
    now_ms: float,
) -> Document:
    left_ms = 0.0 if row.hold_until_ms is None else row.hold_until_ms - now_ms
    adapted = None
    if row.static_bound is not None:
        known = adaptive.get(row.entity, {})
        about = {"rate_records": known.get("rate"), "bound_age_s": known.get("bound_age_s")}
        adapted = {**picked(row, "bound", "reason"), **about}
    return {
        **picked(row, "entity", "bound", "throttled", "enforced", "would_throttle", "above_s"),
        **picked(row, "holds", "waiting", "client_count", "static_bound"),
        "quota": str(row.kind),
        "unit": row.kind.unit.name,
        "rate": round(row.rate, 1),
        "window_s": round(row.window_ms / MS_PER_SECOND, 3),
        "held_s": round(row.held_ms / MS_PER_SECOND, 3),
        "hold_ends_in_s": round(left_ms / MS_PER_SECOND, 3) if left_ms > 0 else None,
        "rule": rule_name(row.rule, in_force),
        "clients": list(map(_client, row.clients)),
        "adaptive": adapted,
    }


def _client(client: ClientIdentity) -> Document:
    return picked(client, "listener", "user", "client_id")


def _has(row: QuotaRow, text: str) -> bool:
    """Return whether a lower-case text is in the entity or names one of the clients."""
    return text in row.entity.lower() or any(_names(each, text) for each in row.clients)


def _names(client: ClientIdentity, text: str) -> bool:
    """Return whether a lower-case text is in the client id or the user."""
    return text in (client.client_id or "").lower() or text in (client.user or "").lower()
