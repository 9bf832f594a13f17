"""What the merging of all documents has in common."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from proxy.state import Document

OwnerOf = Callable[[str], str | None]
"""Gives the name of the member that owns a client id; None for one that nobody owns now."""

MEMBER = "member"


class MemberDocument(NamedTuple):
    """What one member answered."""

    member: str
    """Its name."""
    document: Document


def of_member(told: MemberDocument, key: str) -> list[dict[str, Any]]:
    """Return the rows of a list in a document, each with the `member` that it is of."""
    return [{MEMBER: told.member, **row} for row in told.document.get(key, ())]


def all_rows(told: Sequence[MemberDocument], key: str) -> list[dict[str, Any]]:
    """Return the rows of all members."""
    return [row for each in told for row in of_member(each, key)]


def total(told: Iterable[MemberDocument], key: str) -> int:
    """Return the sum of a figure that documents have."""
    return sum(each.document.get(key, 0) for each in told)


def summed(documents: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums by key."""
    sums: dict[str, int] = {}
    for document in documents:
        for key, value in document.items():
            sums[key] = sums.get(key, 0) + value
    return sums


def distinct(rows: Iterable[Document], *keys: str) -> list[Document]:
    """Return the rows of which no earlier one has the same values under the keys."""
    found: dict[tuple[Any, ...], Document] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), row)
    return list(found.values())
