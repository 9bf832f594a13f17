"""A bounded pool of kernel pipes, which `splice` needs between two sockets.

A user other than root gets 64 MiB of pipes in all (fs.pipe-user-pages-soft), shared with every
other process of that user; a pipe beyond that is of 8 KiB, and cannot be made larger.
"""

import fcntl
import os
from typing import NamedTuple

from structlog import get_logger

PIPE_BYTES = 256 * 1024
"""Asked for each pipe: a larger one costs hardly less CPU time. See docs/decisions."""

MIN_PIPE_BYTES = 64 * 1024
"""A smaller one is not used: copying is as fast from 16 KiB down."""

MAX_PIPES = 128
"""Pipes open at once, half of what a user gets; flows that find none copy instead."""

TAKES_WITHOUT_TRYING = 256
"""Bodies that are copied after a pipe was refused: asking costs as much as copying 64 KiB."""

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
        self.open_pipes = 0
        """How many pipes exist, lent or idle."""
        self._takes_to_skip = 0
        self._is_warned = False

    def take(self) -> Pipe | None:
        """Lend a pipe; None when the limit is reached or the system gives no useful one."""
        if self._idle:
            return self._idle.pop()
        if self.open_pipes >= self._max_pipes:
            return None
        if self._takes_to_skip:
            self._takes_to_skip -= 1
            return None
        try:
            pipe = _open_pipe()
        except OSError as error:
            self._takes_to_skip = TAKES_WITHOUT_TRYING
            if not self._is_warned:
                self._is_warned = True
                _log.warning("no pipe for splice, copying instead", error=str(error))
            return None
        self.open_pipes += 1
        return pipe

    def give_back(self, pipe: Pipe, *, empty: bool) -> None:
        """Return a pipe to the pool. One that still holds bytes can't be used again."""
        if empty:
            self._idle.append(pipe)
        else:
            self._close(pipe)

    def close(self) -> None:
        """Close the idle pipes."""
        while self._idle:
            self._close(self._idle.pop())

    def _close(self, pipe: Pipe) -> None:
        self.open_pipes -= 1
        os.close(pipe.read_fd)
        os.close(pipe.write_fd)


def _open_pipe() -> Pipe:
    """Open a pipe. Raises OSError: no descriptors left, or too little pipe memory."""
    pipe = Pipe(*os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
    try:
        fcntl.fcntl(pipe.write_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:  # over the user's share of pipe memory: what it has may do
        if fcntl.fcntl(pipe.write_fd, fcntl.F_GETPIPE_SZ) < MIN_PIPE_BYTES:
            os.close(pipe.read_fd)
            os.close(pipe.write_fd)
            raise
    return pipe
