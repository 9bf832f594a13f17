"""Merges the documents of several members; a table declares how for each path."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain
from operator import itemgetter
from typing import Any

from metrics.member_names import machine_of
from proxy.admin.api import ANY_NAME, CLIENTS_PATH, LOG_LEVEL_PATH
from proxy.admin.client_documents import (
    BUDGET,
    CLIENT,
    IS_VISIT,
    UNBOUNDED,
    client_key,
    unbounded_client_key,
)
from proxy.admin.document_models import Column, Combine, DocumentModel, RowContext
from proxy.admin.pagination import Key, PageBuilder, PageRequest
from proxy.admin.pipeline_documents import MAX_PIPELINE_SUMMARIES, pipeline_urgency
from proxy.admin.query_documents import (
    MAX_QUERY_SUMMARIES,
    grouped_by_query,
    partition_page_builder,
    partitions_of,
    query_urgency,
)
from proxy.admin.request_times import merged_times
from proxy.state import Document

Row = dict[str, Any]

MEMBER = "member"

OWN_SLOTS = "slots"  # the key of what the status of one member says of its own slots


@dataclass(frozen=True, slots=True)
class MemberDocuments:
    """What members answered to one request."""

    by_member: Mapping[str, Document]
    """By their names, the leader's first."""
    page: PageRequest
    """Of a list that is as long as the request says."""

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

    def nexts(self) -> list[str | None]:
        """Return the cursors of the members' next pages."""
        return [each.get("next") for each in self.by_member.values()]


Part = Callable[[MemberDocuments], Document]
"""Gives some fields of a merged document."""


def combine_fields(**combines: Combine) -> Part:
    """Return the part that combines the values of some fields."""
    return lambda told: {key: combine(told.values(key)) for key, combine in combines.items()}


def merge_same_rows(
    rows: Iterable[Row], identity: Callable[[Row], Hashable], model: DocumentModel[Any]
) -> list[Row]:
    """Return one row for those of each identity, which the row of its owner begins.

    Where several members have one, those follow that have the highest rates.
    """
    alike: dict[Hashable, list[Row]] = {}
    for row in rows:
        alike.setdefault(identity(row), []).append(row)
    found = []
    for each in alike.values():
        each.sort(key=lambda row: (not row.get(IS_VISIT), row.get("rate") or 0.0), reverse=True)
        row = each[0]
        if len(each) > 1:
            row = model.combined(each) | {"members": [row[MEMBER] for row in each]}
        if "clients" in row:
            row["client_count"] = max(row["client_count"], len(row["clients"]))
        row.pop(IS_VISIT, None)
        found.append(row)
    return found


LISTENER = DocumentModel[Any]("connections: how many are open", {}, {"connections": sum})
UNMERGED = DocumentModel[Any]("member: where it is", {})


def merge_row_lists(
    key: str,
    identity: Callable[[Row], Hashable] = id,
    model: DocumentModel[Any] = UNMERGED,
    *,
    urgency: Callable[[Row], Any] = lambda _: 0,
    most: int | None = None,
    left_off: Sequence[str] = (),
    walked_by: Callable[[Row], Key] | None = None,
) -> Part:
    """Return the part that is a list with the rows of all, each row of the same `identity` once.

    Those with the highest `urgency` come first, equal ones in the order of their members' names.
    There are `most` of them, None: as many as the request says. With `walked_by`, the key of a
    row, it is the list of whose rows a request has a page, with the next cursor.
    """

    def part(told: MemberDocuments) -> Document:
        page = told.page if walked_by else PageRequest(told.page.limit if most is None else most)
        key_of = walked_by or (lambda _: ())
        found = PageBuilder(page, key_of, urgency, merge_same_rows(told.rows(key), identity, model))
        shown = [{name: row[name] for name in row if name not in left_off} for row in found.rows()]
        return {key: shown, **found.next(*told.nexts())}

    return part


