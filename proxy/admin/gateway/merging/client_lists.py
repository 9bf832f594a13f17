"""Puts together which clients are bounded and which are not, for `/v1/clients` and the status."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import nlargest
from typing import Any

from proxy.admin.gateway.merging.member_documents import (
    MEMBER,
    MemberDocument,
    OwnerOf,
    all_rows,
    summed,
    total,
)
from proxy.admin.gateway.merging.quota_rows import (
    Row,
    clients_of,
    merged_row,
    row_share,
    sensor_of,
)
from proxy.quota.entities import QuotaKind
from proxy.state import Document

_KINDS = [str(kind) for kind in QuotaKind]


class _ClientGroup:
    """Rows that belong together at any member: of one client, or of what several share."""

    def __init__(self, rows: Sequence[Row], owner_of: OwnerOf) -> None:
        self.rows = rows
        by_sensor: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            by_sensor.setdefault(sensor_of(row), []).append(row)
        merged = [merged_row(each, owner_of) for each in by_sensor.values()]
        self.merged = sorted(merged, key=lambda row: (_KINDS.index(row["quota"]), row["entity"]))
        self.twice = [each for each in by_sensor.values() if len(each) > 1]
        """The rows of each sensor that several members have."""

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


def merged_clients(told: Sequence[MemberDocument], limit: int, owner_of: OwnerOf) -> dict[str, Any]:
    """Return `clients`, the closest to their bounds first and at most `limit`, and their counts.

    A sensor that several members have is one row. Figures are sums, less what is seen to be
    counted more than once; beyond the rows that the members gave that is not known.
    """
    groups = [_ClientGroup(rows, owner_of) for rows in _joined(all_rows(told, "clients"))]
    shown = nlargest(limit, groups, key=lambda group: group.urgency)
    twice = [rows for group in groups for rows in group.twice]
    document: dict[str, Any] = {
        key: total(told, key) - sum(map(surplus, twice))
        for key, surplus in _SURPLUS.items()
        if key in told[0].document
    }
    document["client_counts"] = _counts(told, groups, shown)
    document["clients"] = list(_rows_of(shown))
    return document


_SURPLUS = {
    "total": lambda rows: len(rows) - 1,
    "bounded": lambda rows: len(rows) - 1,
    "throttled": lambda rows: max(sum(row["throttled"] for row in rows) - 1, 0),
    "held": lambda rows: max(sum(row["hold_ends_in_s"] is not None for row in rows) - 1, 0),
}
"""How much too high a sum is by the rows of one sensor."""


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


def _joined(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows by groups; groups of two members are one if they have a sensor in common."""
    leader: dict[Any, Any] = {}

    def find(node: Any) -> Any:
        while (above := leader.setdefault(node, node)) != node:
            leader[node] = leader[above]
            node = above
        return node

    nodes = []
    for row in rows:
        sensor = sensor_of(row)
        nodes.append((row, sensor))
        if "group" in row:
            leader[find((row[MEMBER], row["group"], "group"))] = find(sensor)
    groups: dict[Any, list[Row]] = {}
    for row, sensor in nodes:
        groups.setdefault(find(sensor), []).append(row)
    return list(groups.values())


def _counts(
    told: Sequence[MemberDocument], groups: Sequence[_ClientGroup], shown: Sequence[_ClientGroup]
) -> dict[str, int]:
    """Return how many clients there are: those of all members, each of whom is known once."""
    counts = summed(each.document["client_counts"] for each in told)
    members: dict[Any, set[str]] = defaultdict(set)
    throttled: dict[Any, set[str]] = defaultdict(set)
    held: dict[Any, set[str]] = defaultdict(set)
    for group in groups:
        gone = len(group.left_at()) - group.has_left
        counts["left"] -= gone
        counts["bounded"] -= gone
        for row in group.rows:
            for client in clients_of(row):
                members[client].add(row[MEMBER])
                if row["throttled"]:
                    throttled[client].add(row[MEMBER])
                if row["hold_ends_in_s"] is not None:
                    held[client].add(row[MEMBER])
    for key, where in (("bounded", members), ("throttled", throttled), ("held", held)):
        counts[key] -= sum(len(each) - 1 for each in where.values())
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


def merged_unbounded(told: Sequence[MemberDocument], limit: int, owner_of: OwnerOf) -> Document:
    """Return who has no bound, those that move most first, and how many they are.

    A client's rate is that of its connections, wherever they are: those of all members are added.
    """
    by_client: dict[tuple[Any, ...], list[Row]] = {}
    rows = all_rows(told, "unbounded_clients")
    for row in rows:
        by_client.setdefault((row["listener"], row["user"], row["client_id"]), []).append(row)
    merged = [_unbounded(each, owner_of) for each in by_client.values()]
    return {
        "unbounded": total(told, "unbounded") - (len(rows) - len(merged)),
        "unbounded_clients": nlargest(limit, merged, key=lambda row: row["rate"] or 0.0),
    }


def _unbounded(rows: Sequence[Row], owner_of: OwnerOf) -> Row:
    rates = [row["rate"] for row in rows if row["rate"] is not None]
    owner = owner_of(rows[0]["client_id"] or "")
    main = max(rows, key=lambda row: (row[MEMBER] == owner, row["rate"] or 0.0))
    return {**main, "rate": round(sum(rates), 1) if rates else None}
