"""Describes clients and connections: what each moves, what holds it, and which rule and why."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from metrics import WindowedSum
from metrics.clock import MS_PER_SECOND, ms_to_s
from metrics.member_names import machine_of
from proxy.admin.admin_parts import AdminParts
from proxy.admin.document_models import (
    UNKNOWN,
    Column,
    DocumentModel,
    RowContext,
    iso,
    picked,
    rounded,
)
from proxy.admin.history import RateHistory, merged_chart
from proxy.admin.pagination import Key, PageBuilder, PageRequest
from proxy.admin.query_documents import CachedWalk
from proxy.admin.rule_documents import rule_reference, throttling_document
from proxy.admin.sensor_rows import (
    SHOWN_CLIENTS,
    BudgetRow,
    BudgetShareCalculator,
    SensorRow,
    rows_by_client,
)
from proxy.config.endpoints import HostPort
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.meter import Meter
from proxy.quota.rules import RuleTable
from proxy.relay.connection_list import ConnectionRow, HoldReason
from proxy.state import Document

FRESH_MS = 500.0
"""How long measured rows are shown again: with 10,000 sensors they take some 0.1 s of computing
time to make, and many may be looking."""

IS_VISIT = "is_visit"  # in what a member tells another one, of a client that it does not own


def _seconds(ms: float) -> float:
    return round(ms / MS_PER_SECOND, 3)


def _left_s(until_ms: float | None, now: RowContext) -> float | None:
    return None if until_ms is None else _seconds(max(until_ms - now.now_ms, 0.0))


def _in_minute(counted: WindowedSum | None, now: RowContext) -> tuple[int, float]:
    """Return how many there were in the last minute, and what they add up to."""
    if counted is None:
        return 0, 0.0
    return counted.events(now.now_ms), counted.measure(now.now_ms)


def _above(row: SensorRow, now: RowContext) -> tuple[int, float]:
    return _in_minute(None if row.meter.is_enforced else row.meter.above, now)


def _adapted(row: SensorRow, now: RowContext) -> Document | None:
    meter = row.meter
    if not meter.is_adaptive:
        return None
    known = now.adaptive.get(meter.entity, {})
    return {
        "bound": meter.shown_bound,
        "reason": meter.adapted and meter.adapted.reason,
        "rate_records": known.get("rate"),
        "bound_age_s": known.get("bound_age_s"),
    }


def _client(client: ClientIdentity) -> Document:
    return picked(client, "listener", "user", "client_id")


def _of_part(
    name: str, shown: Callable[[Any], Any] = lambda value: value
) -> Callable[[SensorRow, RowContext], Any]:
    """Return what gives a figure of a client's part of a budget; None without a budget."""
    return lambda row, _: shown(getattr(row.part, name, None))


def _sum(digits: int) -> Callable[[list[Any]], Any]:
    """Return what adds values up; what one of them does not know, nobody does."""
    return lambda values: None if None in values else round(sum(values), digits)


def _each_client(lists: Iterable[Sequence[Document]]) -> list[Document]:
    """Return the clients of several rows, each once, as the last one has it."""
    return list({client_key(each): each for of_row in lists for each in of_row}.values())


client_key: Callable[[Document], tuple[Any, ...]] = itemgetter("listener", "user", "client_id")
"""Gives what tells a client from others."""


