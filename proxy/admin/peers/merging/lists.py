"""Declares for each path how the documents of several members are merged."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import nlargest
from itertools import chain
from operator import itemgetter
from typing import Any

from metrics.member_names import machine_of
from proxy.admin.api import ANY_NAME, CLIENTS_PATH
from proxy.admin.peers.merging.client_lists import merged_clients
from proxy.admin.peers.merging.member_documents import (
    MEMBER,
    DocumentTable,
    Row,
    RowList,
    combined,
    summed,
)
from proxy.admin.peers.merging.quota_rows import merged_row, merged_unbounded_row, sensor_of
from proxy.admin.pipeline_documents import MAX_PIPELINE_SUMMARIES, pipeline_urgency
from proxy.admin.query_documents import MAX_QUERY_SUMMARIES, query_urgency
from proxy.admin.request_times import merged_times
from proxy.state import Document

_PARTITION_DEPTH = 4  # and the partitions of queries

_node_id = itemgetter("node_id")


def _moved(row: Row) -> float:
    return (row["received_rate"] or 0.0) + (row["sent_rate"] or 0.0)


def _number(row: Row) -> tuple[int, str]:
    return row["id"], machine_of(row[MEMBER])


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


UNBOUNDED = RowList(
    "unbounded_clients",
    itemgetter("listener", "user", "client_id"),
    merged_unbounded_row,
    rank=lambda row: row["rate"] or 0.0,
    takes_limit=True,
    counted={"unbounded": lambda _: True},
)

CONNECTIONS_TABLE = DocumentTable(
    [RowList("connections", rank=_moved, takes_limit=True)],
    {"total": sum, "held": sum, "matching": sum},
)

CONNECTIONS_IN_ORDER = replace(
    CONNECTIONS_TABLE,
    lists=[RowList("connections", rank=_number, is_ascending=True, takes_limit=True)],
)
"""With `after`: by their numbers; no two members of a machine use the same one."""

TABLES = {
    "/v1/clients": DocumentTable([UNBOUNDED], more=merged_clients),
    CLIENTS_PATH + ANY_NAME: DocumentTable([RowList("quotas", sensor_of, merged_row)]),
    "/v1/progress": DocumentTable([RowList("queries")], depth=_PARTITION_DEPTH),
    "/v1/pipelines": DocumentTable([RowList("pipelines")]),
}
"""By the paths of which nothing else need be known."""

STATUS_TABLE = DocumentTable(
    [
        UNBOUNDED,
        # The members of a machine listen at one address; another machine has another one.
        RowList(
            "listeners",
            itemgetter("name", "host", "port"),
            lambda rows, _: combined(rows, {"connections": sum}),
            names_member=False,
        ),
        RowList("brokers", _node_id, rank=_node_id, is_ascending=True, names_member=False),
        RowList("certificates", itemgetter("section", "file"), names_member=False),
        RowList("queries", rank=query_urgency, limit=MAX_QUERY_SUMMARIES),
        RowList("pipelines", rank=pipeline_urgency, limit=MAX_PIPELINE_SUMMARIES),
    ],
    {
        "uptime_s": max,
        "cluster_answers": all,
        "delay_queues": summed,
        "config_loads": _merged_loads,
        "followed": sum,
        "pipelines_total": sum,
        "request_times": lambda lists: merged_times(chain.from_iterable(lists)),
    },
    more=merged_clients,
)
