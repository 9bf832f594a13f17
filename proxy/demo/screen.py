"""Shows the demo in the terminal: live where there is one, as plain lines where there is none."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from metrics.clock import MS_PER_SECOND
from proxy.demo.figures import LIMITED, UNLIMITED

MIB = 1024 * 1024

PLAIN_INTERVAL_S = 5.0
BAR_WIDTH = 20
SPARKS = "▁▂▃▄▅▆▇█"
WIDEST = 80

LIMITED_STYLE, UNLIMITED_STYLE, BOUND_STYLE, DIM_STYLE = "dark_orange3", "blue", "red3", "dim"


@dataclass(frozen=True, slots=True)
class View:
    """What the screen shows at one moment; rates in bytes per second."""

    elapsed_s: float
    rate_bytes: float
    """The query's rate, as the proxy's sensor measures it."""
    bound_bytes: float
    """0 while it is not known: the query has not fetched anything."""
    unlimited_rate_bytes: float
    throttle_s: float
    """Mean hold of the responses of the last second."""
    queued: int
    holds: int
    held_s: float
    batches: int
    rows: int
    total_rows: int
    longest_wait_ms: float
    """The longest that the client without quota has waited for records."""
    history: tuple[float, ...]
    """The query's rate, once a second up to now."""


class Screen:
    """Writes to one console."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def step(self, text: str) -> None:
        """Say what happens now."""
        self.console.print(Text.assemble(("• ", LIMITED_STYLE), text), highlight=False)

    @contextmanager
    def progress(self, title: str) -> Iterator[Callable[[int, int], None]]:
        """Give a function to call with what is done and what there is to do in all."""
        plain = _Rarely(self.console)
        bar = Progress(
            TextColumn("  {task.description}"),
            BarColumn(BAR_WIDTH),
            MofNCompleteColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        with bar:
            task = bar.add_task(title, total=None, visible=False)

            def report(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total, visible=True)
                plain.print(f"  {title}: {done:,} of {total:,}")

            yield report

    @contextmanager
    def live(self) -> Iterator[Callable[[View], None]]:
        """Give a function to call with each new view."""
        if not self.console.is_terminal:
            plain = _Rarely(self.console)
            yield lambda view: plain.print(plain_line(view))
            return
        with Live(console=self.console, transient=True, auto_refresh=False) as live:
            yield lambda view: live.update(panel(view), refresh=True)


class _Rarely:
    """Prints a line only where no terminal shows a live picture, and not too often."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = 0.0

    def print(self, line: str) -> None:
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s >= self._next_s:
            self._next_s = now_s + PLAIN_INTERVAL_S
            self._console.print(line, highlight=False, soft_wrap=True)


def plain_line(view: View) -> str:
    """Put the view into one line, for a log."""
    bound = f"{_rate(view.bound_bytes)} bound" if view.bound_bytes else "bound not in use yet"
    return (
        f"  {view.elapsed_s:5.0f} s  {LIMITED} {_rate(view.rate_bytes)} ({bound}), "
        f"throttle {view.throttle_s * MS_PER_SECOND:.0f} ms, delay queue {view.queued}, "
        f"rows {view.rows:,} of {view.total_rows:,} | "
        f"{UNLIMITED} {_rate(view.unlimited_rate_bytes)}"
    )


def panel(view: View) -> RenderableType:
    """Draw the view as a panel for the live display."""
    scale = max(view.bound_bytes, view.unlimited_rate_bytes, view.rate_bytes, 1.0)
    rates = _grid()
    rates.add_row(
        Text(LIMITED, LIMITED_STYLE),
        ProgressBar(scale, view.rate_bytes, BAR_WIDTH, complete_style=LIMITED_STYLE),
        _rate(view.rate_bytes),
        Text(f"bound {_rate(view.bound_bytes)}", BOUND_STYLE) if view.bound_bytes else "",
    )
    if view.bound_bytes:
        rates.add_row("", _mark(view.bound_bytes / scale), "", "")
    rates.add_row(
        Text(UNLIMITED, UNLIMITED_STYLE),
        ProgressBar(scale, view.unlimited_rate_bytes, BAR_WIDTH, complete_style=UNLIMITED_STYLE),
        _rate(view.unlimited_rate_bytes),
        Text(f"no quota, waits ≤ {view.longest_wait_ms:.0f} ms", DIM_STYLE),
    )
    facts = _grid()
    facts.add_row("throttle time", f"{view.throttle_s * MS_PER_SECOND:.0f} ms", _sparks(view))
    facts.add_row("delay queue", str(view.queued), "")
    facts.add_row("held so far", str(view.holds), f"responses, {view.held_s:.1f} s in total")
    facts.add_row(
        "rows",
        f"{view.rows:,}",
        f"of {view.total_rows:,}, batches: {view.batches}"
        if view.batches
        else Text("Spark starts, or is in its first batch", DIM_STYLE),
    )
    return Panel(
        Group(rates, "", facts),
        title="PySpark through Kafka Quota Proxy",
        subtitle=f"{view.elapsed_s:.0f} s",
        border_style=DIM_STYLE,
        padding=(1, 2),
        width=WIDEST,
    )


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "left"):
        grid.add_column(justify=justify, no_wrap=True)
    return grid


def _mark(share: float) -> Text:
    """Point at the place of the bound below the bar."""
    place = min(round(share * BAR_WIDTH), BAR_WIDTH) - 1
    return Text(" " * max(place, 0) + "▲", BOUND_STYLE)


def _sparks(view: View) -> Text:
    """Draw the latest rates as a line of small bars, in proportion to the highest."""
    shown = view.history[-BAR_WIDTH:]
    top = max((*shown, view.bound_bytes, 1.0))
    line = "".join(SPARKS[round(rate / top * (len(SPARKS) - 1))] for rate in shown)
    return Text(line, LIMITED_STYLE)


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / MIB:.2f} MiB/s"