def summed(documents: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums by key."""
    keys = dict.fromkeys(chain.from_iterable(documents))
    return {key: sum(each.get(key, 0) for each in documents) for key in keys}


_MOST = 10**9
_SHORT: dict[str, Any] = {"most": _MOST, "left_off": (MEMBER, "members")}
"""Of a list that is shown whole, whose rows are of no member."""

_rate_of: Callable[[Row], Key] = itemgetter("name", "quota")
_sensor_of = itemgetter("quota", "entity")
_key_of: Callable[[Row], Key] = itemgetter("entity", "quota")


def _urgency(group: Sequence[Row]) -> tuple[bool, float]:
    """Return what puts a client before others: throttled, then closer to its bound."""
    return any(row["throttled"] for row in group), max(row["rate"] / row["bound"] for row in group)


def merged_clients(told: MemberDocuments) -> Document:
    """Return `clients`, those of the page. A sensor that several members have is one row."""
    groups: dict[Hashable, list[Row]] = {}
    for row in merge_same_rows(told.rows("clients"), _sensor_of, CLIENT):
        groups.setdefault(row.get("group", _sensor_of(row)), []).append(row)
    found = PageBuilder(told.page, lambda each: min(map(_key_of, each)), _urgency, groups.values())
    for group in groups.values():
        group.sort(key=_sensor_of)
    shown, counts = found.rows(), summed(told.values("client_counts"))
    rows = list(chain.from_iterable(shown))
    named = {client_key(client) for row in rows for client in row["clients"]}
    unnamed: int = sum(row["client_count"] - len(row["clients"]) for row in rows)
    left = sum(not any(row["client_count"] for row in group) for group in shown)
    counts["shown"] = min(counts["shown"], len(named) + unnamed + left)
    return {"client_counts": counts, "clients": rows, **found.next(*told.nexts())}


def _connections(told: MemberDocuments) -> Document:
    """Return a page of `connections`, by their ids in a tier: each machine numbers its own."""
    found = PageBuilder[Row](told.page, _connection_key, _traffic, told.rows("connections"))
    shown = [{**row, "id": f"{machine_of(row[MEMBER])}/{row['id']}"} for row in found.rows()]
    return {"connections": shown, **found.next(*told.nexts())}


def _traffic(connection: Row) -> Any:
    return sum(filter(None, (connection["received_rate"], connection["sent_rate"])))


def _connection_key(connection: Row) -> Key:
    return connection["id"], machine_of(connection[MEMBER])


MEMBER_ROW = DocumentModel[Document](
    """
    name, machine, alive, answers: of each member; whether it has answered of late, and now
    ready, problem: why clients cannot be served, or why it does not answer
    uptime_s, connections, waiting, clients, throttled, queries: in `/v1/status`
    slots: those that it owns: `owned`, `bytes_per_s`, `cpu_share`, and in `overloaded` each that
        fills it alone: `slot`, `bytes_per_s`, `cpu_share`, and the names of its biggest `clients`
    """,
    {
        "ready": lambda each, _: each["ready"],
        "problem": lambda each, _: each["not_ready_reason"],
        "uptime_s": lambda each, _: each["uptime_s"],
        "connections": lambda each, _: sum(one["connections"] for one in each["listeners"]),
        "waiting": lambda each, _: sum(each["delay_queues"].values()),
        "clients": lambda each, _: each["client_counts"]["bounded"],
        "throttled": lambda each, _: each["client_counts"]["throttled"],
        "queries": lambda each, _: each["followed"],
    },
    columns=(
        Column("connections", "connections", "count", page="Connections"),
        Column("clients", "clients", "count", page="Clients"),
        Column("throttled", "throttled", "count", page="Throttled"),
        Column("waiting", "waiting", "count", page="Waiting"),
        Column("up", "uptime_s", "seconds", page="Up"),
    ),
)


def _figures(told: MemberDocuments) -> Document:
    """Return what the table of members shows of each that gave its status."""
    members: dict[str, Document] = {}
    for name, each in told.by_member.items():
        slots = {OWN_SLOTS: each[OWN_SLOTS]} if each.get(OWN_SLOTS) else {}
        members[name] = {**MEMBER_ROW.document(each, RowContext(0.0)), **slots}
    return {"members": members}


def _readiness(told: MemberDocuments) -> Document:
    """Return what is wrong at any member."""
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
    }


def _merged_progress(told: MemberDocuments) -> Document:
    found = partition_page_builder(told.page, partitions_of(told.rows("queries")))
    return {"queries": grouped_by_query(found.rows()), **found.next(*told.nexts())}


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


def _boundless(walked_by: Callable[[Row], Key] | None = None) -> Sequence[Part]:
    """Return the parts of clients without a bound: how many, and a list."""
    return (
        combine_fields(unbounded=sum),
        merge_row_lists(
            *("unbounded_clients", client_key, UNBOUNDED),
            urgency=lambda row: row["rate"] or 0.0,
            walked_by=walked_by,
        ),
    )


def _budgets(walked_by: Callable[[Row], Key] | None = None) -> Part:
    return merge_row_lists(
        "budgets", _rate_of, BUDGET, left_off=(MEMBER, "members"), walked_by=walked_by
    )


_CLIENTS: Sequence[Part] = (merged_clients, _budgets(), *_boundless())

_SENSORS = dict.fromkeys(("bounded", "throttled", "held"), sum)

TABLES: Mapping[str, Sequence[Part]] = {
    "/v1/status": (
        combine_fields(
            uptime_s=max,
            cluster_answers=all,
            delay_queues=summed,
            config_loads=_merged_loads,
            followed=sum,
            pipelines_total=sum,
            request_times=lambda lists: merged_times(chain.from_iterable(lists)),
            **_SENSORS,
        ),
        *_CLIENTS,
        # The members of a machine listen at one address; another machine has another one.
        merge_row_lists(
            "listeners",
            itemgetter("name", "host", "port"),
            LISTENER,
            **_SHORT,
        ),
        merge_row_lists("certificates", itemgetter("section", "file"), **_SHORT),
        merge_row_lists("queries", urgency=query_urgency, most=MAX_QUERY_SUMMARIES),
        merge_row_lists("pipelines", urgency=pipeline_urgency, most=MAX_PIPELINE_SUMMARIES),
        _readiness,
        _figures,
    ),
    "/v1/clients": (combine_fields(total=sum), *_CLIENTS),
    "/v1/unbounded": _boundless(unbounded_client_key),
    "/v1/budgets": (combine_fields(total=max), _budgets(_rate_of)),
    CLIENTS_PATH + ANY_NAME: (merge_row_lists("quotas", _sensor_of, CLIENT, most=_MOST),),
    "/v1/connections": (
        combine_fields(total=sum, held=sum, matching=sum),
        _connections,
    ),
    "/v1/progress": (_merged_progress,),
    "/v1/pipelines": (merge_row_lists("pipelines", walked_by=lambda row: (row["name"],)),),
    LOG_LEVEL_PATH: (_levels,),
}
"""By paths; what no part of a table gives is the leader's."""
