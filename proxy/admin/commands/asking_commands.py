"""The commands that ask a running proxy, once or until `q`, and print what it answers."""

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from urllib.parse import quote, urlencode

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from proxy.admin.api import THROTTLING_PATH
from proxy.admin.client_documents import CONNECTION
from proxy.admin.commands.operator_commands import AdminClientError, AdminPortClient
from proxy.admin.commands.top_tables import (
    ALARM,
    CALM,
    CLIENTS,
    ORDERS,
    PIPELINES,
    QUERIES,
    VIEWS,
    WARNING,
    draw_table,
    draw_view,
    order_in_force,
    print_at_width,
)
from proxy.admin.document_models import Column, printable
from proxy.admin.peers.peer_routes import TIER_PATH
from proxy.admin.suggestions import SUGGESTIONS_PATH
from proxy.state import Document

STATUS_INTERVAL_S = 2.0
STATUS_TIMEOUT_S = 5.0
LIMIT = 200  # how many clients are asked for
FRAME_LINES = 6  # of the view, that are not rows of its table
QUIT_KEYS = ("q", "\x03", "\x04")
ANSWERS = {None: "is asked", True: "yes", False: "NO"}
HELP = "q quit  c clients  s Spark queries  p pipelines  h held  n name  r rate"


def run_top(client: AdminPortClient, *, once: bool = False, console: Console | None = None) -> None:
    """Show the status until `q`; where there is no terminal, or with `once`, print it once.

    A proxy that stops answering while the view is up is said so, and asked again. Printed once,
    queries and pipelines follow the clients. Raises AdminClientError at the start.
    """
    console = console or Console()
    client = replace(client, timeout_s=STATUS_TIMEOUT_S)
    status = fetch_status(client)
    if once or not (console.is_terminal and sys.stdin.isatty()):
        views = [CLIENTS]
        views += [QUERIES] if status["followed"] else []
        views += [PIPELINES] if status["pipelines_total"] else []
        print_at_width(lambda width: draw_view(status, "held", width, views=views), console)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the cursor stays hidden
    with suppress(KeyboardInterrupt):
        _watch(client, status, console)


def fetch_status(client: AdminPortClient) -> Document:
    """Return what `GET /v1/status?by=client` gives. Raises AdminClientError."""
    known = {"client_counts", "unbounded", "followed", "pipelines", "throttling"}
    path = f"/v1/status?by=client&limit={LIMIT}"
    return client.document(path, known)


