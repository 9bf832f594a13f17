"""Describes clients and connections: what each moves, what holds it, and which rule and why."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from metrics.clock import MS_PER_SECOND
from proxy.admin.admin_parts import AdminParts
from proxy.admin.budget_documents import budget_document, part_document
from proxy.admin.history import History, Largest, share
from proxy.admin.query_documents import Cached
from proxy.admin.rule_documents import rule_name, throttling_document
from proxy.admin.written_values import iso, picked, rounded
from proxy.quota.budget_rows import BudgetRow, BudgetShares
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.meter import QuotaRow
from proxy.quota.rule_registry import RuleEntry
from proxy.quota.rules import RuleTable
from proxy.relay.connection_list import ConnectionHold, ConnectionRow
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
class FoundRows:
    """The rows that a request chose, and how many there are in all.

    Clients that have left, and are not forgotten, are known by their entity alone: several that
    shared one count once.
    """

    by_client: bool
    """Whether it chose clients, with all rows of each; else each group is one row."""
    groups: Sequence[RowGroup] = ()
    budgets: Sequence[BudgetRow] = ()
    sensors: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("bounded", "throttled", "held"), 0)
    )
    """Of `held` ones a response waits."""
    clients: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("bounded", "throttled", "held", "left", "shown"), 0)
    )
    """The connected ones and those that have `left`; `shown` are those that the groups are of."""

    def add(self, rows: Sequence[QuotaRow]) -> None:
        """Count rows that belong together, and their clients if these have left."""
        throttled = sum(row.throttled for row in rows)
        held = sum(row.hold_until_ms is not None for row in rows)
        self.sensors["bounded"] += len(rows)
        self.sensors["throttled"] += throttled
        self.sensors["held"] += held
        if rows and not any(row.client_count for row in rows):
            self.clients["bounded"] += 1
            self.clients["left"] += 1
            self.clients["throttled"] += throttled > 0
            self.clients["held"] += held > 0

    def add_connected(self, quotas: QuotaManager, now_ms: float) -> Iterator[None]:
        """Count the connected clients, one in each step, and those of the groups."""
        counts = self.clients
        counts["shown"] += sum(group.has_left for group in self.groups)
        sensors = {(row.kind, row.entity) for group in self.groups for row in group.rows}
        for client in quotas.clients():
            meters = quotas.sensors_of(client)
            counts["bounded"] += bool(meters)
            counts["throttled"] += any(meter.is_throttled for meter in meters)
            counts["held"] += any(meter.hold_until_ms(now_ms) is not None for meter in meters)
            counts["shown"] += any((meter.kind, meter.entity) in sensors for meter in meters)
            yield


class ClientDocuments:
    """Clients as documents for JSON."""

    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts
        self._quotas, self._slices, self._clock_ms = parts.quotas, parts.slices, parts.clock_ms
        self._found = Cached(self._walk, self._slices, self._clock_ms, lambda _: FRESH_MS)

    async def fields(
        self, text: str, limit: int, *, by_client: bool, history: History | None = None
    ) -> tuple[dict[str, int], Document]:
        """Return figures of all sensors, and what the status and `/v1/clients` say of clients.

        They show the throttled clients, then those closest to their bound: at most `limit`, 0 or
        more, that have `text`, in lower case, in their entity, or in the user or client id of a
        connected client. `by_client` chooses, and counts, groups with all their rows.
        """
        (found,) = await self._found.get(text, limit, by_client)
        return found.sensors, {
            "client_counts": found.clients,
            "throttling": throttling_document(self._parts.rules, time.time()),
            "budgets": list(map(budget_document, found.budgets[:limit])),
            "clients": await self.describe(self._rows(found, history)),
            **(await self._unbounded(text, limit)),
        }

    async def of_entity(self, entity: str) -> list[QuotaRow]:
        """Return a row for each sensor of an entity."""
        rows = self._quotas.rows(self._clock_ms)
        found = (row if row is not None and row.entity == entity else None for row in rows)
        return [row for row in await self._slices.collect(found) if row is not None]

    def _walk(self, text: str, limit: int, by_client: bool) -> Iterator[FoundRows | None]:
        found, shares = FoundRows(by_client), BudgetShares()
        # The other rows are not kept: that many at once would bring on Python's full collections.
        most: Largest[RowGroup] = Largest(limit)
        for rows in self._quotas.row_groups(self._clock_ms, shares):
            found.add(rows)
            for each in (rows,) if by_client else ((row,) for row in rows):
                if any(_has(row, text) for row in each):
                    group = RowGroup(each)
                    most.add(group.urgency, group)
            yield None
        found.groups = most.descending()
        found.budgets = self._quotas.budget_rows(shares, self._clock_ms())
        yield from found.add_connected(self._quotas, self._clock_ms())
        yield found

    async def describe(self, rows: Iterable[tuple[QuotaRow, Document]]) -> list[Document]:
        """Return the document of each row, with what it says besides."""
        in_force, adaptive = self._parts.rules.in_force(), await self._parts.queries.adaptive()
        now_ms = self._clock_ms()
        return await self._slices.collect(
            {**_row(row, in_force, adaptive, now_ms), **more} for row, more in rows
        )

    def _rows(
        self, found: FoundRows, history: History | None
    ) -> Iterator[tuple[QuotaRow, Document]]:
        """Yield each row that was found, and what it says besides."""
        for name, group in names_of(found.groups):
            about = {"group": name, "shares": self._shares(group)} if found.by_client else {}
            for row in group.in_order():
                charted = {} if history is None else {"history": history.document(row)}
                yield row, {**about, **charted}

    def _shares(self, group: RowGroup) -> list[Document]:
        """Return the quotas that the only client of a group shares with others."""
        client = group.client
        own = {(row.kind, row.entity) for row in group.rows}
        return [
            {"quota": str(each.kind), "entity": each.entity, "throttled": each.is_throttled}
            for each in (() if client is None else self._quotas.sensors_of(client))
            if (each.kind, each.entity) not in own
        ]

    async def _unbounded(self, text: str, limit: int) -> Document:
        """Return how many connected clients no rule bounds, and those of them with most traffic."""
        clients, rates = self._quotas.unbounded(), self._parts.connections.client_rates
        found: Largest[ClientIdentity] = Largest(limit)

        def choose() -> Iterator[None]:
            for client in clients:
                if _names(client, text):
                    found.add(rates.get(client, 0.0), client)
                yield

        await self._slices.collect(choose())
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
        "leased": rounded(row.leased),
        **part_document(row.part),
        "rule": rule_name(row.rule, in_force),
        "clients": list(map(_client, row.clients)),
        "adaptive": adapted,
    }


def explain(row: QuotaRow, in_force: Mapping[str, RuleEntry], table: RuleTable) -> list[Document]:
    """Return for each connected client the rules that were looked at, and what came of it.

    In a thread: of 10,000 rules it takes some 50 ms for each client.
    """
    documents: list[Document] = []
    for client in row.clients:
        rules: dict[QuotaKind, list[Document]] = {kind: [] for kind in QuotaKind}
        for each in table.explain(client):
            about = {"bound": each.rule.ceilings[each.kind], **picked(each, "chosen", "reason")}
            rules[each.kind].append({**rule_name(each.rule, in_force), **about})
        for kind, found in rules.items():
            for rule in table.rules_by_topic(kind, client):
                topic = rule.topic or f"{rule.topic_prefix}*"
                about = {"bound": rule.bounds[kind], "chosen": True}
                reason = f"applies to its bytes of topic {topic}"
                found.append({**rule_name(rule, in_force), **about, "reason": reason})
        quotas = [{"quota": str(kind), "rules": found} for kind, found in rules.items()]
        documents.append({**_client(client), "quotas": quotas})
    return documents


def _client(client: ClientIdentity) -> Document:
    return picked(client, "listener", "user", "client_id")


def _has(row: QuotaRow, text: str) -> bool:
    """Return whether a lower-case text is in the entity or names one of the clients."""
    return text in row.entity.lower() or any(_names(each, text) for each in row.clients)


def _names(client: ClientIdentity, text: str) -> bool:
    """Return whether a lower-case text is in the client id or the user."""
    return text in (client.client_id or "").lower() or text in (client.user or "").lower()


async def connections_document(
    parts: AdminParts, text: str, limit: int, after: int | None
) -> Document:
    """Return at most `limit` open connections with `text`, in lower case, in what names them.

    Those with most traffic come first; with `after` those with higher numbers than that, in the
    order of their numbers.
    """
    found: Largest[ConnectionRow] = Largest(limit)
    counts = dict.fromkeys(("total", "held", "matching"), 0)

    def choose() -> Iterator[None]:
        for row in parts.connections.rows():
            counts["total"] += 1
            counts["held"] += row.hold is not None
            if _is_named(row, text) and (after is None or row.number > after):
                counts["matching"] += 1
                found.add(row.rate if after is None else -row.number, row)
            yield

    now_ms, now_s = parts.clock_ms(), time.time()
    await parts.slices.collect(choose())
    in_force = parts.rules.in_force()
    documents = await parts.slices.collect(
        _connection(row, in_force, now_ms, now_s) for row in found.descending()
    )
    return {**counts, "connections": documents}


def _is_named(row: ConnectionRow, text: str) -> bool:
    names = (row.client_id, row.user, row.ip, row.listener)
    return any(text in (name or "").lower() for name in names)


def _connection(
    row: ConnectionRow, in_force: Mapping[str, RuleEntry], now_ms: float, now_s: float
) -> Document:
    age_s = max(now_ms - row.began_ms, 0.0) / MS_PER_SECOND
    return {
        "id": row.number,
        "address": row.ip,
        **picked(row, "port", "listener", "user", "client_id", "node_id", "broker"),
        **picked(row, "state", "in_flight"),
        "since": iso(now_s - age_s),
        "age_s": round(age_s, 1),
        "received_rate": rounded(row.received_rate),
        "sent_rate": rounded(row.sent_rate),
        "held": None if row.hold is None else _hold(row.hold, in_force, now_ms, now_s),
    }


def _hold(
    hold: ConnectionHold, in_force: Mapping[str, RuleEntry], now_ms: float, now_s: float
) -> Document:
    until_ms = hold.until_ms
    left_s = None if until_ms is None else max(until_ms - now_ms, 0.0) / MS_PER_SECOND
    return {
        "where": hold.where,
        "quota": None if hold.kind is None else str(hold.kind),
        "entity": hold.entity,
        "rule": None if hold.rule is None else rule_name(hold.rule, in_force),
        "until": None if left_s is None else iso(now_s + left_s),
        "ends_in_s": rounded(left_s, 3),
    }
