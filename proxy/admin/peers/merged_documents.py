"""Merges the documents of several members; a table declares how for each path."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from itertools import chain, zip_longest
from operator import itemgetter
from typing import Any, TypeVar

from metrics.member_names import machine_of
from proxy.admin.api import ANY_NAME, CLIENTS_PATH
from proxy.admin.history import chart
from proxy.admin.log_level import LOG_LEVEL_PATH
from proxy.admin.query_documents import (
    MAX_PIPELINE_SUMMARIES,
    MAX_QUERY_SUMMARIES,
    pipeline_urgency,
    query_urgency,
)
from proxy.admin.request_times import merged_times
from proxy.quota.disjoint_sets import DisjointSets
from proxy.quota.entities import QuotaKind
from proxy.state import Document

T = TypeVar("T")

OwnerOf = Callable[[str], str | None]
"""Gives the name of the member that owns a client id; None for one that nobody owns now."""

Row = dict[str, Any]

Combine = Callable[[list[Any]], Any]
"""Makes one value of those that several documents or rows have of a field."""

Merge = Callable[[Sequence[Row]], Row]
"""Makes one row of those that several members have of the same thing; see `joined`."""

MEMBER = "member"

OWN_SLOTS = "slots"  # the key of what the status of one member says of its own slots
CONNECTIONS_AFTER = "/v1/connections?after"  # those in the order of their numbers
MAX_CLIENTS = 20  # named in one row, as a member does


@dataclass(frozen=True, slots=True)
class MemberDocuments:
    """What members answered to one request."""

    by_member: Mapping[str, Document]
    """By their names, the leader's first."""
    limit: int | None = None
    """The most rows of a list that is as long as the request says; None: all."""
    owner_of: OwnerOf = lambda _: None
    tier: Document | None = None
    """What is known of the tier."""

    def merged(self, table: Sequence["Part"]) -> dict[str, Any]:
        """Return one document; what no part of the table gives is the first member's.

        Raises what Python does for documents that have not what they should.
        """
        first, *_ = self.by_member.values()
        merged = {key: value for key, value in first.items() if key != OWN_SLOTS}
        for part in table:
            merged |= part(self)
        return merged

    def values(self, key: str) -> list[Any]:
        """Return what all say of a field."""
        return [each[key] for each in self.by_member.values()]

    def rows(self, key: str) -> list[Row]:
        """Return the rows of a list with their members; one of another version may lack it."""
        by_name = sorted(self.by_member.items())
        return [{MEMBER: name, **row} for name, each in by_name for row in each.get(key, ())]

    def joined(
        self, rows: Sequence[Row], identity: Callable[[Row], Hashable], merge: Merge
    ) -> list[Row]:
        """Return one row for those of each identity.

        Where several members have one, the row of its client's owner comes first, then those with
        the highest rates.
        """
        alike = grouped(rows, identity)
        return [merge(self._owner_first(each)) if len(each) > 1 else each[0] for each in alike]

    def _owner_first(self, rows: Sequence[Row]) -> Sequence[Row]:
        clients = (each for row in rows for each in row.get("clients", [row]))
        name = next(filter(None, (each.get("client_id") for each in clients)), None)
        owner = None if name is None else self.owner_of(name)
        return sorted(
            rows, key=lambda row: (row[MEMBER] == owner, row.get("rate") or 0.0), reverse=True
        )


Part = Callable[[MemberDocuments], Document]
"""Gives some fields of a merged document."""


def values(**combines: Combine) -> Part:
    """Return the part that combines the values of some fields."""
    return lambda told: {key: combine(told.values(key)) for key, combine in combines.items()}


def rows(
    key: str,
    identity: Callable[[Row], Hashable] = id,
    merge: Merge = itemgetter(0),
    *,
    rank: Callable[[Row], Any] | None = None,
    most: int | None = None,
    is_limited: bool = False,
    shown: Callable[[Row], Row] = lambda row: row,
) -> Part:
    """Return the part that is a list with the rows of all, each row of the same `identity` once.

    Those with the highest `rank` come first, equal ones in the order of their members' names. There
    are `most` of them, or as many as the request says.
    """

    def part(told: MemberDocuments) -> Document:
        found = told.joined(told.rows(key), identity, merge)
        if rank is not None:
            found.sort(key=rank, reverse=True)
        return {key: list(map(shown, found[: told.limit if is_limited else most]))}

    return part


