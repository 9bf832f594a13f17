"""Puts together the documents that are lists of what each member has of its own."""

from collections.abc import Mapping, Sequence
from heapq import nlargest, nsmallest
from typing import Any

from proxy.admin.gateway.merging.member_documents import (
    MEMBER,
    MemberDocument,
    OwnerOf,
    all_rows,
    total,
)
from proxy.admin.gateway.merging.quota_rows import Row, merged_row, sensor_of
from proxy.members.member_names import machine_of


def merged_connections(
    told: Sequence[MemberDocument], limit: int, *, in_order: bool
) -> dict[str, Any]:
    """Return `/v1/connections`: at most `limit`, those that move most first.

    `in_order`: those with the lowest numbers, in their order; no two members of a machine use the
    same one.
    """
    rows = all_rows(told, "connections")
    if in_order:
        shown = nsmallest(limit, rows, key=lambda row: (row["id"], machine_of(row[MEMBER])))
    else:
        shown = nlargest(limit, rows, key=_moved)
    counts = {key: total(told, key) for key in ("total", "held", "matching")}
    return {**counts, "connections": shown}


def _moved(row: Row) -> float:
    return (row["received_rate"] or 0.0) + (row["sent_rate"] or 0.0)


def merged_entity(told: Sequence[MemberDocument], owner_of: OwnerOf) -> dict[str, Any]:
    """Return `/v1/clients/ENTITY`: a row for each of its sensors."""
    by_sensor: dict[tuple[str, str], list[Row]] = {}
    for row in all_rows(told, "quotas"):
        by_sensor.setdefault(sensor_of(row), []).append(row)
    quotas = [merged_row(rows, owner_of) for rows in by_sensor.values()]
    return {"entity": told[0].document["entity"], "quotas": quotas}


def joined(told: Sequence[MemberDocument], key: str) -> dict[str, Any]:
    """Return the rows of all members under a key: queries or pipelines, which one member has."""
    return {key: all_rows(told, key)}


def query_urgency(query: Mapping[str, Any]) -> tuple[bool, bool, bool, int]:
    """Return what puts a query of the status before others: trouble, then its lag."""
    commit = query["commit"]
    return (
        query["stuck_partitions"] > 0,
        query["state"] == "failed",
        commit is not None and not commit["ok"],
        query["lag_records"] or 0,
    )
