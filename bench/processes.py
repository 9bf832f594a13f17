"""Child processes of a bench run: started with a place on the cores, stopped by their own pid."""

import os
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

STOP_TIMEOUT_S = 20.0
KILL_TIMEOUT_S = 5.0
LOG_TAIL_BYTES = 2000
READ_CHUNK_BYTES = 65536
NS_PER_S = 1e9
# Runs in the child before the command itself takes its place: ties it to the life of this process
# and to its cores. Not a preexec_fn, which is unsafe in a process with threads.
_TIED_EXEC = """
import ctypes, os, signal, sys
parent, cores, *command = sys.argv[1:]
pr_set_pdeathsig = 1
ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
if os.getppid() != int(parent):
    sys.exit("the bench is gone")
if cores:
    os.sched_setaffinity(0, map(int, cores.split(",")))
os.execv(command[0], command)
"""


class BenchError(Exception):
    """A figure could not be measured; the text says why."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Which cores the process under test and the load on both sides of it may use."""

    tested: frozenset[int]
    load: frozenset[int]

    @classmethod
    def split(cls) -> Self:
        """Give the first core to the process under test and the others to the load.

        With a single core both share it.
        """
        usable = sorted(os.sched_getaffinity(0))
        return cls(tested=frozenset(usable[:1]), load=frozenset(usable[1:] or usable))


@dataclass(slots=True)
class Child:
    """One child process with its output; leaving the context stops it and its descendants."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    _pending: bytearray = field(default_factory=bytearray)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def wait_line(self, wanted: Callable[[str], bool], timeout_s: float) -> str:
        """Return the next line on stdout that is wanted, skipping others.

        Raises:
            BenchError: the process ended or `timeout_s` went by; its log's end is in the text.

        """
        deadline = time.monotonic() + timeout_s
        stdout = self.process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while True:
                while (end := self._pending.find(b"\n")) >= 0:
                    line = self._pending[:end].decode(errors="replace").strip()
                    del self._pending[: end + 1]
                    if wanted(line):
                        return line
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    raise BenchError(
                        f"{self.name}: no answer in {timeout_s:.0f} s{self.log_tail()}"
                    )
                chunk = os.read(stdout.fileno(), READ_CHUNK_BYTES)
                if not chunk:
                    raise BenchError(f"{self.name} ended too early{self.log_tail()}")
                self._pending += chunk

    def send_line(self, line: str) -> None:
        """Write one line to the process's stdin."""
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(line.encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise BenchError(f"{self.name} ended too early{self.log_tail()}") from None

    def usage(self) -> tuple[float, float]:
        """Return for how long its threads ran, and could have run but did not, in seconds.

        Other sources count in ticks of 10 ms. Raises BenchError when it is gone.
        """
        try:
            threads = Path(f"/proc/{self.process.pid}/task").iterdir()
            times = [(each / "schedstat").read_text().split() for each in threads]
        except OSError:
            raise BenchError(f"{self.name} is gone{self.log_tail()}") from None
        ran_s, waited_s = (sum(int(each[place]) for each in times) / NS_PER_S for place in (0, 1))
        return ran_s, waited_s

    def stop(self) -> None:
        """Ask the process to end, then make it end; its descendants after it."""
        descendants = self._descendants()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(KILL_TIMEOUT_S)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        # psutil compares the start time too, so a reused pid is never hit.
        _, alive = psutil.wait_procs(descendants, KILL_TIMEOUT_S)
        for left in alive:
            left.kill()

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            return []

    def log_tail(self) -> str:
        """Give the end of the log as an appendix to an error's text; empty without a log."""
        text = self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return f"; end of its log:\n{text}" if text else ""


def start_child(
    name: str,
    command: Sequence[str],
    work_dir: Path,
    *,
    cores: frozenset[int] | None = None,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start a child in a session of its own; stdout is read by us, stderr goes to a log file.

    The session keeps Ctrl-C away from it, so that children stop in our order. When this process
    dies without a chance to stop it, the kernel ends it. The command begins with a full path.
    """
    log_path = work_dir / f"{name}.log"
    places = ",".join(map(str, sorted(cores or ())))
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _TIED_EXEC, str(os.getpid()), places, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
    return Child(name, process, log_path)


def python(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def listening_socket() -> socket.socket:
    """Open a loopback listener on a free port, to be handed to a child."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    listener.listen(socket.SOMAXCONN)
    return listener


def raise_file_limit() -> None:
    """Allow as many open files as the hard limit does; children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
