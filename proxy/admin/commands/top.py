"""`quota-proxy top`: the status of a running proxy, live in the terminal."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from proxy.admin.commands.operator_commands import AdminAddress, AdminRefusal
from proxy.admin.commands.top_tables import (
    CLIENTS,
    ORDERS,
    PIPELINES,
    QUERIES,
    VIEWS,
    order_of,
    print_wide,
    screen,
)
from proxy.state import Document

STATUS_INTERVAL_S = 2.0
STATUS_TIMEOUT_S = 5.0
LIMIT = 200  # how many clients are asked for
FRAME_LINES = 6  # of the view, that are not rows of its table
QUIT_KEYS = ("q", "\x03", "\x04")
HELP = "q quit  c clients  s Spark queries  p pipelines  h held  n name  r rate"


def run_top(address: AdminAddress, *, once: bool = False, console: Console | None = None) -> None:
    """Show the status until `q`; where there is no terminal, or with `once`, print it once.

    A proxy that stops answering while the view is up is said so, and asked again. Printed once,
    queries and pipelines follow the clients. Raises AdminRefusal at the start.
    """
    console = console or Console()
    address = replace(address, timeout_s=STATUS_TIMEOUT_S)
    status = fetch_status(address)
    if once or not (console.is_terminal and sys.stdin.isatty()):
        views = [CLIENTS]
        views += [QUERIES] if status["followed"] else []
        views += [PIPELINES] if status["pipelines_total"] else []
        print_wide(lambda width: screen(status, "held", width, views=views), console)
        return
    with suppress(KeyboardInterrupt):
        _watch(address, status, console)


def fetch_status(address: AdminAddress) -> Document:
    """Return what `GET /v1/status?by=client` gives. Raises AdminRefusal."""
    known = {"client_counts", "unbounded", "followed", "pipelines", "throttling"}
    path = f"/v1/status?by=client&limit={LIMIT}"
    return address.document(path, known)


def _watch(address: AdminAddress, status: Document, console: Console) -> None:
    order, view = "held", CLIENTS
    lost = ""
    next_s = time.monotonic() + STATUS_INTERVAL_S
    with _keys() as key_within, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            rows = console.height - FRAME_LINES
            shown = screen(status, order, console.width, rows, (view,))
            help_line = Text(f"{view} sorted by {order_of(view, order)}   {HELP}", "dim")
            help_line.no_wrap, help_line.overflow = True, "crop"
            live.update(Group(shown, Text(lost, "bold red"), help_line), refresh=True)
            key = key_within(max(0.0, next_s - time.monotonic()))
            if key in QUIT_KEYS:
                return
            order, view = ORDERS.get(key, order), VIEWS.get(key, view)
            if time.monotonic() >= next_s:
                try:
                    status, lost = fetch_status(address), ""
                except AdminRefusal as error:
                    lost = f"{error.problem}; trying again"
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
        return os.read(descriptor, 1).decode("ascii", "replace") if readable else ""

    try:
        tty.setcbreak(descriptor)
        raw = termios.tcgetattr(descriptor)
        raw[tty.CC][termios.VINTR] = b"\0"
        termios.tcsetattr(descriptor, termios.TCSADRAIN, raw)
        yield key_within
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
