"""Log lines are written by a thread: nobody waits for that, and what is lost is counted."""

import fcntl
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from proxy.log_queue import LogQueue

LINES = 1000
LINE = "x" * 99
"""With its end 100 bytes."""

WAIT_S = 120
PIPE_BYTES = 4096


class Log:
    """A queue in front of a pipe, which is read only by `read`."""

    def __init__(self, max_waiting_bytes: int) -> None:
        self.source, self.sink = os.pipe()
        fcntl.fcntl(self.sink, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.queue = LogQueue(self.sink, max_waiting_bytes)

    def read(self, count: int) -> list[str]:
        """Return so many lines."""
        text = b""
        while text.count(b"\n") < count:
            text += os.read(self.source, 65536)
        return text.decode().splitlines()

    def close(self) -> None:
        """Have the thread, which may be writing, find nobody who reads."""
        os.close(self.source)
        self.queue.wait_written(WAIT_S)
        os.close(self.sink)


@pytest.fixture
def make() -> Iterator[Callable[[int], Log]]:
    made: list[Log] = []

    def make(max_waiting_bytes: int = 1 << 20) -> Log:
        made.append(Log(max_waiting_bytes))
        return made[-1]

    yield make
    for log in made:
        log.close()


def test_all_lines_in_their_order(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        queue = LogQueue(file.fileno())
        for number in range(LINES):
            queue.line(f"{number} ü \ud800")
        queue.wait_written(WAIT_S)
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == [f"{number} ü \\ud800" for number in range(LINES)]
    assert queue.dropped == 0


def test_a_pipe_that_nobody_drains(make: Callable[[int], Log]) -> None:
    log = make(100 * LINES)
    for _ in range(3 * LINES):
        log.queue.line(LINE)  # none waits
    log.queue.wait_written(0.0)
    kept = 3 * LINES - log.queue.dropped
    # What waits, and what was written meanwhile to the pipe.
    assert LINES <= kept <= LINES + PIPE_BYTES // 100 + 1
    with capture_logs() as logs:
        assert log.read(kept) == [LINE] * kept
        log.queue.wait_written(WAIT_S)
    assert [(line["event"], line["lines"]) for line in logs] == [
        ("lines of the log were dropped", 3 * LINES - kept)
    ]
    log.queue.line("after that")
    assert log.read(1) == ["after that"]


def test_a_line_longer_than_what_may_wait(make: Callable[[int], Log]) -> None:
    log = make(10)
    log.queue.line(LINE)
    assert log.read(1) == [LINE]


def test_a_full_disk() -> None:
    with Path("/dev/full").open("wb", buffering=0) as disk:
        queue = LogQueue(disk.fileno())
        for _ in range(LINES):
            queue.line(LINE)
        queue.wait_written(WAIT_S)
    assert queue.dropped == LINES


@contextmanager
def room_in_files(room_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond this, as on a disk that is almost full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_that_was_cut_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file, capture_logs() as logs:
        queue = LogQueue(file.fileno())
        with room_in_files(10):
            for _ in range(3):
                queue.line(LINE)
            queue.wait_written(WAIT_S)
        queue.line("there is room again")
        queue.wait_written(WAIT_S)
    assert path.read_text().splitlines() == [LINE[:10], "there is room again"]
    assert queue.dropped == logs[0]["lines"] == 3


def test_a_descriptor_that_does_not_block(make: Callable[[int], Log]) -> None:
    log = make(1 << 20)
    os.set_blocking(log.sink, False)
    for _ in range(LINES):
        log.queue.line(LINE)
    assert log.read(LINES) == [LINE] * LINES
    assert log.queue.dropped == 0


def test_a_fork_has_its_own_thread_and_what_waited_is_the_parents(
    make: Callable[[int], Log],
) -> None:
    log = make(1 << 20)
    count = 2 * PIPE_BYTES // 100
    for number in range(count):
        log.queue.line(f"{number} {LINE}")  # about half of them wait
    child = os.fork()
    if not child:
        log.queue.line("of the child")
        log.queue.wait_written(WAIT_S)
        os._exit(log.queue.dropped)
    lines = log.read(count + 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sorted(lines) == sorted(
        [*(f"{number} {LINE}" for number in range(count)), "of the child"]
    )


def test_what_cannot_be_rendered_is_dropped(make: Callable[[int], Log]) -> None:
    class Odd:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    log = make(1 << 20)
    render = log.queue.rendering([structlog.processors.JSONRenderer()])
    logger = structlog.wrap_logger(log.queue, processors=[render])
    logger.info("odd", about=Odd())
    logger.info("even")
    assert log.read(1) == ['{"event": "even"}']
    assert log.queue.dropped == 1


SCRIPT = """
import gc, logging, sys, threading, warnings
from proxy.cli import configure_logging
import structlog

class Odd:
    def __del__(self):
        raise ValueError("in a finalizer")

def fail():
    raise ValueError("in a thread")

configure_logging("json")
for number in range(1000):
    structlog.get_logger().info("of ours", number=number)
logging.getLogger("a.library").warning("of %s", "a library")
logging.getLogger("a.library").info("too quiet")
logging.getLogger("a.library").error("does not %d fit", "x")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("a.library").exception("caught")
warnings.warn("of some module")
Odd()
gc.collect()
thread = threading.Thread(target=fail)
thread.start()
thread.join()
sys.stderr.write("printed\\n")
raise ValueError("at the end")
"""


def test_all_that_is_said_is_in_the_log_also_when_the_process_ends_with_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    loaded = [json.loads(line) for line in lines if line.startswith("{")]
    assert "printed" in lines
    assert [line["number"] for line in loaded if line["event"] == "of ours"] == list(range(LINES))
    told = loaded[LINES:]
    assert [(line["level"], line["event"]) for line in told[:2]] == [
        ("warning", "of a library"),
        ("error", "caught"),
    ]
    assert {line["logger"] for line in told[:2]} == {"a.library"}
    assert "UserWarning: of some module" in told[2]["event"]
    last = [line["exception"].splitlines()[-1] for line in told[3:]]
    assert last == [
        f"ValueError: {where}" for where in ("in a finalizer", "in a thread", "at the end")
    ]


@pytest.mark.parametrize("sink", ["full pipe", "closed pipe", "full disk", "none"])
def test_no_end_hangs_or_fails_for_the_log(sink: str) -> None:
    """The exit code is that of the process; what it does not depend on is whether it is heard."""
    source, pipe = os.pipe()
    os.set_blocking(pipe, False)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 4096)
    os.set_blocking(pipe, True)
    if sink == "closed pipe":
        os.close(source)
    path = {"full disk": "/dev/full", "none": os.devnull}.get(sink)
    with open(pipe if path is None else path, "wb", buffering=0) as errors:  # noqa: PTH123
        script = SCRIPT if sink != "none" else f"import os; os.close(2)\n{SCRIPT}"
        done = subprocess.run(
            [sys.executable, "-c", script], stderr=errors, check=False, timeout=WAIT_S
        )
    assert done.returncode == 1
    if path is not None:
        os.close(pipe)
    if sink != "closed pipe":
        os.close(source)
