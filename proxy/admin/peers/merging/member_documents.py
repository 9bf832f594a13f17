"""Merges documents of several members as a declared table says: concatenation, sort and limit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from proxy.admin.sliced_json import ROW_DEPTH
from proxy.state import Document

OwnerOf = Callable[[str], str | None]
"""Gives the name of the member that owns a client id; None for one that nobody owns now."""

Row = dict[str, Any]

Combine = Callable[[list[Any]], Any]
"""Makes one value of those that several documents or rows have of a field."""

MEMBER = "member"


class MemberDocument(NamedTuple):
    """What one member answered."""

    member: str
    """Its name."""
    document: Document


MemberDocuments = Sequence[MemberDocument]


@dataclass(frozen=True, slots=True)
class RowList:
    """How one list of a document is merged."""

    key: str
    """Of the list in the document."""
    identity: Callable[[Row], Any] = id
    """Tells rows apart that several members may have; by default no two have a row in common."""
    merge: Callable[[Sequence[Row], OwnerOf], Row] = lambda rows, _: rows[0]
    """Makes one row of several with the same identity."""
    rank: Callable[[Row], Any] | None = None
    """The sort key, highest first; None: rows stay in the order of their members."""
    is_ascending: bool = False
    """Whether the lowest come first instead."""
    counted: Mapping[str, Callable[[Row], bool]] = field(default_factory=dict)
    """By figures of the document the rows that each counts: it is a sum, less what is seen twice.

    Beyond the rows that the members gave what they count twice is not known.
    """
    limit: int | None = None
    """The most rows; None: all."""
    takes_limit: bool = False
    """Whether the request says how many instead."""
    names_member: bool = True
    """Whether each row says which `member` it is of."""

    def rows(self, documents: MemberDocuments) -> list[Row]:
        """Return the rows of all members; one of another version may lack the list."""
        return [
            {MEMBER: each.member, **row} if self.names_member else row
            for each in documents
            for row in each.document.get(self.key, ())
        ]

    def alike(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Return the rows of each identity."""
        found: dict[Any, list[Row]] = {}
        for row in rows:
            found.setdefault(self.identity(row), []).append(row)
        return list(found.values())

    def counts(self, documents: MemberDocuments, alike: Sequence[Sequence[Row]]) -> Document:
        """Return the figures, with the rows of each identity counted once."""
        return {
            key: sum(each.document.get(key, 0) for each in documents)
            - sum(max(sum(map(counts, rows)) - 1, 0) for rows in alike)
            for key, counts in self.counted.items()
            if key in documents[0].document
        }

    def joined(self, alike: Sequence[Sequence[Row]], owner_of: OwnerOf) -> list[Row]:
        """Return one row for each identity."""
        return [self.merge(each, owner_of) if len(each) > 1 else each[0] for each in alike]

    def shown(self, rows: list[Row], limit: int | None) -> list[Row]:
        """Sort rows and cut them off."""
        if self.rank is not None:
            rows = sorted(rows, key=self.rank, reverse=not self.is_ascending)
        return rows[: limit if self.takes_limit else self.limit]


@dataclass(frozen=True, slots=True)
class DocumentTable:
    """How the documents of one path are merged; what it does not name is the first member's."""

    lists: Sequence[RowList]
    fields: Mapping[str, Combine] = field(default_factory=dict)
    """How other values are merged."""
    more: Callable[[MemberDocuments, int | None, OwnerOf], Document] | None = None
    """Merges what rows alone do not say."""
    depth: int = ROW_DEPTH
    """At which the documents are read and written in one step."""

    def merged(
        self,
        documents: MemberDocuments,
        limit: int | None = None,
        owner_of: OwnerOf = lambda _: None,
    ) -> dict[str, Any]:
        """Return one document; at most `limit` rows of each list that takes it."""
        merged = combined([each.document for each in documents], self.fields)
        for each in self.lists:
            alike = each.alike(each.rows(documents))
            merged |= each.counts(documents, alike)
            merged[each.key] = each.shown(each.joined(alike, owner_of), limit)
        return merged if self.more is None else {**merged, **self.more(documents, limit, owner_of)}


def combined(documents: Sequence[Document], fields: Mapping[str, Combine]) -> dict[str, Any]:
    """Return the first document or row, with some fields made of the values of all."""
    found = {key: combine([each[key] for each in documents]) for key, combine in fields.items()}
    return {**documents[0], **found}


def summed(documents: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums by key."""
    sums: dict[str, int] = {}
    for document in documents:
        for key, value in document.items():
            sums[key] = sums.get(key, 0) + value
    return sums
