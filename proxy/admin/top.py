"""`quota-proxy top`: the status of a running proxy, live in the terminal."""

import json
import os
import select
import signal
import ssl
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from proxy.admin.top_tables import CLIENTS, ORDERS, PIPELINES, QUERIES, VIEWS, order_of, screen

INTERVAL_S = 2.0
TIMEOUT_S = 5.0
LIMIT = 200  # how many clients are asked for
FRAME_LINES = 6  # of the view, that are not rows of its table
PLAIN_COLUMNS = 160  # how wide the view is where no terminal says so
QUIT_KEYS = ("q", "\x04")
HELP = "q quit  c clients  s Spark queries  p pipelines  h held  n name  r rate"

EXIT_DONE, EXIT_FAILED = 0, 1


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where a proxy's admin server is, and what it wants to see."""

    url: str
    """Such as `http://127.0.0.1:9644`."""
    tls: ssl.SSLContext | None = None
    """None: the system's authorities sign its certificate, and it wants none of ours."""
    token: str | None = field(default=None, repr=False)

    def open(self, path: str) -> AbstractContextManager[IO[bytes]]:
        """Ask for a path. Raises OSError, HTTPException, or ValueError for what is no URL."""
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError("it is not a URL such as http://127.0.0.1:9644")
        request = Request(f"{self.url.rstrip('/')}{path}")
        if self.token is not None:
            # Not where we are redirected to: it is for this server only.
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        # A proxy of the environment is for other hosts; this one is named by its own address.
        opener = build_opener(ProxyHandler({}), HTTPSHandler(context=self.tls))
        answer: AbstractContextManager[IO[bytes]] = opener.open(request, timeout=TIMEOUT_S)
        return answer


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
        text = f"{error}\n    fix: start the proxy, or give the address of admin.bind"
        errors = errors or Console(stderr=True)
        errors.print(text, markup=False, highlight=False, soft_wrap=True)
        return EXIT_FAILED
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
    """Return what `GET /v1/status` gives. Raises UnreachableError."""
    url = address.url
    try:
        with address.open(f"/v1/status?limit={LIMIT}") as reply:
            status = json.load(reply)
    except HTTPError as error:
        wants = "; it wants --token-file" if error.code == HTTPStatus.UNAUTHORIZED else ""
        raise UnreachableError(f"{url} answered {error.code} {error.reason}{wants}") from None
    except URLError as error:
        raise UnreachableError(f"{url} does not answer: {error.reason}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise UnreachableError(f"{url!r} does not answer as a proxy would: {error}") from None
    known = {"bounded", "unbounded", "followed", "pipelines", "throttling"}
    if not isinstance(status, dict) or not known <= status.keys():
        raise UnreachableError(f"{url} is not a quota proxy of this version")
    return status


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
