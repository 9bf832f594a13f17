"""`quota-proxy top`: the status of a running proxy, live in the terminal."""

import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from proxy.admin.commands.admin_client import AdminAddress
from proxy.admin.top_tables import CLIENTS, ORDERS, PIPELINES, QUERIES, VIEWS, order_of, screen

INTERVAL_S = 2.0
TIMEOUT_S = 5.0
LIMIT = 200  # how many clients are asked for
FRAME_LINES = 6  # of the view, that are not rows of its table
PLAIN_COLUMNS = 160  # how wide the view is where no terminal says so
QUIT_KEYS = ("q", "\x04")
HELP = "q quit  c clients  s Spark queries  p pipelines  h held  n name  r rate"

EXIT_DONE, EXIT_FAILED = 0, 1


class UnreachableError(Exception):
    """The proxy's admin server did not answer as it should."""


def run_top(
    address: AdminAddress,
    *,
    once: bool = False,
    console: Console | None = None,
    errors: Console | None = None,
) -> int:
    """Show the status until `q`; where there is no terminal, or with `once`, print it once.

    A proxy that stops answering while the view is up is said so, and asked again. Printed once,
    queries and pipelines follow the clients. Returns the exit code: 0, or 1 when the proxy could
    not be reached at the start.
    """
    console = console or Console()
    try:
        status = fetch_status(address)
    except UnreachableError as error:
        return complain(error, errors)
    if once or not (console.is_terminal and sys.stdin.isatty()):
        if not console.is_terminal:
            console.width = PLAIN_COLUMNS
        views = [CLIENTS]
        views += [QUERIES] if status["followed"] else []
        views += [PIPELINES] if status["pipelines_total"] else []
        console.print(screen(status, "held", console.width, views=views))
        return EXIT_DONE
    with suppress(KeyboardInterrupt):
        _watch(address, status, console)
    return EXIT_DONE


def fetch_status(address: AdminAddress) -> dict[str, Any]:
    """Return what `GET /v1/status?by=client` gives. Raises UnreachableError."""
    known = {"client_counts", "unbounded", "followed", "pipelines", "throttling"}
    return fetch_document(address, f"/v1/status?by=client&limit={LIMIT}", known)


def fetch_document(address: AdminAddress, path: str, known: Set[str]) -> dict[str, Any]:
    """Return the document at a path, which has these keys. Raises UnreachableError."""
    url = address.url
    try:
        with address.open(path, timeout_s=TIMEOUT_S) as reply:
            document = json.load(reply)
    except HTTPError as error:
        wants = "; it wants --token-file" if error.code == HTTPStatus.UNAUTHORIZED else ""
        raise UnreachableError(f"{url} answered {error.code} {error.reason}{wants}") from None
    except URLError as error:
        raise UnreachableError(f"{url} does not answer: {error.reason}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise UnreachableError(f"{url!r} does not answer as a proxy would: {error}") from None
    if not isinstance(document, dict) or not known <= document.keys():
        raise UnreachableError(f"{url} is not a quota proxy of this version")
    return document


def complain(error: UnreachableError, errors: Console | None) -> int:
    """Print why the proxy was not reached and how to mend it; return the exit code."""
    text = f"{error}\n    fix: start the proxy, or give the address of admin.bind"
    errors = errors or Console(stderr=True)
    errors.print(text, markup=False, highlight=False, soft_wrap=True)
    return EXIT_FAILED


def _watch(address: AdminAddress, status: dict[str, Any], console: Console) -> None:
    order, view = "held", CLIENTS
    lost = ""
    next_s = time.monotonic() + INTERVAL_S
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
                except UnreachableError as error:
                    lost = f"{error}; trying again"
                next_s = time.monotonic() + INTERVAL_S


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Take single keys from the terminal: give a function that waits so many seconds for one.

    Ctrl-C is a key too, the one to quit: an exception could strike in the middle of drawing.
    """
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    woken_before = signal.set_wakeup_fd(wake)
    handler_before = signal.signal(signal.SIGINT, lambda *_: None)

    def key_within(seconds: float) -> str:
        readable, _, _ = select.select([descriptor, woken], [], [], seconds)
        if woken in readable:
            return QUIT_KEYS[0]
        return os.read(descriptor, 1).decode("ascii", "replace") if readable else ""

    try:
        tty.setcbreak(descriptor)
        yield key_within
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        signal.signal(signal.SIGINT, handler_before)
        signal.set_wakeup_fd(woken_before)
        os.close(woken)
        os.close(wake)
