"""Says which lines the log has, and writes them in a thread: who logs never waits and never fails.

Standard error may be a pipe that nobody drains, which blocks its writer, or a file on a full disk,
which raises.
"""

import logging
import os
import select
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOBase
from queue import SimpleQueue
from typing import Any, Final

from structlog import DropEvent, get_logger
from structlog.typing import Processor

LEVELS: Final = ("debug", "info", "warning", "error")
"""Of each, the lines of those behind it are written as well."""

MAX_WAITING_BYTES = 4 * 1024 * 1024
"""Of lines that wait to be written: some 20,000."""

WRITE_LIMIT_S = 1.0
"""For which the end of a process waits for its last lines, while none is written."""

MOST_WAITS = 5
"""Of so long, where lines are written all the time, but slowly."""

_log = get_logger(__name__)


class LogLevelFilter:
    """The level in force."""

    def __init__(self) -> None:
        self.name = "info"
        self._unwanted: frozenset[str] = frozenset(("debug",))

    def set(self, name: str) -> None:
        """Write lines of one of LEVELS and above from now on. Raises ValueError for another."""
        if name not in LEVELS:
            raise ValueError(f"{name!r} is not one of {', '.join(LEVELS)}")
        self._unwanted = frozenset(LEVELS[: LEVELS.index(name)])
        self.name = name

    def process(self, _: Any, method: str, event: Any) -> Any:
        """Drop a line below the level: the first of structlog's processors."""
        if method in self._unwanted:
            raise DropEvent
        return event


class LogQueue(TextIOBase):
    """The lines of one process on their way to a descriptor: structlog's logger, and `sys.stderr`.

    A line that does not fit, or cannot be written, is dropped and counted. The thread begins with
    the first line, and in a forked process again; what waited at the fork is the parent's.
    """

    def __init__(self, fd: int, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._fd = fd
        self._max_waiting_bytes = max_waiting_bytes
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        # Both are reentrant: the garbage collector may log in the middle of a call.
        self._lock = threading.RLock()
        self._waiting: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self._waiting_bytes = 0
        self._thread: threading.Thread | None = None
        self._is_torn = False
        """Whether the latest line was written in part."""
        self._told = 0
        """How many of the dropped lines the log says."""
        self.dropped = 0
        """Lines that are not in the log."""

    def write(self, text: str, /) -> int:
        """Have a text written soon. It should end a line."""
        data = text.encode(errors="backslashreplace")
        with self._lock:
            if self._waiting_bytes >= self._max_waiting_bytes:
                self.dropped += 1
            else:
                self._waiting_bytes += len(data)
                self._waiting.put(data)
            if self._thread is None:
                self._start()
        return len(text)

    def line(self, text: str) -> None:
        """Have a line written soon."""
        self.write(f"{text}\n")

    debug = info = warning = error = critical = line

    def rendering(self, processors: Sequence[Processor]) -> Processor:
        """Return these in a row; a line for which one of them raises is dropped."""

        def render(logger: Any, method: str, event: Any) -> Any:
            try:
                for process in processors:
                    event = process(logger, method, event)
            except Exception:
                with self._lock:
                    self.dropped += 1
                raise DropEvent from None
            return event

        return render

    def wait_written(self, limit_s: float = WRITE_LIMIT_S) -> None:
        """Return when the lines so far are written or dropped, or none is written for so long."""
        if self._thread is None:
            return
        written = threading.Event()
        self._waiting.put(written)
        for _ in range(MOST_WAITS):
            before = self._waiting_bytes
            if written.wait(limit_s) or self._waiting_bytes == before:
                return

    def fileno(self) -> int:
        """Return the descriptor, for those who must write past the queue."""
        return self._fd

    def isatty(self) -> bool:
        """Return whether people read it as it is written."""
        return os.isatty(self._fd)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._write_on, name="log", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there is no room for a thread: perhaps with the next line
            self._thread = None

    def _write_on(self) -> None:
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            is_written = self._write_out(item)
            with self._lock:
                self._waiting_bytes -= len(item)
                self.dropped += not is_written
                untold = 0 if self._waiting_bytes else self.dropped - self._told
            if is_written and untold:
                self._told += untold
                with suppress(Exception):  # this thread has to go on
                    _log.warning("lines of the log were dropped", lines=untold)

    def _write_out(self, data: bytes) -> bool:
        """Return whether it was written; that may take for ever."""
        if self._is_torn:
            data = b"\n" + data
        written = 0
        try:
            while written < len(data):
                try:
                    written += os.write(self._fd, data[written:])
                except BlockingIOError:  # another process made it so, which shares it
                    select.select((), (self._fd,), ())
        except OSError:
            self._is_torn |= written > 0
            return False
        self._is_torn = False
        return True


class LibraryLog(logging.Handler):
    """Puts into the log what libraries say by Python's `logging`, in the same form."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        write = _log.error if record.levelno >= logging.ERROR else _log.warning
        try:
            write(record.getMessage(), logger=record.name, exc_info=record.exc_info)
        except Exception:  # its arguments do not fit its text
            self.handleError(record)


log_level: Final = LogLevelFilter()
log_queue: Final = LogQueue(
    os.open(os.devnull, os.O_WRONLY) if sys.__stderr__ is None else sys.__stderr__.fileno()
)
"""Of this process, as its log is."""
