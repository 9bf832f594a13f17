"""Puts the status of all members together as that of one proxy."""

from collections.abc import Mapping, Sequence
from heapq import nlargest
from operator import itemgetter
from typing import Any

from proxy.admin.gateway.merging.client_lists import merged_clients, merged_unbounded
from proxy.admin.gateway.merging.lists import query_urgency
from proxy.admin.gateway.merging.member_documents import (
    MemberDocument,
    OwnerOf,
    all_rows,
    distinct,
    summed,
    total,
)
from proxy.admin.pipeline_documents import MAX_PIPELINE_SUMMARIES, is_held
from proxy.admin.query_documents import MAX_QUERY_SUMMARIES
from proxy.admin.request_times import merged_times
from proxy.state import Document


def merged_status(
    told: Sequence[MemberDocument],
    limit: int,
    owner_of: OwnerOf,
    not_ready: str | None = None,
    warning: str | None = None,
) -> dict[str, Any]:
    """Return `/v1/status`; the first document is of the member that writes what concerns all.

    `not_ready` and `warning` are of the gateway itself.
    """
    first = told[0].document
    reasons = [f"member {each}: {why}" for each, why in _said(told, "not_ready_reason")]
    reason = not_ready or "; ".join(reasons) or None
    # Each of them is in the same cluster, so that most warnings are the same at all.
    warnings = dict.fromkeys(
        (*([warning] if warning else ()), *(w for _, w in _said(told, "warning")))
    )
    pipelines = all_rows(told, "pipelines")
    return {
        **first,
        "uptime_s": max(each.document["uptime_s"] for each in told),
        "ready": reason is None,
        "not_ready_reason": reason,
        "warning": "; ".join(warnings) or None,
        "listeners": _listeners(told),
        "cluster_answers": all(each.document["cluster_answers"] for each in told),
        "brokers": sorted(distinct(_of_all(told, "brokers"), "node_id"), key=itemgetter("node_id")),
        "delay_queues": summed(each.document["delay_queues"] for each in told),
        "config_loads": _loads(told),
        "certificates": distinct(_of_all(told, "certificates"), "section", "file"),
        **merged_clients(told, limit, owner_of),
        **merged_unbounded(told, limit, owner_of),
        "followed": total(told, "followed"),
        "queries": nlargest(MAX_QUERY_SUMMARIES, all_rows(told, "queries"), key=query_urgency),
        "pipelines_total": total(told, "pipelines_total"),
        "pipelines": nlargest(MAX_PIPELINE_SUMMARIES, pipelines, key=_pipeline_urgency),
        "request_times": merged_times(_of_all(told, "request_times")),
    }


def member_figures(told: MemberDocument, slots: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what the table of members shows of one that answered; `slots`: of its slots."""
    document = told.document
    counts = document["client_counts"]
    return {
        "name": told.member,
        "alive": True,
        "answers": True,
        "ready": document["ready"],
        "problem": document["not_ready_reason"],
        "uptime_s": document["uptime_s"],
        "connections": sum(each["connections"] for each in document["listeners"]),
        "waiting": sum(document["delay_queues"].values()),
        "clients": counts["bounded"],
        "throttled": counts["throttled"],
        "queries": document["followed"],
        **({"slots": slots} if slots is not None else {}),
    }


def _said(told: Sequence[MemberDocument], key: str) -> list[tuple[str, str]]:
    return [(each.member, each.document[key]) for each in told if each.document[key]]


def _of_all(told: Sequence[MemberDocument], key: str) -> list[Document]:
    return [row for each in told for row in each.document[key]]


def _listeners(told: Sequence[MemberDocument]) -> list[Document]:
    """Return the listeners with the connections of all members.

    The members of a machine listen at one address; another machine has another one.
    """
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in _of_all(told, "listeners"):
        known = merged.setdefault(
            (row["name"], row["host"], row["port"]), {**row, "connections": 0}
        )
        known["connections"] += row["connections"]
    return list(merged.values())


def _loads(told: Sequence[MemberDocument]) -> list[Document]:
    """Return as many loads as a member keeps, the newest first; all members make the same ones."""
    most = max(len(each.document["config_loads"]) for each in told)
    # By what came of them: the members are not done in the same second.
    loads: list[Document] = []
    for told_loads in (each.document["config_loads"] for each in told):
        known = [(load["result"], load["message"]) for load in loads]
        for load in told_loads:
            outcome = load["result"], load["message"]
            if outcome in known:
                known.remove(outcome)
            else:
                loads.append(load)
    return nlargest(most, loads, key=itemgetter("at"))


def _pipeline_urgency(pipeline: Document) -> tuple[bool, int]:
    nodes = (*pipeline["sources"], *pipeline["stages"])
    return pipeline["pending"]["full"], sum(map(is_held, nodes))
