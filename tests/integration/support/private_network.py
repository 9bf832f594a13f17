"""A network of its own, with nothing but a loopback: what has fixed ports can run there."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

COMMAND_TIMEOUT_S = 120
STOP_TIMEOUT_S = 30
_HOLD = "ip link set lo up && echo up && exec sleep infinity"


class PrivateNetwork:
    """Runs programs in the network namespace of the process with this id."""

    def __init__(self, pid: int, stack: ExitStack) -> None:
        self._enter = [
            *("nsenter", "--target", str(pid), "--user", "--net"),
            "--preserve-credentials",
        ]
        self._stack = stack

    def run(self, *command: object, timeout_s: float = COMMAND_TIMEOUT_S) -> tuple[int, str]:
        """Run a program that ends; give its exit code, and all that it said."""
        done = subprocess.run(
            [*self._enter, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return done.returncode, done.stdout

    def start(
        self, log: Path, *command: object, cwd: Path, env: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a program that writes its output to a file; it ends with the network."""
        with log.open("w") as output:
            process = subprocess.Popen(
                [*self._enter, *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**os.environ, **(env or {})},
            )
        self._stack.callback(stop, process)
        return process


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a program in order, or at once where that takes long."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def private_network() -> Iterator[PrivateNetwork]:
    """Give a network; skip the test where the system allows none."""
    command = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", _HOLD]
    try:
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError:
        pytest.skip("unshare is missing: apt-get install util-linux")
    with holder, ExitStack() as stack:
        stack.callback(holder.kill)
        assert holder.stdout is not None
        if holder.stdout.readline() != b"up\n":
            pytest.skip("the system allows no network of its own (unshare --user --net)")
        yield PrivateNetwork(holder.pid, stack)