CLIENT = DocumentModel[SensorRow](
    """
    entity, quota: whose traffic is added up, and which kind
    rate, unit: measured now, in `bytes_per_second` or `percent`
    bound: the most that is allowed now
    leased: in a tier: what this member has of a bound that is
        [divided](quotas.md#which-clients-stay-together), of all members their sum; else `null`
    window_s: over which time the rate is measured
    enforced: `false`: the clients are measured and held for nothing
    would_throttle, above_s: then: measurements above the bound in the last minute, and in how many
        seconds there were any
    throttled: held at least once, and not yet 30 s without a hold
    holds, held_s: responses held and requests kept waiting in the last minute, and for how long,
        added up
    hold_ends_in_s: when the last response that is held now leaves; `null` when none is
    waiting: connections whose next request is not read, since the client owes too much, or since
        it is not its turn in its budget
    rule: `selector`, `title`, `place`, `source` (`file`, `override`, `kafka`), `by`, `at`, `until`,
        `schedule`
    clients, client_count: up to 20 of the connected clients that share it, and how many there are
    static_bound: the rule's own bound where the rule is adaptive, and `bound` is that or less; else
        `null`
    adaptive: with it: `rate_records` (records/s; `null` when not known), `bound`, `reason`, and
        `bound_age_s`, for how long that bound has been in force
    budget, weight, guaranteed, ceiling: what it has of its [budget](#budgets): the name, its
        weight, the rate that it is guaranteed, and the most that it can have. `null` without a
        budget, as the next four
    fair_share: what it would get if all clients that are active wanted more; `null` while it is not
        active
    borrowed, lent: what its `rate` is above its `fair_share`; what it is below that, where others
        of the budget wait or borrow, and it does not wait itself
    waits_for: what its connections wait for at the budget's gate, in words; `null` when none does
    group: with `by=client`: a text that the rows of one client have in common
    shares: with `by=client`: the quotas (`quota`, `entity`, `throttled`) that it shares with others
    history: in `/v1/status`: `rates`, one for each `interval_s`, the oldest first, and `bounds`,
        pairs of (position, bound) where the bound changed. It goes back 10 minutes, and is kept for
        the 200 that came closest to their bound
    connected: in `/v1/clients/{entity}`: of each connected client the rules that were looked at for
        each `quota`, whether it was `chosen`, and the `reason`
    member, members: in a tier: where it is; of a client that is at several members for a while all
    """,
    {
        "entity": "meter.entity",
        "quota": lambda row, _: str(row.meter.kind),
        "rate": lambda row, now: round(row.meter.rate.measure(now.now_ms), 1),
        "unit": "meter.kind.unit.name",
        "bound": "meter.shown_bound",
        "leased": lambda row, _: rounded(row.meter.leased),
        "window_s": lambda row, now: _seconds(row.meter.rate.window_size_ms(now.now_ms)),
        "enforced": "meter.is_enforced",
        "would_throttle": lambda row, now: _above(row, now)[0],
        "above_s": lambda row, now: int(_above(row, now)[1]),
        "throttled": "meter.is_throttled",
        "holds": lambda row, now: _in_minute(row.meter.holds, now)[0],
        "held_s": lambda row, now: _seconds(_in_minute(row.meter.holds, now)[1]),
        "hold_ends_in_s": lambda row, now: _left_s(row.meter.held_until_ms, now) or None,
        "waiting": "meter.waiting",
        "rule": lambda row, now: rule_reference(row.meter.rule, now),
        "clients": lambda row, _: list(map(_client, row.clients)),
        "static_bound": lambda row, _: (
            row.meter.rule.ceilings[row.meter.kind] if row.meter.is_adaptive else None
        ),
        "adaptive": _adapted,
        **{
            name: _of_part(name)
            for name in ("budget", "weight", "guaranteed", "ceiling", "waits_for")
        },
        **{name: _of_part(name, rounded) for name in ("fair_share", "borrowed", "lent")},
    },
    {
        # Each member counts what happened on its own connections.
        **dict.fromkeys(("would_throttle", "holds", "waiting"), sum),
        **{"held_s": _sum(3), "throttled": any, "above_s": max, "client_count": max},
        "hold_ends_in_s": lambda ends: max((e for e in ends if e is not None), default=None),
        "clients": lambda lists: _each_client(lists)[:SHOWN_CLIENTS],
        "connected": _each_client,
        "history": merged_chart,
    },
    {
        "rate": _sum(1),
        "leased": lambda parts: round(sum(filter(None, parts)), 1),
        "client_count": sum,
        "history": partial(merged_chart, of_interval=sum),
    },
)

