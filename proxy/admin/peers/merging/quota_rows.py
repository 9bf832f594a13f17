"""Makes one row of those that several members have of one sensor, or of one client."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import Any

from proxy.admin.peers.merging.member_documents import MEMBER, Combine, OwnerOf, Row, combined

Identity = tuple[str, str | None, str | None]

Chart = Mapping[str, Any]
"""Of a sensor's rates and bounds, as `History.document` gives it."""

MAX_CLIENTS = 20  # named in one row, as a member does


def sensor_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return what tells a sensor from others."""
    return row["quota"], row["entity"]


def clients_of(row: Mapping[str, Any]) -> list[Identity]:
    """Return the identities of the clients that a row names."""
    return list(_by_identity([row["clients"]]))


def row_share(row: Mapping[str, Any]) -> float:
    """Return the rate as a share of the bound."""
    return float(row["rate"] / row["bound"])


def merged_row(rows: Sequence[Row], owner_of: OwnerOf) -> Row:
    """Return one row for a sensor.

    Rate, bound and rule are those of the client's owner: it counts what passes elsewhere as well.
    Where the owner is not among the members, or not known, they are of the highest rate.
    """
    rows = _owner_first(rows, owner_of)
    clients = _by_identity([row["clients"] for row in rows])
    fields = {key: combine for key, combine in _FIELDS.items() if key in rows[0]}
    return {
        **combined(rows, fields),
        "client_count": max(len(clients), *(row["client_count"] for row in rows)),
        "members": [row[MEMBER] for row in rows],
    }


def merged_unbounded_row(rows: Sequence[Row], owner_of: OwnerOf) -> Row:
    """Return one row for a client; its rate is that of its connections, wherever they are."""
    return combined(_owner_first(rows, owner_of), {"rate": _added_rates})


def merged_chart(charts: Sequence[Chart | None]) -> Chart | None:
    """Return the chart of a sensor that several members have; the first is its owner's.

    All end now. In each interval the highest rate counts: what a client moves elsewhere its owner
    counts as well, so that a sum would have it twice; and after a handover each member knows a
    part of the time. Bounds are the owner's where it knows them.
    """
    known = [chart for chart in charts if chart is not None and chart["rates"]]
    if len(known) < 2:  # noqa: PLR2004 - one has nothing to be merged with
        return known[0] if known else next((each for each in charts if each is not None), None)
    rates = zip_longest(*(reversed(chart["rates"]) for chart in known), fillvalue=0.0)
    bounds = zip_longest(*(reversed(list(_bound_of_each(chart))) for chart in known))
    of_each = [next(bound for bound in column if bound is not None) for column in bounds]
    runs = groupby(enumerate(reversed(of_each)), key=itemgetter(1))
    return {
        "interval_s": known[0]["interval_s"],
        "rates": list(map(max, rates))[::-1],
        "bounds": [list(next(run)) for _, run in runs],
    }


def _bound_of_each(chart: Chart) -> Iterator[float]:
    """Yield the bound for each rate."""
    starts, bound = dict(map(tuple, chart["bounds"])), 0.0
    for position in range(len(chart["rates"])):
        bound = starts.get(position, bound)
        yield bound


def _added_rates(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return round(sum(known), 1) if known else None


def _by_identity(lists: Sequence[Sequence[Row]]) -> dict[Identity, Row]:
    """Return the clients of several rows, each once, as the last one has it."""
    rows = (row for each in lists for row in each)
    return {(row["listener"], row["user"], row["client_id"]): row for row in rows}


_FIELDS: Mapping[str, Combine] = {
    # Each member counts what happened on its own connections.
    "would_throttle": sum,
    "holds": sum,
    "held_s": lambda values: round(sum(values), 3),
    "waiting": sum,
    "throttled": any,
    "above_s": max,
    "hold_ends_in_s": lambda ends: max((end for end in ends if end is not None), default=None),
    "clients": lambda lists: list(_by_identity(lists).values())[:MAX_CLIENTS],
    "history": merged_chart,
    "connected": lambda lists: list(_by_identity(lists).values()),  # why each client has its rule
}


def _owner_first(rows: Sequence[Row], owner_of: OwnerOf) -> list[Row]:
    """Return the rows with that of the owner before those of others, these by their rates."""
    clients = (each for row in rows for each in row.get("clients", [row]))
    name = next((each["client_id"] for each in clients if each["client_id"]), None)
    owner = None if name is None else owner_of(name)
    return sorted(rows, key=lambda row: (row[MEMBER] == owner, row["rate"] or 0.0), reverse=True)
