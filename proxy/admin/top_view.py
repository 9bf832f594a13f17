"""Draws the status document as a table for the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from proxy.quota.entities import QuotaKind

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_COLUMNS = 24

ORDERS: dict[str, str] = {"h": "held", "n": "name", "r": "rate"}
"""By which key the table is sorted in which way."""

_RATE_UNITS = ("B/s", "KiB/s", "MiB/s", "GiB/s")
_STEP = 1024.0
_KINDS = {
    QuotaKind.CONSUMER_BYTE_RATE: "consumer",
    QuotaKind.PRODUCER_BYTE_RATE: "producer",
    QuotaKind.REQUEST_PERCENTAGE: "requests",
}

Document = Mapping[str, Any]
"""A part of what `GET /v1/status` gives."""


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    from_width: int = 0
    """The narrowest terminal, in characters, that shows it."""
    ratio: int | None = None
    """Share of the room that is left; None takes what it needs."""
    justify: Literal["left", "right"] = "left"


_COLUMNS = (
    _Column("client", ratio=3),
    _Column("quota"),
    _Column("rate", justify="right"),
    _Column("bound", from_width=100, justify="right"),
    _Column("of it", justify="right"),
    _Column("last 10 min", from_width=150),
    _Column("held in 1 min", justify="right"),
    _Column("ends in", justify="right"),
    _Column("rule", from_width=120, ratio=2),
)


def rate_text(value: float, unit: str) -> str:
    """Write a rate or a bound for people, in steps of 1024."""
    if unit == "percent":
        return f"{value:.1f} %"
    for name in _RATE_UNITS[:-1]:
        if value < _STEP:
            return f"{value:.4g} {name}"
        value /= _STEP
    return f"{value:.4g} {_RATE_UNITS[-1]}"


def printable(text: str) -> str:
    """Replace what could steer the terminal: client ids hold whatever a client sends."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def in_order(clients: Sequence[Document], order: str) -> list[Document]:
    """Sort the clients by `held` (longest in the last minute), `name` or `rate` (of the bound)."""
    by_name = sorted(clients, key=lambda client: (client["entity"], client["quota"]))
    if order == "held":
        by_name.sort(key=lambda client: -float(client["held_s"]))
    elif order == "rate":
        by_name.sort(key=lambda client: -float(client["rate"] / client["bound"]))
    return by_name


def screen(status: Document, order: str, width: int, rows: int | None = None) -> RenderableType:
    """Draw the whole view.

    Args:
        status: what `GET /v1/status` gave.
        order: a value of `ORDERS`.
        width: of the terminal, in characters; a narrow one shows fewer columns.
        rows: how many clients fit; None for all.

    """
    clients = in_order(status["clients"], order)
    shown = clients if rows is None else clients[: max(rows, 0)]
    table = Table(box=None, expand=True, pad_edge=False, header_style="bold")
    for column in _COLUMNS:
        if width >= column.from_width:
            table.add_column(
                column.title,
                ratio=column.ratio,
                justify=column.justify,
                no_wrap=column.ratio is None,
                overflow="fold",
            )
    for client in shown:
        cells = zip(_COLUMNS, _cells(client), strict=True)
        table.add_row(
            # Text, not str: a client id must not be read as rich's markup.
            *(Text(cell) for column, cell in cells if width >= column.from_width),
            style="yellow" if client["throttled"] else "",
        )
    below = f"{len(shown)} of {status['bounded']} clients under a quota"
    return Group(_head(status), "", table, Text(below, "dim"))


def _head(status: Document) -> Text:
    ready = status["ready"]
    state = "ready" if ready else f"NOT READY: {status['not_ready_reason']}"
    connections = sum(listener["connections"] for listener in status["listeners"])
    waiting = ", ".join(f"{api} {size}" for api, size in status["delay_queues"].items())
    return Text.assemble(
        ("Kafka Quota Proxy ", "bold"),
        (printable(state), "green" if ready else "bold red"),
        f"  up {status['uptime_s']:.0f} s  connections {connections}  waiting {waiting}"
        f"  throttled {status['throttled']}  {status['at']}",
    )


def _cells(client: Document) -> tuple[str, ...]:
    """Return one text for each of `_COLUMNS`."""
    unit, rate, bound, ends_s = (client[key] for key in ("unit", "rate", "bound", "hold_ends_in_s"))
    rule = client["rule"]
    return (
        printable(client["entity"]),
        _KINDS[QuotaKind(client["quota"])],
        rate_text(rate, unit),
        rate_text(bound, unit),
        f"{rate / bound:.0%}",
        _sparks(client["history"], bound),
        f"{client['holds']}x {client['held_s']:.1f} s" if client["holds"] else "-",
        "-" if ends_s is None else f"{ends_s:.2f} s",
        printable(rule["place"] or rule["title"]),
    )


def _sparks(history: Document | None, bound: float) -> str:
    """Draw the samples as bars; several samples to a bar show the highest of them."""
    rates = [] if history is None else history["rates"]
    per_bar = -(-len(rates) // SPARK_COLUMNS) or 1
    bars = [max(rates[start : start + per_bar]) for start in range(0, len(rates), per_bar)]
    top = max((*bars, bound))
    return "".join(SPARKS[round(bar / top * (len(SPARKS) - 1))] for bar in bars)
