"""A table for the terminal whose columns give way when it is narrow."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

Document = Mapping[str, Any]
"""A part of what `GET /v1/status` gives."""


@dataclass(frozen=True, slots=True)
class Column:
    """What is shown of each row."""

    title: str
    from_width: int = 0
    """The narrowest terminal, in characters, that shows it."""
    ratio: int | None = None
    """Share of the room that is left; None takes what it needs."""
    justify: Literal["left", "right"] = "left"


def make_table(
    columns: Sequence[Column], rows: Iterable[tuple[Sequence[str], str]], width: int
) -> Table:
    """Draw rows, each a text for every column, and a style."""
    table = Table(box=None, expand=True, pad_edge=False, header_style="bold")
    for column in columns:
        if width >= column.from_width:
            table.add_column(
                column.title,
                ratio=column.ratio,
                justify=column.justify,
                no_wrap=column.ratio is None,
                overflow="fold",
            )
    for texts, style in rows:
        cells = zip(columns, texts, strict=True)
        table.add_row(
            # Text, not str: a client id must not be read as rich's markup.
            *(Text(printable(cell)) for column, cell in cells if width >= column.from_width),
            style=style,
        )
    return table


def figure(value: float | None) -> str:
    """Write a whole number for people; `-` for what is not known."""
    return "-" if value is None else f"{value:,.0f}"


def printable(text: str) -> str:
    """Escape what could steer the terminal, or is not seen: client ids hold what a client sends."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