def counts(
    key: str,
    things: Callable[[Row], Iterable[Hashable]],
    **counted: Callable[[Row], bool],
) -> Part:
    """Return the part of figures that are sums, less what members are seen to count twice.

    The list `key` has rows with the `things` that are counted; `counted` tells by figures in which
    rows. Beyond the rows that the members gave what they count twice is not known.
    """

    def part(told: MemberDocuments) -> Document:
        found, (first, *_) = told.rows(key), told.by_member.values()
        return {
            name: sum(told.values(name)) - twice(filter(is_counted, found), things)
            for name, is_counted in counted.items()
            if name in first
        }

    return part


def twice(rows: Iterable[Row], things: Callable[[Row], Iterable[Hashable]]) -> int:
    """Return how often the things of some rows are counted, at a member each, beyond once."""
    counted = {(thing, row[MEMBER]) for row in rows for thing in things(row)}
    return len(counted) - len({thing for thing, _ in counted})


def grouped(things: Iterable[T], identity: Callable[[T], Hashable]) -> list[list[T]]:
    """Return the things of each identity."""
    found: dict[Hashable, list[T]] = {}
    for each in things:
        found.setdefault(identity(each), []).append(each)
    return list(found.values())


def combined(documents: Sequence[Document], combines: Mapping[str, Combine]) -> dict[str, Any]:
    """Return the first document or row, with some fields made of the values of all."""
    found = {key: combine([each[key] for each in documents]) for key, combine in combines.items()}
    return {**documents[0], **found}


