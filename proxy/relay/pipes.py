"""A bounded pool of kernel pipes, which `splice` needs between two sockets."""

import fcntl
import os
from contextlib import suppress
from typing import NamedTuple

from structlog import get_logger

PIPE_BYTES = 1 << 20
"""Asked for each pipe: the kernel's default limit for unprivileged users."""

MAX_PIPES = 128
"""Pipes open at once; flows that find none copy instead."""

_log = get_logger(__name__)


class Pipe(NamedTuple):
    """The two ends of an empty pipe, both non-blocking."""

    read_fd: int
    write_fd: int


class PipePool:
    """Lends out pipes and takes them back empty."""

    def __init__(self, max_pipes: int = MAX_PIPES) -> None:
        self._max_pipes = max_pipes
        self._idle: list[Pipe] = []
        self._open = 0
        self._warned = False

    @property
    def open_pipes(self) -> int:
        """How many pipes exist, lent or idle."""
        return self._open

    def take(self) -> Pipe | None:
        """Lend a pipe; None when the limit is reached or the system gives no more."""
        if self._idle:
            return self._idle.pop()
        if self._open >= self._max_pipes:
            return None
        try:
            pipe = Pipe(*os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            if not self._warned:
                self._warned = True
                _log.warning("no pipe for splice, copying instead", error=str(error))
            return None
        self._open += 1
        with suppress(OSError):  # over the user's share of pipe memory: the default works too
            fcntl.fcntl(pipe.write_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return pipe

    def give_back(self, pipe: Pipe, *, empty: bool) -> None:
        """Take a pipe back. One that still holds bytes can't be used again."""
        if empty:
            self._idle.append(pipe)
        else:
            self._close(pipe)

    def close(self) -> None:
        """Close the idle pipes."""
        while self._idle:
            self._close(self._idle.pop())

    def _close(self, pipe: Pipe) -> None:
        self._open -= 1
        os.close(pipe.read_fd)
        os.close(pipe.write_fd)
