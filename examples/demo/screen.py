"""Shows the demo in the terminal: a picture that changes where there is one, else some lines."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

PLAIN_INTERVAL_S = 5.0
BAR_WIDTH = 20
STEP_STYLE = "dark_orange3"


class Screen:
    """Writes to one console."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def step(self, text: str) -> None:
        """Say what happens now."""
        self.console.print(Text.assemble(("• ", STEP_STYLE), text), highlight=False)

    @contextmanager
    def progress(self, title: str) -> Iterator[Callable[[int, int], None]]:
        """Give a function to call with what is done and what there is to do in all."""
        plain = _rarely(self.console)
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
                plain(f"  {title}: {done:,} of {total:,}")

            yield report

    @contextmanager
    def live(self) -> Iterator[Callable[[str, RenderableType], None]]:
        """Give a function to call with each new state: a line, and a picture for a terminal."""
        if not self.console.is_terminal:
            plain = _rarely(self.console)
            yield lambda line, _picture: plain(line)
            return
        with Live(console=self.console, transient=True, auto_refresh=False) as live:
            yield lambda _line, picture: live.update(picture, refresh=True)


def _rarely(console: Console) -> Callable[[str], None]:
    """Return what prints a line where no terminal shows a picture, and not too often."""
    next_s = 0.0

    def say(line: str) -> None:
        nonlocal next_s
        now_s = time.monotonic()
        if not console.is_terminal and now_s >= next_s:
            next_s = now_s + PLAIN_INTERVAL_S
            console.print(line, highlight=False, soft_wrap=True)

    return say