BUDGET = DocumentModel[BudgetRow](
    """
    name, parent: of the budget, and of the one that it is in; `null` where it is in none
    quota, unit: which of its rates, in `bytes_per_second`
    rate: measured of all its clients together
    leased: in a tier: what is [leased](scale-out.md#what-clients-of-several-members-share) to the
        members that serve its clients, together; `null` without a tier
    bound: the most that its clients may have together
    guaranteed: what its clients are guaranteed in all, whether they are there or not
    active_clients: those that moved bytes in the last 2 s, wait, or are held. Shares are computed
        among them
    waiting: connections that wait at its gate, or at that of a budget around it
    enforced: `false`: it is measured and holds nobody
    throttled, holds, held_s: as of a client. What a budget holds counts here; in the rows of its
        clients what their own bounds hold
    """,
    {
        "name": "budget.name",
        "parent": lambda row, _: row.budget.share and row.budget.share.budget.name,
        "bound": lambda row, _: row.budget.ceilings[row.meter.kind],
        "guaranteed": "guaranteed",
    },
    {
        **dict.fromkeys(("active_clients", "waiting", "holds"), sum),
        **{"rate": _sum(1), "leased": _sum(1), "held_s": _sum(3), "throttled": any},
    },
    like=CLIENT,
)

UNBOUNDED = DocumentModel[ClientIdentity](
    """
    listener, user, client_id: who it is
    rate: what all connections of the client moved per second in both directions, over 5 s and at
        most 5 s ago; `null` for one that has just come
    """,
    {},
    {"rate": lambda rates: rounded(sum(filter(None, rates))) if any(rates) else rates[0]},
)

HELD_FOR = {
    "delay_queue": "response held",
    "muted": "muted",
    "gate": "waits at the gate",
    "connection_rate": "too many new connections",
    "one_at_a_time": "one request at a time",
    "login": "login under way",
    "in_flight": "too many requests in flight",
    "client_not_reading": "client does not read",
    "broker_not_reading": "broker does not read",
}
"""What keeps a connection waiting, for people."""


def _why(hold: HoldReason, _: RowContext) -> str:
    quota = f": {hold.kind} of {hold.entity}" if hold.kind else ""
    rule = f", {hold.rule.place or hold.rule.title}" if hold.rule else ""
    return f"{HELD_FOR.get(hold.where, hold.where)}{quota}{rule}"


HOLD = DocumentModel[HoldReason](
    """
    where, why: one of the words below; and the same with what follows, for people
    quota, entity, rule: what holds it, and by which rule or budget, as of a client; `null` where
        none does
    until, ends_in_s: when it goes on; `null` where that is not known
    """,
    {
        "why": _why,
        "quota": lambda hold, _: hold.kind and str(hold.kind),
        "rule": lambda hold, now: hold.rule and rule_reference(hold.rule, now),
        "until": lambda hold, now: iso(now.at_s(hold.until_ms)),
        "ends_in_s": lambda hold, now: _left_s(hold.until_ms, now),
    },
)


CONNECTION = DocumentModel[ConnectionRow](
    """
    id: its number, not used twice while the proxy runs
    address, port, listener: where it comes from, and where it came in
    user, client_id: `null` before the first request, too
    node_id, broker: the broker that the client asked for, `null` on the bootstrap port; and the
        address that the proxy is connected to for it
    since, age_s: when it came, and for how long it is there
    state: `new` (has sent nothing), `dialling` (the broker), `open`, `draining`, `lingering`
    received_rate, sent_rate: bytes per second from and to the client over the last 5 s, as the
        kernel counts them (with TLS, encrypted); `null` in a connection's first second
    in_flight: requests without an answer
    held: `null` when it goes on; else the following
    """,
    {
        "id": "number",
        "address": "ip",
        "since": lambda row, now: iso(now.at_s(row.began_ms)),
        "age_s": lambda row, now: rounded(ms_to_s(now.now_ms - row.began_ms)),
        "received_rate": lambda row, _: rounded(row.received_rate),
        "sent_rate": lambda row, _: rounded(row.sent_rate),
        "held": lambda row, now: row.hold and HOLD.document(row.hold, now),
    },
    # Address and client at any width: who it is must not depend on the terminal.
    columns=(
        Column("id", "id", "number"),
        Column("address", lambda row: str(HostPort(row["address"], row["port"]))),
        Column("client", lambda row: row["client_id"] or "(no client id)", ratio=3),
        Column("user", lambda row: row["user"] or UNKNOWN, from_width=100),
        Column("listener", "listener", from_width=140, page="Listener"),
        Column("broker", "node_id", "number", 90, none="bootstrap", page="Broker"),
        Column("age", "age_s", "age", page="Age"),
        Column("in", "received_rate", "rate", page="In"),
        Column("out", "sent_rate", "rate", page="Out"),
        Column("flight", "in_flight", "count", 90, page="In flight"),
        Column("held", "held.why", ratio=4, page="Held"),
        Column("ends in", "held.ends_in_s", "seconds", page="Goes on in"),
    ),
)


