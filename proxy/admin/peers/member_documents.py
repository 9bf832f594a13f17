"""Merges documents of several members as a table says: its parts each give some of the fields."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from operator import itemgetter
from typing import Any, TypeVar

from proxy.admin.history import chart
from proxy.state import Document

T = TypeVar("T")

OwnerOf = Callable[[str], str | None]
"""Gives the name of the member that owns a client id; None for one that nobody owns now."""

Row = dict[str, Any]

Combine = Callable[[list[Any]], Any]
"""Makes one value of those that several documents or rows have of a field."""

Merge = Callable[[Sequence[Row]], Row]
"""Makes one row of those that several members have of the same thing; see `joined`."""

Identity = tuple[str, str | None, str | None]

Chart = Mapping[str, Any]
"""Of a sensor's rates and bounds, as `History.document` gives it."""

MEMBER = "member"

OWN_SLOTS = "slots"
"""The key of what the status of one member says of its own slots."""

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
        return [
            {MEMBER: name, **row}
            for name, document in self.by_member.items()
            for row in document.get(key, ())
        ]

    def joined(self, alike: Iterable[Sequence[Row]], merge: Merge) -> list[Row]:
        """Return one row for each thing.

        Where several members have one, the row of its client's owner comes first, then those with
        the highest rates.
        """
        return [merge(self._owner_first(rows)) if len(rows) > 1 else rows[0] for rows in alike]

    def _owner_first(self, rows: Sequence[Row]) -> Sequence[Row]:
        clients = (each for row in rows for each in row.get("clients", [row]))
        name = next(filter(None, (each.get("client_id") for each in clients)), None)
        owner = None if name is None else self.owner_of(name)
        return sorted(
            rows, key=lambda row: (row[MEMBER] == owner, row.get("rate") or 0.0), reverse=True
        )

    def counts(
        self, alike: Sequence[Sequence[Row]], counted: Mapping[str, Callable[[Row], bool]]
    ) -> Document:
        """Return figures, each a sum less what is seen to be counted twice.

        `counted` tells by figures which rows each counts, and `alike` has the rows of one thing.
        Beyond the rows that the members gave what they count twice is not known.
        """
        first, *_ = self.by_member.values()
        return {
            key: sum(each.get(key, 0) for each in self.by_member.values())
            - sum(max(sum(map(counts, rows)) - 1, 0) for rows in alike)
            for key, counts in counted.items()
            if key in first
        }


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
    names_member: bool = True,
) -> Part:
    """Return the part that is a list with the rows of all, each row of the same `identity` once.

    Those with the highest `rank` come first; without one they are in the order of their members.
    """

    def part(told: MemberDocuments) -> Document:
        found = told.joined(grouped(told.rows(key), identity), merge)
        if rank is not None:
            found.sort(key=rank, reverse=True)
        if not names_member:
            found = [{name: row[name] for name in row if name != MEMBER} for row in found]
        return {key: found[:most]}

    return part


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


def clients_of(row: Mapping[str, Any]) -> list[Identity]:
    """Return the identities of the clients that a row names."""
    return list(_by_identity([row["clients"]]))


def merged_row(rows: Sequence[Row]) -> Row:
    """Return one row for a sensor.

    Rate, bound and rule are those of the client's owner: it counts what passes elsewhere as well.
    Where the owner is not among the members, or not known, they are of the highest rate.
    """
    clients = _by_identity([row["clients"] for row in rows])
    fields = {key: combine for key, combine in _FIELDS.items() if key in rows[0]}
    return {
        **combined(rows, fields),
        "client_count": max(len(clients), *(row["client_count"] for row in rows)),
        "members": [row[MEMBER] for row in rows],
    }


def merged_unbounded_row(rows: Sequence[Row]) -> Row:
    """Return one row for a client; its rate is that of its connections, wherever they are."""
    known = [row["rate"] for row in rows if row["rate"] is not None]
    return {**rows[0], "rate": round(sum(known), 1) if known else None}


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
    return chart(known[0]["interval_s"], list(map(max, rates))[::-1], reversed(of_each))


def _bound_of_each(chart: Chart) -> Iterator[float]:
    """Yield the bound for each rate."""
    starts, bound = dict(map(tuple, chart["bounds"])), 0.0
    for position in range(len(chart["rates"])):
        bound = starts.get(position, bound)
        yield bound


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
