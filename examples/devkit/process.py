"""Runs a server as a child process that writes to a log file and ends with this process."""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_TAIL_LINES = 25
_TAIL_BYTES = 64 * 1024

# The server is started through these lines: they ask Linux to kill it when the thread that started
# it ends (prctl PR_SET_PDEATHSIG = 1; it holds across exec), and look if that has happened already.
_TIED_EXEC = (
    "import os, sys; parent, command = int(sys.argv[1]), sys.argv[2:]\n"
    "if sys.platform == 'linux':\n"
    "    import ctypes; ctypes.CDLL(None).prctl(1, 9)\n"
    "    if os.getppid() != parent: sys.exit('the parent is gone')\n"
    "os.execv(command[0], command)"
)


class ServerProcess:
    """One server, which may be started again when it has ended.

    The child ends with this object, and with this process however that ends (the latter on Linux).
    """

    def __init__(self, log_file: Path) -> None:
        self.log_file = log_file
        """What the server prints, all starts after one another."""
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | None = None
        # The kernel ties the child to the thread that starts it, not to the whole process. So that
        # a server started from a passing thread lives on, one thread of its own starts it.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="server-starter")

    @property
    def pid(self) -> int | None:
        """Process id while it runs, else None."""
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def exit_status(self) -> int | None:
        """How it ended (minus the signal's number after a signal); None while it did not."""
        return None if self._process is None else self._process.poll()

    def spawn(self, command: Sequence[str]) -> None:
        """Start the command, which begins with a path, as the child process; raises OSError."""
        with self.log_file.open("ab") as log:
            self._log_start = log.tell()
            self._process = self._starter.submit(
                subprocess.Popen,
                [sys.executable, "-I", "-S", "-c", _TIED_EXEC, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C in the terminal is for the parent, which stops it
            ).result()

    def stop(self, timeout_s: float = 15.0) -> None:
        """Ask it to end (SIGTERM), and kill it when it still runs after `timeout_s`."""
        if self._process is not None:
            self._process.terminate()
            if not self.wait(timeout_s):
                self.kill()

    def kill(self) -> None:
        """End it at once, as a crash does (SIGKILL)."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; return False when it still runs after `timeout_s`."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def log_tail(self) -> str:
        """Return the last lines that it printed since its latest start; raises OSError."""
        with self.log_file.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
