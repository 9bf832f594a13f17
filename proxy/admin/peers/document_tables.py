"""Declares for each path how the documents of several members are merged."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nlargest
from itertools import chain
from operator import itemgetter
from typing import Any

from metrics.member_names import machine_of
from proxy.admin.api import ANY_NAME, CLIENTS_PATH
from proxy.admin.log_level import LOG_LEVEL_PATH
from proxy.admin.peers.member_documents import (
    MEMBER,
    OWN_SLOTS,
    MemberDocuments,
    Part,
    Row,
    clients_of,
    combined,
    grouped,
    merged_row,
    merged_unbounded_row,
    rows,
    sensor_of,
    summed,
    values,
)
from proxy.admin.pipeline_documents import MAX_PIPELINE_SUMMARIES, pipeline_urgency
from proxy.admin.query_documents import MAX_QUERY_SUMMARIES, query_urgency
from proxy.admin.request_times import merged_times
from proxy.quota.disjoint_sets import DisjointSets
from proxy.quota.entities import QuotaKind
from proxy.state import Document

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
        self.rows = rows
        self.alike = grouped(rows, sensor_of)
        """The rows of each sensor: all are in one group."""
        merged = told.joined(self.alike, merged_row)
        self.merged = sorted(merged, key=lambda row: (_KINDS.index(row["quota"]), row["entity"]))
        connected = {row[MEMBER] for row in rows if row["client_count"]}
        self.has_left = not connected
        """Whether none of its clients is connected anywhere."""
        self.gone = len({row[MEMBER] for row in rows} - connected) - self.has_left
        """How many members count it as left although it is counted elsewhere."""

    @property
    def urgency(self) -> tuple[bool, float]:
        """Throttled ones are above the others, then those closer to their bound."""
        shares = (row["rate"] / row["bound"] for row in self.merged)
        return any(row["throttled"] for row in self.merged), max(shares)


def merged_clients(told: MemberDocuments) -> Document:
    """Return `clients`, the closest to their bounds first, and their counts.

    A sensor that several members have is one row. Figures are sums, less what is seen to be
    counted more than once; beyond the rows that the members gave that is not known.
    """
    groups = [_ClientGroup(each, told) for each in _joined(told.rows("clients"))]
    alike = [rows for group in groups for rows in group.alike]
    shown = sorted(groups, key=lambda group: group.urgency, reverse=True)[: told.limit]
    return {
        **told.counts(alike, _COUNTED),
        "client_counts": _counts(told, groups, shown),
        "clients": list(_rows_of(shown)),
    }


def _rows_of(groups: Iterable[_ClientGroup]) -> Iterable[Row]:
    """Yield the rows of groups, in each with a name of the group that no other has."""
    taken: set[str] = set()
    for group in groups:
        name = group.merged[0].get("group")
        if name is None:  # chosen by quotas
            yield from group.merged
            continue
        if name in taken:
            name = f"{name}@{group.merged[0][MEMBER]}"
        taken.add(name)
        yield from ({**row, "group": name} for row in group.merged)


def _joined(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows by groups; groups of two members are one if they have a sensor in common."""
    sets, first = DisjointSets(len(rows)), dict[Any, int]()
    for number, row in enumerate(rows):
        sets.join(first.setdefault(sensor_of(row), number), number)
        if "group" in row:
            sets.join(first.setdefault((row[MEMBER], row["group"], "group"), number), number)
    return [[rows[number] for number in each] for each in grouped(range(len(rows)), sets.find)]


def _counts(
    told: MemberDocuments, groups: Sequence[_ClientGroup], shown: Sequence[_ClientGroup]
) -> dict[str, int]:
    """Return how many clients there are: those of all members, each of whom is known once."""
    counts = summed(told.values("client_counts"))
    for group in groups:
        counts["left"] -= group.gone
        counts["bounded"] -= group.gone
    rows = [row for group in groups for row in group.rows]
    for key in ("bounded", "throttled", "held"):
        counted = filter(_COUNTED[key], rows)
        at = {(client, row[MEMBER]) for row in counted for client in clients_of(row)}
        counts[key] -= len(at) - len({client for client, _ in at})
    counts["shown"] = min(counts["shown"], _shown(shown))
    return {key: max(value, 0) for key, value in counts.items()}


def _shown(groups: Sequence[_ClientGroup]) -> int:
    """Return how many clients some groups are about, at most."""
    named: set[Any] = set()
    unnamed = left = 0
    for group in groups:
        left += group.has_left
        for row in group.merged:
            named.update(clients_of(row))
            unnamed += row["client_count"] - len(row["clients"])
    return len(named) + unnamed + left


def merged_unbounded(told: MemberDocuments) -> Document:
    """Return the clients without a bound, those that move most first, and how many there are."""
    key = "unbounded_clients"
    alike = grouped(told.rows(key), itemgetter("listener", "user", "client_id"))
    found = told.joined(alike, merged_unbounded_row)
    found.sort(key=lambda row: row["rate"] or 0.0, reverse=True)
    return {**told.counts(alike, {"unbounded": lambda _: True}), key: found[: told.limit]}


def merged_connections(told: MemberDocuments, *, by_number: bool) -> Document:
    """Return the connections, those that move most first, or in the order of their numbers.

    Each machine numbers its own: in a tier an id is MACHINE/N.
    """
    found = told.rows("connections")
    if by_number:
        found.sort(key=lambda row: (row["id"], machine_of(row[MEMBER])))
    else:
        moved = itemgetter("received_rate", "sent_rate")
        found.sort(key=lambda row: sum(filter(None, moved(row))), reverse=True)
    shown = [{**row, "id": f"{machine_of(row[MEMBER])}/{row['id']}"} for row in found[: told.limit]]
    return {key: sum(told.values(key)) for key in ("total", "held", "matching")} | {
        "connections": shown
    }


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
    if told.tier is not None:
        warnings += _differing_rules(told.tier)
    return {
        "ready": not reasons,
        "not_ready_reason": "; ".join(reasons) or None,
        "warning": "; ".join(dict.fromkeys(warnings)) or None,
        **({} if told.tier is None else {"tier": told.tier}),
    }


def _differing_rules(tier: Document) -> list[str]:
    """Return what is wrong where the machines do not go by the same rules."""
    known = [each for each in tier.get("machines", ()) if each.get("rules")]
    if len({each["rules"] for each in known}) <= 1:
        return []
    listed = ", ".join(f"{each['name']} by {each['rules']:.12}" for each in known)
    return [f"the machines go by different rules: {listed}; give all the same configuration"]


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
        merged_clients,
        merged_unbounded,
        # The members of a machine listen at one address; another machine has another one.
        rows(
            "listeners",
            itemgetter("name", "host", "port"),
            lambda alike: combined(alike, {"connections": sum}),
            names_member=False,
        ),
        rows(
            "brokers",
            itemgetter("node_id"),
            rank=lambda broker: -broker["node_id"],
            names_member=False,
        ),
        rows("certificates", itemgetter("section", "file"), names_member=False),
        rows("queries", rank=query_urgency, most=MAX_QUERY_SUMMARIES),
        rows("pipelines", rank=pipeline_urgency, most=MAX_PIPELINE_SUMMARIES),
        _tier,
        _figures,
    ),
    "/v1/clients": (merged_clients, merged_unbounded),
    CLIENTS_PATH + ANY_NAME: (rows("quotas", sensor_of, merged_row),),
    "/v1/progress": (rows("queries"),),
    "/v1/pipelines": (rows("pipelines"),),
    LOG_LEVEL_PATH: (_levels,),
}
"""By paths; what no part of a table gives is the leader's."""
