"""Models of documents: each says how its fields are made, merged over members, and documented."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import cleandoc
from typing import Any, Generic, TypeVar

from metrics.clock import MS_PER_SECOND
from proxy.admin.columns import Column
from proxy.quota.rule_registry import RuleEntry
from proxy.state import Document

T = TypeVar("T")

Combine = Callable[[list[Any]], Any]
"""Makes one value of those that several documents or rows have of a field."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What rows are described by, beside themselves."""

    now_s: float
    """Seconds since the epoch."""
    now_ms: float = 0.0
    """On the monotonic clock."""
    in_force: Mapping[str, RuleEntry] = field(default_factory=dict)
    """Rules by their selectors."""
    adaptive: Mapping[str, Document] = field(default_factory=dict)
    """What backpressure does, by the entity whose reading is bounded."""

    def at_s(self, at_ms: float | None) -> float | None:
        """Return a monotonic time in seconds of the epoch, to the millisecond; None for None."""
        if at_ms is None:
            return None
        return round(self.now_s - (self.now_ms - at_ms) / MS_PER_SECOND, 3)


class Model(Generic[T]):
    """The fields of a document that is made of a `T`.

    `text` has a line for each, or for some together: `NAME, NAME: what docs/api.md says`; what is
    indented goes on with the line before. `made` gives values for JSON, others are the attributes
    of their names. `merged` makes one value of those of several members; else the first one counts.
    `divided` does so where each of them has a part: what is `leased` to it. `columns` are those of
    its table in the terminal, on the page or on both.
    """

    def __init__(
        self,
        text: str,
        made: Mapping[str, Callable[[T, Moment], Any]] | None = None,
        merged: Mapping[str, Combine] | None = None,
        divided: Mapping[str, Combine] | None = None,
        columns: Sequence[Column] = (),
    ) -> None:
        lines = cleandoc(text).replace("\n    ", " ").splitlines()
        self._texts = dict(line.split(": ", 1) for line in lines)
        self._merged, self._divided, self._made = merged or {}, divided or {}, made or {}
        self.columns = columns
        self._getters: dict[type, list[tuple[str, Callable[[T, Moment], Any] | None]]] = {}
        """By the types of rows, of which each has the same attributes."""
        self.names = [name for names in self._texts for name in names.split(", ")]

    def made(self, *names: str) -> dict[str, Callable[[T, Moment], Any]]:
        """Return what makes these fields, for a model of the same rows."""
        return {name: self._made[name] for name in names}

    def document(self, row: T, moment: Moment) -> Document:
        """Return a row for JSON, with the fields that can be made of it alone."""
        if (getters := self._getters.get(type(row))) is None:
            made = ((name, self._made.get(name)) for name in self.names)
            getters = [(name, get) for name, get in made if get or hasattr(row, name)]
            self._getters[type(row)] = getters
        return {name: get(row, moment) if get else getattr(row, name) for name, get in getters}

    def combined(self, documents: Sequence[Document]) -> dict[str, Any]:
        """Return what several members have of one thing as one document; the first is its owner's.

        Raises KeyError where one lacks a field.
        """
        first, merged = documents[0], self._merged
        if any(each.get("leased") is not None for each in documents):
            merged = {**merged, **self._divided}
        found = {
            name: merge([each[name] for each in documents])
            for name, merge in merged.items()
            if name in first
        }
        return {**first, **found}

    def table(self) -> str:
        """Return the table of docs/api.md."""
        rows = (
            f"| `{names.replace(', ', '`, `')}` | {text} |" for names, text in self._texts.items()
        )
        return "\n".join(("| field | |", "|---|---|", *rows))