def summed(documents: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums by key."""
    keys = dict.fromkeys(chain.from_iterable(documents))
    return {key: sum(each.get(key, 0) for each in documents) for key in keys}


def sensor_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return what tells a sensor from others."""
    return row["quota"], row["entity"]


_identity_of: Callable[[Row], Hashable] = itemgetter("listener", "user", "client_id")


def clients_of(row: Mapping[str, Any]) -> list[Hashable]:
    """Return the identities of the clients that a row names."""
    return list(map(_identity_of, row["clients"]))


def merged_row(rows: Sequence[Row]) -> Row:
    """Return one row for a sensor.

    Rate, bound and rule are those of the client's owner: it counts what passes elsewhere as well.
    Where the owner is not among the members, or not known, they are of the highest rate. Of what is
    divided among members each counts its own part.
    """
    clients = _each_client([row["clients"] for row in rows])
    is_divided = any(row.get("leased") is not None for row in rows)
    combines = {**_FIELDS, **_DIVIDED} if is_divided else _FIELDS
    fields = {key: combine for key, combine in combines.items() if key in rows[0]}
    return {
        **combined(rows, fields),
        "client_count": max(len(clients), *(row["client_count"] for row in rows)),
        "members": [row[MEMBER] for row in rows],
    }


def merged_unbounded_row(rows: Sequence[Row]) -> Row:
    """Return one row for a client; its rate is that of its connections, wherever they are."""
    known = [row["rate"] for row in rows if row["rate"] is not None]
    return {**rows[0], "rate": round(sum(known), 1) if known else None}


def merged_chart(
    charts: Sequence[Document | None], of_interval: Callable[[Iterable[float]], float] = max
) -> Document | None:
    """Return the chart of a sensor that several members have; the first is its owner's.

    All end now. `of_interval` makes one rate of those of an interval. That is the highest: what a
    client moves elsewhere its owner counts as well, so that a sum would have it twice; and after a
    handover each member knows a part of the time. Bounds are the owner's where it knows them.
    """
    known = [each for each in charts if each is not None]
    if not known:
        return None
    rates = zip_longest(*(reversed(chart["rates"]) for chart in known), fillvalue=0.0)
    bounds = zip_longest(*(reversed(list(_bound_of_each(chart))) for chart in known))
    of_each = [next(bound for bound in column if bound is not None) for column in bounds]
    return chart(known[0]["interval_s"], list(map(of_interval, rates))[::-1], reversed(of_each))


def _bound_of_each(chart: Document) -> Iterator[float]:
    """Yield the bound for each rate."""
    starts, bound = dict(map(tuple, chart["bounds"])), 0.0
    for position in range(len(chart["rates"])):
        bound = starts.get(position, bound)
        yield bound


def _each_client(lists: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the clients of several rows, each once, as the last one has it."""
    return list({_identity_of(row): row for row in chain.from_iterable(lists)}.values())


_FIELDS: Mapping[str, Combine] = {
    # Each member counts what happened on its own connections.
    "would_throttle": sum,
    "holds": sum,
    "held_s": lambda values: round(sum(values), 3),
    "waiting": sum,
    "throttled": any,
    "above_s": max,
    "hold_ends_in_s": lambda ends: max((end for end in ends if end is not None), default=None),
    "clients": lambda lists: _each_client(lists)[:MAX_CLIENTS],
    "history": merged_chart,
    "connected": _each_client,  # why each client has its rule
}

_DIVIDED: Mapping[str, Combine] = {
    "rate": lambda rates: round(sum(rates), 1),
    "leased": lambda parts: round(sum(each or 0.0 for each in parts), 1),
    "history": partial(merged_chart, of_interval=sum),
}

_KINDS = [str(kind) for kind in QuotaKind]

_COUNTED: Mapping[str, Callable[[Row], bool]] = {
    "total": lambda _: True,
    "bounded": lambda _: True,
    "throttled": itemgetter("throttled"),
    "held": lambda row: row["hold_ends_in_s"] is not None,
}
"""Figures of a document, with the rows of `clients` that each counts."""


class _ClientGroup:
    """Rows that belong together at any member: of one client, or of what several share."""

    def __init__(self, rows: Sequence[Row], told: MemberDocuments) -> None:
        merged = told.joined(rows, sensor_of, merged_row)
        self.rows = sorted(merged, key=lambda row: (_KINDS.index(row["quota"]), row["entity"]))
        connected = {row[MEMBER] for row in rows if row["client_count"]}
        self.has_left = not connected
        """Whether none of its clients is connected anywhere."""
        self.gone = len({row[MEMBER] for row in rows} - connected) - self.has_left
        """How many members count it as left although it is counted elsewhere."""

    @property
    def urgency(self) -> tuple[bool, float]:
        """Throttled ones are above the others, then those closer to their bound."""
        shares = (row["rate"] / row["bound"] for row in self.rows)
        return any(row["throttled"] for row in self.rows), max(shares)


def merged_clients(told: MemberDocuments) -> Document:
    """Return `clients`, the closest to their bounds first, and how many there are.

    A sensor that several members have is one row; each client counts once.
    """
    rows = told.rows("clients")
    groups = [_ClientGroup(each, told) for each in _joined(rows)]
    shown = sorted(groups, key=lambda group: group.urgency, reverse=True)[: told.limit]
    clients, gone = summed(told.values("client_counts")), sum(group.gone for group in groups)
    clients["left"] -= gone
    clients["bounded"] -= gone
    for key in ("bounded", "throttled", "held"):
        clients[key] -= twice(filter(_COUNTED[key], rows), clients_of)
    clients["shown"] = min(clients["shown"], _shown(shown))
    return {
        "client_counts": {key: max(value, 0) for key, value in clients.items()},
        "clients": list(_rows_of(shown)),
    }


def _rows_of(groups: Iterable[_ClientGroup]) -> Iterable[Row]:
    """Yield the rows of groups, in each with a name of the group that no other has."""
    taken: set[str] = set()
    for group in groups:
        name = group.rows[0].get("group")
        if name is None:  # chosen by quotas
            yield from group.rows
            continue
        if name in taken:
            name = f"{name}@{group.rows[0][MEMBER]}"
        taken.add(name)
        yield from ({**row, "group": name} for row in group.rows)


def _joined(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows by groups; groups of two members are one if they have a sensor in common."""
    sets, first = DisjointSets(len(rows)), dict[Any, int]()
    for number, row in enumerate(rows):
        sets.join(first.setdefault(sensor_of(row), number), number)
        if "group" in row:
            sets.join(first.setdefault((row[MEMBER], row["group"], "group"), number), number)
    return [[rows[number] for number in each] for each in grouped(range(len(rows)), sets.find)]


def _shown(groups: Sequence[_ClientGroup]) -> int:
    """Return how many clients some groups are about, at most."""
    rows = [row for group in groups for row in group.rows]
    named = {client for row in rows for client in clients_of(row)}
    unnamed: int = sum(row["client_count"] - len(row["clients"]) for row in rows)
    return len(named) + unnamed + sum(group.has_left for group in groups)


def merged_budgets(told: MemberDocuments) -> Document:
    """Return the budgets, with the sums of what their clients have at all members."""
    alike = grouped(told.rows("budgets"), itemgetter("name", "quota"))
    sums: Mapping[str, Combine] = {
        "rate": lambda values: round(sum(values), 1),
        "leased": lambda values: None if None in values else round(sum(values), 1),
        **dict.fromkeys(("active_clients", "waiting", "holds"), sum),
        "held_s": lambda values: round(sum(values), 3),
        "throttled": any,
    }
    found = [combined(rows, sums) for rows in alike]
    shown = ({key: row[key] for key in row if key != MEMBER} for row in found[: told.limit])
    return {"budgets": list(shown)}


_rates = itemgetter("received_rate", "sent_rate")


def _of_machine(connection: Row) -> Row:
    """Return a connection by its id in a tier: each machine numbers its own."""
    return {**connection, "id": f"{machine_of(connection[MEMBER])}/{connection['id']}"}


def _unowned(row: Row) -> Row:
    """Return a row without the member that has it."""
    return {key: value for key, value in row.items() if key != MEMBER}


def _figures(told: MemberDocuments) -> Document:
    """Return what the table of members shows of each that gave its status."""
    return {"members": {name: _figures_of(each) for name, each in told.by_member.items()}}


def _figures_of(document: Document) -> Document:
    counts = document["client_counts"]
    return {
        "ready": document["ready"],
        "problem": document["not_ready_reason"],
        "uptime_s": document["uptime_s"],
        "connections": sum(each["connections"] for each in document["listeners"]),
        "waiting": sum(document["delay_queues"].values()),
        "clients": counts["bounded"],
        "throttled": counts["throttled"],
        "queries": document["followed"],
        **({OWN_SLOTS: document[OWN_SLOTS]} if document.get(OWN_SLOTS) else {}),
    }


def _tier(told: MemberDocuments) -> Document:
    """Return what is wrong at any member, and what is known of the tier."""
    reported = told.by_member.items()
    reasons = [
        f"member {name}: {why}" for name, each in reported if (why := each["not_ready_reason"])
    ]
    # Each of them is in the same cluster, so that most warnings are the same at all.
    warnings = [part for text in filter(None, told.values("warning")) for part in text.split("; ")]
    return {
        "ready": not reasons,
        "not_ready_reason": "; ".join(reasons) or None,
        "warning": "; ".join(dict.fromkeys(warnings)) or None,
        **({} if told.tier is None else {"tier": told.tier}),
    }


def _levels(told: MemberDocuments) -> Document:
    return {
        "levels": [{"name": name, "level": each["level"]} for name, each in told.by_member.items()]
    }


def _merged_loads(lists: Sequence[Sequence[Mapping[str, Any]]]) -> list[Document]:
    """Return as many loads as a member keeps, the newest first; all members make the same ones."""
    # By what came of them: the members are not done in the same second.
    loads: list[Document] = []
    for of_member in lists:
        known = [(load["result"], load["message"]) for load in loads]
        for load in of_member:
            outcome = load["result"], load["message"]
            if outcome in known:
                known.remove(outcome)
            else:
                loads.append(load)
    return nlargest(max(map(len, lists)), loads, key=itemgetter("at"))


_CONNECTIONS = values(total=sum, held=sum, matching=sum)

UNBOUNDED: Sequence[Part] = (
    counts("unbounded_clients", lambda row: [_identity_of(row)], unbounded=lambda _: True),
    rows(
        "unbounded_clients",
        _identity_of,
        merged_unbounded_row,
        rank=lambda row: row["rate"] or 0.0,
        is_limited=True,
    ),
)

_CLIENTS: Sequence[Part] = (
    counts("clients", lambda row: [sensor_of(row)], **_COUNTED),
    merged_clients,
    merged_budgets,
    *UNBOUNDED,
)

TABLES: Mapping[str, Sequence[Part]] = {
    "/v1/status": (
        values(
            uptime_s=max,
            cluster_answers=all,
            delay_queues=summed,
            config_loads=_merged_loads,
            followed=sum,
            pipelines_total=sum,
            request_times=lambda lists: merged_times(chain.from_iterable(lists)),
        ),
        *_CLIENTS,
        # The members of a machine listen at one address; another machine has another one.
        rows(
            "listeners",
            itemgetter("name", "host", "port"),
            lambda alike: combined(alike, {"connections": sum}),
            shown=_unowned,
        ),
        rows("brokers", itemgetter("node_id"), rank=lambda row: -row["node_id"], shown=_unowned),
        rows("certificates", itemgetter("section", "file"), shown=_unowned),
        rows("queries", rank=query_urgency, most=MAX_QUERY_SUMMARIES),
        rows("pipelines", rank=pipeline_urgency, most=MAX_PIPELINE_SUMMARIES),
        _tier,
        _figures,
    ),
    "/v1/clients": _CLIENTS,
    CLIENTS_PATH + ANY_NAME: (rows("quotas", sensor_of, merged_row),),
    "/v1/connections": (
        _CONNECTIONS,
        rows(
            "connections",
            rank=lambda row: sum(filter(None, _rates(row))),
            is_limited=True,
            shown=_of_machine,
        ),
    ),
    CONNECTIONS_AFTER: (
        _CONNECTIONS,
        rows("connections", rank=lambda row: -row["id"], is_limited=True, shown=_of_machine),
    ),
    "/v1/progress": (rows("queries"),),
    "/v1/pipelines": (rows("pipelines"),),
    LOG_LEVEL_PATH: (_levels,),
}
"""By paths; what no part of a table gives is the leader's."""
