"""Child processes of the demo: Python modules, each with a log that others read while it grows."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from examples.demo import DemoError
from examples.devkit.process import ServerProcess

T = TypeVar("T")

POLL_S = 0.1
"""Between two looks at what a child has printed: nobody tells when a file has grown."""
STOP_TIMEOUT_S = 5.0


class Child:
    """A module that runs as a process of its own; a context manager that ends it.

    The process ends with this one in any case, and Ctrl-C in the terminal does not reach it: the
    demo ends its children in its own order.
    """

    def __init__(self, title: str, module: str, arguments: Sequence[str], out_dir: Path) -> None:
        """Start the module; its log is `title`.log in `out_dir`."""
        self.title = title
        self.log = out_dir / f"{title}.log"
        """What it prints: errors, and figures as JSON objects, one a line."""
        self.log.unlink(missing_ok=True)
        self._process = ServerProcess(self.log)
        self._process.spawn([sys.executable, "-m", module, *arguments])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        self._process.kill()

    @property
    def exit_code(self) -> int | None:
        """What the process ended with, None while it runs."""
        return self._process.exit_status

    def require_running(self) -> None:
        """Raise `DemoError` with the end of the log when the process has ended."""
        if self.exit_code is not None:
            raise self.failure(f"The {self.title} ended by itself (exit code {self.exit_code}).")

    def wait_for(self, find: Callable[[], T | None], what: str, timeout_s: float) -> T:
        """Call `find` until it gives something, and return that.

        Raises `DemoError` when the process ends before or `timeout_s` goes by.
        """
        deadline_s = time.monotonic() + timeout_s
        while (found := find()) is None:
            self.require_running()
            if time.monotonic() > deadline_s:
                raise self.failure(f"The {self.title} has not {what} after {timeout_s:g} s.")
            time.sleep(POLL_S)
        return found

    def await_end(self, timeout_s: float) -> None:
        """Return when the process has ended; raise `DemoError` when it has not in `timeout_s`."""
        if not self._process.wait(timeout_s):
            raise self.failure(f"The {self.title} has not ended after {timeout_s:g} s.")

    def lines(self) -> list[str]:
        """Give what it has printed, without a last line that is not whole yet."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return text[: text.rfind("\n") + 1].splitlines()

    def objects(self) -> list[dict[str, Any]]:
        """Give the JSON objects that it has printed."""
        return [json.loads(line) for line in self.lines() if line.startswith('{"')]

    def said(self) -> dict[str, Any]:
        """Give the figures that it has printed, the latest of each name."""
        return {name: value for line in self.objects() for name, value in line.items()}

    def failure(self, what: str) -> DemoError:
        """Make the error that says `what`, shows the end of the log and leads to all of it."""
        return DemoError(
            f"{what} Its log ends with:\n{self._process.log_tail()}", f"Read {self.log}."
        )
