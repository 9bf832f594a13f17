"""`quota-proxy connections`: who is connected to a running proxy, as a table."""

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlencode

from rich.console import Console, Group, RenderableType
from rich.text import Text

from proxy.admin.commands.admin_client import AdminAddress, fetch_document
from proxy.admin.commands.top import PLAIN_COLUMNS
from proxy.admin.commands.top_tables import (
    CALM,
    UNKNOWN,
    WARNING,
    Column,
    draw_table,
    figure,
    rate_text,
)
from proxy.state import Document

WHERES = {
    "delay_queue": "response held",
    "muted": "muted",
    "gate": "waits at the gate",
    "connection_rate": "too many new connections",
    "one_at_a_time": "one request at a time",
    "login": "login under way",
    "in_flight": "too many requests in flight",
    "client_not_reading": "client does not read",
    "broker_not_reading": "broker does not read",
}
"""What keeps a connection waiting, for people."""


def run_connections(
    address: AdminAddress, text: str, limit: int, *, console: Console | None = None
) -> None:
    """Print up to `limit` connections with `text` in what names them, most traffic first.

    Raises AdminRefusal.
    """
    console = console or Console()
    path = f"/v1/connections?{urlencode({'filter': text, 'limit': limit})}"
    document = fetch_document(address, path, {"connections", "total", "matching"})
    if not console.is_terminal:
        console.width = PLAIN_COLUMNS
    console.print(table_of(document, console.width))


def table_of(document: Document, width: int) -> RenderableType:
    """Draw what `GET /v1/connections` gave, for a terminal `width` characters wide."""
    shown = document["connections"]
    rows: Iterable[tuple[Document, str]] = (
        (each, WARNING if each["held"] else CALM) for each in shown
    )
    below = f"{len(shown)} of {document['matching']} connections"
    if document["matching"] < document["total"]:
        below += f" that fit, {document['total']} in all"
    return Group(draw_table(COLUMNS, rows, width), Text(f"{below}; {document['held']} held", "dim"))


def _rate(value: float | None) -> str:
    return UNKNOWN if value is None else rate_text(value, "bytes_per_second")


def _address(row: Document) -> str:
    host = row["address"]
    return f"[{host}]:{row['port']}" if ":" in host else f"{host}:{row['port']}"


def _broker(row: Document) -> str:
    return "bootstrap" if row["node_id"] is None else str(row["node_id"])


def _held(row: Document) -> str:
    held: dict[str, Any] | None = row["held"]
    if held is None:
        return UNKNOWN
    text = WHERES.get(held["where"], str(held["where"]))
    if held["quota"]:
        text += f": {held['quota']} of {held['entity']}"
    if held["rule"]:
        text += f", {held['rule']['place'] or held['rule']['title']}"
    return text


def _left(row: Document) -> str:
    held = row["held"]
    return UNKNOWN if held is None or held["ends_in_s"] is None else f"{held['ends_in_s']:.1f} s"


COLUMNS = (
    Column("id", lambda row: str(row["id"]), justify="right"),
    Column("address", _address),
    Column("client", lambda row: row["client_id"] or "(no client id)", ratio=3),
    Column("user", lambda row: row["user"] or UNKNOWN, 100),
    Column("listener", lambda row: row["listener"], 140),
    Column("broker", _broker, 90, justify="right"),
    Column("age", lambda row: f"{figure(row['age_s'])} s", justify="right"),
    Column("in", lambda row: _rate(row["received_rate"]), justify="right"),
    Column("out", lambda row: _rate(row["sent_rate"]), justify="right"),
    Column("flight", lambda row: figure(row["in_flight"]), 90, justify="right"),
    Column("held", _held, ratio=4),
    Column("ends in", _left, justify="right"),
)
"""Address and client at any width: who it is must not depend on the terminal."""