ClientRows = Sequence[SensorRow]
"""Rows that belong together, at least one: of one client, or of what several share."""


def _group_urgency(group: ClientRows, now_ms: float) -> tuple[bool, float]:
    """Return what puts throttled ones above the others, then those closer to their bound."""
    return any(row.meter.is_throttled for row in group), max(row.share(now_ms) for row in group)


def _group_key(group: ClientRows) -> tuple[str, str]:
    """Return what a walk has a group by."""
    return min((row.meter.entity, str(row.meter.kind)) for row in group)


def _only_client(group: ClientRows) -> ClientIdentity | None:
    """Return the only client; None if several share the quotas, or all have left."""
    counts = [row.client_count for row in group]
    return group[counts.index(1)].clients[0] if max(counts) == 1 else None


def _has_left(group: ClientRows) -> bool:
    """Return whether none of its clients is connected any more."""
    return not any(row.client_count for row in group)


def _counts(meters: Sequence[Meter], now_ms: float) -> dict[str, int]:
    """Return how many sensors these are, are throttled, and have a response that waits."""
    return {
        "bounded": len(meters),
        "throttled": sum(each.is_throttled for each in meters),
        "held": sum(each.held_until_ms > now_ms for each in meters),
    }


@dataclass(slots=True)
class FoundRows:
    """The rows that a request chose, and how many there are in all.

    Clients that have left, and are not forgotten, are known by their entity alone: several that
    shared one count once.
    """

    groups: Sequence[ClientRows] = ()
    budgets: Sequence[Document] = ()
    next: Document = field(default_factory=dict)
    """Of a walk."""
    sensors: dict[str, int] = field(default_factory=lambda: _counts((), 0.0))
    clients: dict[str, int] = field(
        default_factory=lambda: {**_counts((), 0.0), "left": 0, "shown": 0}
    )
    """The connected ones and those that have `left`; `shown` are those that the groups are of."""

    def add(self, group: ClientRows, now_ms: float) -> None:
        """Count rows that belong together, and their clients if these have left."""
        for name, number in _counts([row.meter for row in group], now_ms).items():
            self.sensors[name] += number
            self.clients[name] += number > 0 and _has_left(group)
        self.clients["left"] += _has_left(group)

    def add_connected(
        self, quotas: QuotaManager, is_visitor: Callable[[ClientIdentity], bool], now_ms: float
    ) -> Iterator[None]:
        """Count the connected clients, one in each step, and those of the groups."""
        self.clients["shown"] += sum(map(_has_left, self.groups))
        sensors = {row.meter.name for group in self.groups for row in group}
        for client in quotas.clients():
            meters = () if is_visitor(client) else quotas.sensors_of(client)
            for name, number in _counts(meters, now_ms).items():
                self.clients[name] += number > 0
            self.clients["shown"] += any(meter.name in sensors for meter in meters)
            yield


