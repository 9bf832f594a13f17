"""Models of documents: how fields are made, merged over members, shown in tables and documented.

And how values are written in them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from inspect import cleandoc
from operator import attrgetter
from typing import Any, Generic, TypeVar

from metrics.clock import MS_PER_SECOND
from proxy.quota.rule_registry import RuleEntry
from proxy.state import Document

UNKNOWN = "-"
MISREAD = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading a document raises that has not what it should."""

MAX_TEXT_CHARS = 300  # of one error or reason in the status document
_UNITS, _STEP = ("B", "KiB", "MiB", "GiB", "TiB"), 1024.0

T = TypeVar("T")

Combine = Callable[[list[Any]], Any]
"""Makes one value of those that several documents or rows have of a field."""


def iso(at_s: float | None) -> str | None:
    """Write a time since the epoch as ISO 8601 in UTC, to the second."""
    return None if at_s is None else datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")


def between_s(begin_s: float | None, end_s: float | None) -> float | None:
    """Return how long it is from one time to another, in seconds for JSON; None for no time."""
    return None if begin_s is None or end_s is None else round(max(end_s - begin_s, 0.0), 1)


def rounded(rate: float | None, digits: int = 1) -> float | None:
    """Return a figure as documents show it."""
    return None if rate is None else round(rate, digits)


def clipped(text: str | None) -> str | None:
    """Return a text as the status document shows it: at most MAX_TEXT_CHARS of it."""
    return text if text is None or len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}…"


def printable(text: str) -> str:
    """Escape what could steer the terminal, or is not seen: client ids hold what a client sends."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def size_text(size: float, digits: int = 4, last: str = "GiB") -> str:
    """Write bytes for people, in steps of 1024 up to the `last` unit."""
    for unit in _UNITS:
        if unit == last:
            break
        if size < _STEP:
            return f"{size:.{digits}g} {unit}"
        size /= _STEP
    return f"{size:.4g} {last}"


def picked(row: object, *names: str) -> dict[str, Any]:
    """Return some members of a document, or attributes of another object, in this order."""
    if isinstance(row, Mapping):
        return {name: row[name] for name in names}
    return {name: getattr(row, name) for name in names}


def rate_text(value: float, unit: str = "") -> str:
    """Write a rate or a bound for people, in steps of 1024."""
    return f"{value:.1f} %" if unit == "percent" else f"{size_text(value)}/s"


FORMS: Mapping[str, Callable[[Any], str]] = {
    "text": str,
    "number": str,
    "count": "{:,.0f}".format,
    "rate": rate_text,
    "share": "{:.0%}".format,
    "seconds": "{:.1f} s".format,
    "age": "{:,.0f} s".format,
}
"""How the terminal writes values; page/rows.js has the same names. All but texts are numbers."""


@dataclass(frozen=True, slots=True)
class Column:
    """What is shown of each row."""

    title: str
    value: str | Callable[[Document], str]
    """Where the value is, as `batch.rows`; or what makes the text, for the terminal only."""
    form: str = "text"
    """One of FORMS."""
    from_width: int = 0
    """The narrowest terminal, in characters, that shows it."""
    ratio: int | None = None
    """Share of the room that is left; None takes what it needs."""
    is_name: bool = False
    """Whether a long text is shown without its middle."""
    none: str = UNKNOWN
    """What is shown where there is no value."""
    page: str | None = None
    """Its title on the page; None: it is not there."""

    def text(self, row: Document) -> str:
        """Return what the terminal shows of a row; nothing for a field that it has not."""
        if not isinstance(self.value, str):
            return self.value(row)
        value: Any = row
        for key in self.value.split("."):
            value = value and value.get(key, "")
        return self.none if value is None else FORMS[self.form](value) if value != "" else ""


@dataclass(frozen=True, slots=True)
class RowContext:
    """What rows are described by, beside themselves."""

    now_s: float
    """Seconds since the epoch."""
    now_ms: float = 0.0
    """On the monotonic clock."""
    in_force: Mapping[str, RuleEntry] = field(default_factory=dict)
    """Rules by their selectors."""
    schedules: Mapping[str, str] = field(default_factory=dict)
    """Until when rules are in force, or when they begin, by their titles."""
    adaptive: Mapping[str, Document] = field(default_factory=dict)
    """What backpressure does, by the entity whose reading is bounded."""

    def at_s(self, at_ms: float | None) -> float | None:
        """Return a monotonic time in seconds of the epoch, to the millisecond; None for None."""
        if at_ms is None:
            return None
        return round(self.now_s - (self.now_ms - at_ms) / MS_PER_SECOND, 3)


Made = str | Callable[[T, RowContext], Any]
"""What a field is made of: an attribute, such as `log.high_watermark`, or what computes it."""


def _getter(made: Made[T]) -> Callable[[T, RowContext], Any]:
    if not isinstance(made, str):
        return made
    attribute = attrgetter(made)
    return lambda row, _: attribute(row)


class DocumentModel(Generic[T]):
    """The fields of a document that is made of a `T`.

    `text` has a line for each, or for some together: `NAME, NAME: what docs/api.md says`; what is
    indented goes on with the line before. `made` gives values for JSON, others are the attributes
    of their names; or as `like` makes them. `merged` makes one value of those of several members;
    else the first one counts. `divided` does so where each of them has a part: what is `leased` to
    it. `columns` are those of its table in the terminal, on the page or on both.
    """

    def __init__(
        self,
        text: str,
        made: Mapping[str, Made[T]],
        merged: Mapping[str, Combine] | None = None,
        divided: Mapping[str, Combine] | None = None,
        columns: Sequence[Column] = (),
        like: "DocumentModel[Any] | None" = None,
    ) -> None:
        lines = cleandoc(text).replace("\n    ", " ").splitlines()
        self.texts = dict(line.split(": ", 1) for line in lines)
        """By one name, or some with commas between them."""
        self._merged, self._divided = merged or {}, divided or {}
        self.made: Mapping[str, Made[T]] = {**(like.made if like else {}), **made}
        self.columns = columns
        self._getters: dict[type, list[tuple[str, Callable[[T, RowContext], Any]]]] = {}
        """By the types of rows, of which each has the same attributes."""
        self.names = [name for names in self.texts for name in names.split(", ")]

    def document(self, row: T, moment: RowContext) -> Document:
        """Return a row for JSON, with the fields that can be made of it alone."""
        if (getters := self._getters.get(type(row))) is None:
            known = (name for name in self.names if name in self.made or hasattr(row, name))
            getters = [(name, _getter(self.made.get(name, name))) for name in known]
            self._getters[type(row)] = getters
        return {name: get(row, moment) for name, get in getters}

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
