"""Puts together which clients are bounded and which are not, for `/v1/clients` and the status."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from proxy.admin.peers.merging.member_documents import (
    MEMBER,
    MemberDocuments,
    OwnerOf,
    Row,
    RowList,
    summed,
)
from proxy.admin.peers.merging.quota_rows import clients_of, merged_row, row_share, sensor_of
from proxy.quota.disjoint_sets import DisjointSets
from proxy.quota.entities import QuotaKind

_KINDS = [str(kind) for kind in QuotaKind]

CLIENT_ROWS = RowList(
    "clients",
    sensor_of,
    merged_row,
    counted={
        "total": lambda _: True,
        "bounded": lambda _: True,
        "throttled": itemgetter("throttled"),
        "held": lambda row: row["hold_ends_in_s"] is not None,
    },
)
"""They are sorted and cut off by groups."""


class _ClientGroup:
    """Rows that belong together at any member: of one client, or of what several share."""

    def __init__(self, rows: Sequence[Row], owner_of: OwnerOf) -> None:
        self.rows = rows
        self.alike = CLIENT_ROWS.alike(rows)
        """The rows of each sensor: all are in one group."""
        merged = CLIENT_ROWS.joined(self.alike, owner_of)
        self.merged = sorted(merged, key=lambda row: (_KINDS.index(row["quota"]), row["entity"]))

    @property
    def urgency(self) -> tuple[bool, float]:
        """Throttled ones are above the others, then those closer to their bound."""
        return any(row["throttled"] for row in self.merged), max(map(row_share, self.merged))

    def left_at(self) -> list[str]:
        """Return the members where none of its clients is connected any more."""
        counts: dict[str, int] = defaultdict(int)
        for row in self.rows:
            counts[row[MEMBER]] += row["client_count"]
        return [member for member, count in counts.items() if not count]

    @property
    def has_left(self) -> bool:
        """Whether none of its clients is connected anywhere."""
        return not any(row["client_count"] for row in self.rows)


def merged_clients(
    documents: MemberDocuments, limit: int | None, owner_of: OwnerOf
) -> dict[str, Any]:
    """Return `clients`, the closest to their bounds first and at most `limit`, and their counts.

    A sensor that several members have is one row. Figures are sums, less what is seen to be
    counted more than once; beyond the rows that the members gave that is not known.
    """
    groups = [_ClientGroup(each, owner_of) for each in _joined(CLIENT_ROWS.rows(documents))]
    alike = [rows for group in groups for rows in group.alike]
    shown = sorted(groups, key=lambda group: group.urgency, reverse=True)[:limit]
    return {
        **CLIENT_ROWS.counts(documents, alike),
        "client_counts": _counts(documents, groups, shown),
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
    groups: dict[int, list[Row]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(sets.find(number), []).append(row)
    return list(groups.values())


def _counts(
    documents: MemberDocuments,
    groups: Sequence[_ClientGroup],
    shown: Sequence[_ClientGroup],
) -> dict[str, int]:
    """Return how many clients there are: those of all members, each of whom is known once."""
    counts = summed([each.document["client_counts"] for each in documents])
    for group in groups:
        gone = len(group.left_at()) - group.has_left
        counts["left"] -= gone
        counts["bounded"] -= gone
    rows = [row for group in groups for row in group.rows]
    for key in ("bounded", "throttled", "held"):
        counted = filter(CLIENT_ROWS.counted[key], rows)
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