class ClientDocuments:
    """Clients as documents for JSON."""

    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts
        self._quotas, self._slices, self._clock_ms = parts.quotas, parts.slices, parts.clock_ms
        how = parts.slices, parts.clock_ms, parts.cpu_ms, lambda _: FRESH_MS
        self._found = CachedWalk(self._walk, *how)

    async def fields(
        self, text: str, page: PageRequest, *, by_client: bool, history: RateHistory | None = None
    ) -> tuple[dict[str, int], Document]:
        """Return figures of all sensors, and what the status and `/v1/clients` say of clients.

        They show those of a page that have `text`, in lower case, in their entity, or in the user
        or client id of a connected client: the throttled ones first, then those closest to their
        bound. `by_client` chooses, and counts, groups with all their rows. Clients that another
        member owns are shown, and not counted.
        """
        (found,) = await self._found.get(text, page, by_client)
        return found.sensors, {
            "client_counts": found.clients,
            "throttling": throttling_document(self._parts.rules, time.time()),
            "budgets": found.budgets[: page.limit],
            "clients": await self.describe(self._rows(found.groups, history, by_client)),
            **(await self.unbounded(text, PageRequest(page.limit))),
            **found.next,
        }

    async def budgets(self, page: PageRequest) -> Document:
        """Return the rates of budgets of a page, each behind the budget that it is in."""
        (found,) = await self._found.get("", PageRequest(0), True)
        shown = PageBuilder[Document](page, itemgetter("name", "quota"), rows=found.budgets)
        return {"total": len(found.budgets), "budgets": shown.rows(), **shown.next()}

    async def of_entity(self, entity: str) -> list[SensorRow]:
        """Return a row for each sensor of an entity."""
        groups = rows_by_client(self._quotas, self._clock_ms)
        rows = (row for each in groups for row in each or (None,))
        found = (row if row and row.meter.entity == entity else None for row in rows)
        return [row for row in await self._slices.collect(found) if row is not None]

    def _is_visitor(self, client: ClientIdentity | None) -> bool:
        tier = self._parts.tier
        return tier is not None and client is not None and tier.is_visitor(client)

    def _walk(self, text: str, page: PageRequest, by_client: bool) -> Iterator[FoundRows | None]:
        found, shares, clock_ms = FoundRows(), BudgetShareCalculator(), self._clock_ms
        # The other rows are not kept: that many at once would bring on Python's full collections.
        shown = PageBuilder[ClientRows](
            page, _group_key, lambda group: _group_urgency(group, clock_ms())
        )
        for rows in rows_by_client(self._quotas, clock_ms, shares):
            if rows and not self._is_visitor(rows[0].meter.used_by):
                found.add(rows, clock_ms())
            for each in [rows] if by_client else [[row] for row in rows]:
                if any(_has(row, text) for row in each):
                    shown.add(each)
            yield None
        found.groups, found.next = shown.rows(), shown.next()
        budgets = shares.rows(self._quotas.table.budgets, self._quotas.by_name)
        found.budgets = [BUDGET.document(row, self._parts.now()) for row in budgets]
        yield from found.add_connected(self._quotas, self._is_visitor, clock_ms())
        yield found

    async def describe(self, rows: Iterable[tuple[SensorRow, Document]]) -> list[Document]:
        """Return the document of each row, with what it says besides."""
        adaptive = await self._parts.queries.adaptive()
        return await self._slices.collect(
            {
                **CLIENT.document(row, self._parts.now(adaptive)),
                **self._visit(row.meter.used_by),
                **more,
            }
            for row, more in rows
        )

    def _visit(self, client: ClientIdentity | None) -> Document:
        return {IS_VISIT: True} if self._is_visitor(client) else {}

    def _rows(
        self, groups: Sequence[ClientRows], history: RateHistory | None, by_client: bool
    ) -> Iterator[tuple[SensorRow, Document]]:
        """Yield each row of groups, and what it says besides."""
        for group in groups:
            about: Document = {}
            if by_client:
                about = {"group": ", ".join(_group_key(group)), "shares": self._shares(group)}
            for row in sorted(group, key=attrgetter("meter.kind", "meter.entity")):
                charted = {} if history is None else {"history": history.document(row.meter)}
                yield row, {**about, **charted}

    def _shares(self, group: ClientRows) -> list[Document]:
        """Return the quotas that the only client of a group shares with others."""
        client = _only_client(group)
        own = {row.meter.name for row in group}
        return [
            {"quota": str(each.kind), "entity": each.entity, "throttled": each.is_throttled}
            for each in (() if client is None else self._quotas.sensors_of(client))
            if each.name not in own
        ]

    async def unbounded(self, text: str, page: PageRequest) -> Document:
        """Return how many connected clients no rule bounds, and a page of them by their traffic."""
        clients, rates = self._quotas.unbounded(), self._parts.connections.client_rates
        found = PageBuilder[ClientIdentity](
            page,
            lambda each: unbounded_client_key(_client(each)),
            lambda each: rates.get(each, 0.0),
        )

        def count() -> Iterator[bool]:
            for client in clients:
                if _is_in(text, client.client_id, client.user):
                    found.add(client)
                yield not self._is_visitor(client)

        own, now = sum(await self._slices.collect(count())), self._parts.now()
        documents = [
            {
                **UNBOUNDED.document(each, now),
                "rate": rounded(rates.get(each)),
                **self._visit(each),
            }
            for each in found.rows()
        ]
        return {"unbounded": own, "unbounded_clients": documents, **found.next()}


