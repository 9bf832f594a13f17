"""`quota-proxy` as a process of its own, without the second and a half that its imports take: it is
forked from a server that has done them. What depends on how a process begins starts one anew.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from threading import Lock

_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["proxy.cli"])
_changing_environment = Lock()

Constants = Mapping[str, float]
NONE: Constants = {}


def environment() -> dict[str, str]:
    """Return the environment in which another Python finds the modules that this one has."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class ForkedCommand:
    """A command that runs; it has what is needed of a Popen."""

    def __init__(
        self, arguments: Sequence[str], output: int, errors: int, constants: Constants = NONE
    ) -> None:
        """Start it with these descriptors as its output and its errors.

        `constants` are other values of some of its modules' constants, by their whole names.
        """
        with _imports_of_this_process():
            forkserver.ensure_running()
        files = [Connection(os.dup(number), readable=False) for number in (output, errors)]
        self._process = _FORKING.Process(
            target=_run, args=(arguments, *files, constants), daemon=True
        )
        self._process.start()
        for file in files:
            file.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def wait(self, timeout_s: float | None = None) -> int:
        """Return its exit code when it has ended; raises TimeoutExpired."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("quota-proxy", timeout_s or 0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal unless it has ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


@contextmanager
def _imports_of_this_process() -> Iterator[None]:
    """Let a server that is started here import from the same places; one thread at a time."""
    with _changing_environment:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
        try:
            yield
        finally:
            os.environ.pop("PYTHONPATH")
            if before is not None:
                os.environ["PYTHONPATH"] = before


def _run(
    arguments: Sequence[str], output: Connection, errors: Connection, constants: Constants
) -> None:
    """Be the command, in the forked process."""
    from proxy.cli import main

    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        assert hasattr(sys.modules[module], constant), name
        setattr(sys.modules[module], constant, value)
    for file, standard in ((output, sys.stdout), (errors, sys.stderr)):
        os.dup2(file.fileno(), standard.fileno())
        file.close()
    sys.argv = ["quota-proxy", *arguments]
    sys.exit(main())