def _watch(client: AdminPortClient, status: Document, console: Console) -> None:
    order, view = "held", CLIENTS
    lost = ""
    next_s = time.monotonic() + STATUS_INTERVAL_S
    with _keys() as key_within, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            rows = console.height - FRAME_LINES
            shown = draw_view(status, order, console.width, rows, (view,))
            help_line = Text(f"{view} sorted by {order_in_force(view, order)}   {HELP}", "dim")
            help_line.no_wrap, help_line.overflow = True, "crop"
            live.update(Group(shown, Text(lost, "bold red"), help_line), refresh=True)
            key = key_within(max(0.0, next_s - time.monotonic()))
            if key in QUIT_KEYS:
                return
            order, view = ORDERS.get(key, order), VIEWS.get(key, view)
            if time.monotonic() >= next_s:
                try:
                    status, lost = fetch_status(client), ""
                except AdminClientError as error:
                    lost = f"{error.what}; trying again"
                next_s = time.monotonic() + STATUS_INTERVAL_S


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Take single keys from the terminal: give a function that waits so many seconds for one.

    Ctrl-C is a key too: an exception could strike in the middle of drawing.
    """
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def key_within(seconds: float) -> str:
        readable, _, _ = select.select([descriptor], [], [], seconds)
        # A terminal that is gone gives nothing, again and again.
        return (os.read(descriptor, 1) or b"q").decode("ascii", "replace") if readable else ""

    try:
        tty.setcbreak(descriptor)
        raw = termios.tcgetattr(descriptor)
        raw[tty.CC][termios.VINTR] = b"\0"
        termios.tcsetattr(descriptor, termios.TCSADRAIN, raw)
        yield key_within
    finally:
        with suppress(termios.error):  # it is gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def run_connections(
    client: AdminPortClient, text: str, limit: int, *, console: Console | None = None
) -> None:
    """Print up to `limit` connections with `text` in what names them, most traffic first.

    Raises AdminClientError.
    """
    query = urlencode({"filter": text, "limit": limit}, errors="surrogateescape")
    path = f"/v1/connections?{query}"
    document = client.document(path, {"connections", "total", "matching"})
    print_at_width(lambda width: _connection_table(document, width), console)


def _connection_table(document: Document, width: int) -> RenderableType:
    rows = document["connections"]
    lines = ((each, WARNING if each["held"] else CALM) for each in rows)
    below = f"{len(rows)} of {document['matching']} connections"
    if document["matching"] < document["total"]:
        below += f" that fit, {document['total']} in all"
    table = draw_table(CONNECTION.columns, lines, width)
    return Group(table, Text(f"{below}; {document['held']} held", "dim"))


def run_tier(client: AdminPortClient, *, as_json: bool) -> None:
    """Print the tier as a machine of it knows it. Raises AdminClientError."""
    tier = client.document(TIER_PATH, {"settled", "slots", "members", "machines"})
    if as_json:
        Console().print_json(data=tier)
    else:
        print_at_width(lambda width: tier_tables(tier, width))


def tier_tables(tier: Document, width: int) -> RenderableType:
    """Draw what `GET /v1/tier` gave, for a terminal `width` characters wide."""
    moving = sum(each["awaiting"] for each in tier["members"])
    state = "settled" if tier["settled"] else f"{moving} on their way"
    title = f"tier {tier['name']}  generation {tier['generation']}  slots {tier['slots']}, {state}"
    members = ((each, WARNING if each["releasing"] else CALM) for each in tier["members"])
    machines = ((each, _machine_style(each)) for each in tier["machines"])
    tables = (draw_table(MEMBERS, members, width), "", draw_table(MACHINES, machines, width))
    return Group(Text(title), "", *tables)


def _machine_style(machine: Document) -> str:
    return ALARM if machine["answers"] is False else WARNING if machine["problem"] else CALM


MEMBERS = (
    Column("member", "name", ratio=2),
    Column("owns", "owned", "count"),
    Column("releases", "releasing", "count"),
    Column("gets", "awaiting", "count"),
    Column("load", "load", "share"),
)
MACHINES = (
    Column("machine", "name", ratio=2),
    Column("answers", lambda row: ANSWERS[row["answers"]]),
    Column("clients may not reach it", "problem", ratio=3),
    Column("rules", lambda row: row["rules"][:12], from_width=100),
    Column("admin", "admin_url", from_width=100, ratio=2),
)


def change_throttling(client: AdminPortClient, **change: object) -> None:
    """Pause quotas, or enforce them again, and print what is in force then.

    `change` has the keys of the body of `POST /v1/throttling`. Raises AdminClientError.
    """
    key, body = "throttling", {key: value for key, value in change.items() if value is not None}
    throttling = client.document(THROTTLING_PATH, {key}, body)[key]
    lines = [
        f"paused: {each['selector']} until {each['until']}, {each['left_s']:,.0f} s left"
        for each in throttling["paused"]
    ]
    if not throttling["enforced"]:
        lines.append("no quota is enforced: throttle.enforce is false in the configuration")
    for line in lines or ["all quotas are enforced"]:
        sys.stdout.write(f"{printable(line)}\n")


def print_suggestions(client: AdminPortClient, since: str) -> None:
    """Print rules that would fit what was observed, as YAML. Raises AdminClientError."""
    path = f"{SUGGESTIONS_PATH}?since={quote(since, safe='', errors='surrogateescape')}"
    lines = client.document(path, {"yaml"})["yaml"].split("\n")
    sys.stdout.write("\n".join(map(printable, lines)))
