"""Columns of tables: how fields of a document are shown in the terminal and on the page."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.admin.written_values import size_text
from proxy.state import Document

UNKNOWN = "-"


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
    from_width: int | None = 0
    """The narrowest terminal, in characters, that shows it; None: none does."""
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


def page_columns(tables: Mapping[str, Sequence[Column]]) -> str:
    """Return the columns that the page has of some tables, as a module for it."""
    shown = {
        name: [(each.page, each.value, each.form, each.none) for each in columns if each.page]
        for name, columns in tables.items()
    }
    return f"export const COLUMNS = {json.dumps(shown)};\n"