def unbounded_client_key(client: Document) -> Key:
    """Return what a walk has a client without a bound by; an empty name is another than none."""
    names = (name if name is None else f"={name}" for name in client_key(client))
    listener, user, client_id = (name or "" for name in names)
    return client_id, user, listener


def explain_rules(row: SensorRow, now: RowContext, table: RuleTable) -> list[Document]:
    """Return for each connected client the rules that were looked at, and what came of it.

    In a thread: of 10,000 rules it takes some 50 ms for each client.
    """
    documents: list[Document] = []
    for client in row.clients:
        rules: dict[QuotaKind, list[Document]] = {kind: [] for kind in QuotaKind}
        for each in table.explain(client):
            about = {"bound": each.rule.ceilings[each.kind], **picked(each, "chosen", "reason")}
            rules[each.kind].append({**rule_reference(each.rule, now), **about})
        for kind, found in rules.items():
            for rule in table.rules_by_topic(kind, client):
                topic = rule.topic or f"{rule.topic_prefix}*"
                about = {"bound": rule.bounds[kind], "chosen": True}
                reason = f"applies to its bytes of topic {topic}"
                found.append({**rule_reference(rule, now), **about, "reason": reason})
        quotas = [{"quota": str(kind), "rules": found} for kind, found in rules.items()]
        documents.append({**_client(client), "quotas": quotas})
    return documents


def _is_in(text: str, *names: str | None) -> bool:
    """Return whether a lower-case text is in one of some names."""
    return any(text in (name or "").lower() for name in names)


def _has(row: SensorRow, text: str) -> bool:
    """Return whether a lower-case text is in the entity or names one of the clients."""
    return _is_in(text, row.meter.entity) or any(
        _is_in(text, each.client_id, each.user) for each in row.clients
    )


async def connections_document(parts: AdminParts, text: str, page: PageRequest) -> Document:
    """Return the open connections of a page with `text`, in lower case, in what names them.

    Those with most traffic come first; in a walk they are in the order of their numbers.
    """
    machine = machine_of(parts.member)
    found = PageBuilder[ConnectionRow](page, lambda row: (row.number, machine), attrgetter("rate"))
    counts = dict.fromkeys(("total", "held", "matching"), 0)

    def choose() -> Iterator[None]:
        for row in parts.connections.rows():
            counts["total"] += 1
            counts["held"] += row.hold is not None
            is_named = _is_in(text, row.client_id, row.user, row.ip, row.listener)
            counts["matching"] += is_named and found.add(row)
            yield

    await parts.slices.collect(choose())
    now = parts.now()
    rows = (CONNECTION.document(row, now) for row in found.rows())
    return {**counts, "connections": await parts.slices.collect(rows), **found.next()}
