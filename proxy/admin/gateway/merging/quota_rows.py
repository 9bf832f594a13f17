"""Makes one row of those that several members have of one sensor."""

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.admin.gateway.merging.charts import merged_chart
from proxy.admin.gateway.merging.member_documents import MEMBER, OwnerOf

Row = dict[str, Any]

MAX_CLIENTS = 20  # named in one row, as a member does
_ADDED = ("would_throttle", "holds", "held_s", "waiting")
"""Each member counts what happened on its own connections."""


def sensor_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return what tells a sensor from others."""
    return row["quota"], row["entity"]


def clients_of(row: Mapping[str, Any]) -> list[tuple[str, str | None, str | None]]:
    """Return the identities of the clients that a row names."""
    return [(each["listener"], each["user"], each["client_id"]) for each in row["clients"]]


def row_share(row: Mapping[str, Any]) -> float:
    """Return the rate as a share of the bound."""
    return float(row["rate"] / row["bound"])


def merged_row(rows: Sequence[Row], owner_of: OwnerOf) -> Row:
    """Return one row for a sensor.

    Rate, bound and rule are those of the client's owner: it counts what passes elsewhere as well.
    Where the owner is not among the members, or not known, they are of the highest rate.
    """
    if len(rows) == 1:
        return rows[0]
    rows = _owner_first(rows, owner_of)
    main = rows[0]
    clients = {identity: each for row in rows for identity, each in _named(row)}
    ends = [row["hold_ends_in_s"] for row in rows if row["hold_ends_in_s"] is not None]
    merged = {
        **main,
        **{key: sum(row[key] for row in rows) for key in _ADDED},
        "held_s": round(sum(row["held_s"] for row in rows), 3),
        "throttled": any(row["throttled"] for row in rows),
        "above_s": max(row["above_s"] for row in rows),
        "hold_ends_in_s": max(ends, default=None),
        "client_count": max(len(clients), *(row["client_count"] for row in rows)),
        "clients": list(clients.values())[:MAX_CLIENTS],
        "members": [row[MEMBER] for row in rows],
    }
    if "history" in main:
        merged["history"] = merged_chart([row["history"] for row in rows])
    if "connected" in main:  # why each client has its rule
        connected = {identity: each for row in rows for identity, each in _named(row, "connected")}
        merged["connected"] = list(connected.values())
    return merged


def _named(row: Row, key: str = "clients") -> list[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    return [((each["listener"], each["user"], each["client_id"]), each) for each in row[key]]


def _owner_first(rows: Sequence[Row], owner_of: OwnerOf) -> list[Row]:
    """Return the rows with that of the owner before those of others, these by their rates."""
    names = (each["client_id"] for row in rows for each in row["clients"] if each["client_id"])
    name = next(names, None)
    owner = None if name is None else owner_of(name)
    return sorted(rows, key=lambda row: (row[MEMBER] == owner, row["rate"]), reverse=True)
