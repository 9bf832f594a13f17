"""A process that makes workers: a copy of the supervisor from before it had threads and sockets.

A worker that is forked there begins in some milliseconds, as all its modules are loaded, and shares
their memory with the others.
"""

import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from struct import Struct
from typing import NoReturn

from proxy.log_queue import log_queue

MAKE_LIMIT_S = 10.0
"""For a new process."""

FDS_AT_ONCE = 200
"""Descriptors in one message; Linux takes 253."""

EXIT_CRASHED = 1

_PR_SET_PDEATHSIG = 1  # Linux's prctl; the os module has no name for it
_PID = Struct("!i")
_COUNT = Struct("!I")


class NurseryLostError(Exception):
    """No worker can be made any more."""


@dataclass(slots=True)
class Process:
    """A worker's process, as the supervisor has it."""

    pid: int
    handle: int
    """A pidfd; readable when the process has ended."""
    control: socket.socket
    state: socket.socket

    def kill(self) -> None:
        """End it at once."""
        try:
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        except ProcessLookupError:
            return

    def close(self) -> None:
        """Forget it; its channels are closed by those who have them."""
        os.close(self.handle)


WorkerMain = Callable[[socket.socket, socket.socket], int]
"""What a worker does, with its ends of the control channel and of that of the state; returns the
exit code."""


class Nursery:
    """The supervisor's side. Make it before there are threads, or anything open to be inherited."""

    def __init__(self, work: WorkerMain) -> None:
        gc.freeze()  # what is there now stays shared
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._sock.close()
            _leave(lambda: _make_on_demand(theirs, parent, work))
        theirs.close()
        self._sock.settimeout(MAKE_LIMIT_S)
        self.handle = os.pidfd_open(self.pid)
        """Readable when it has ended, and with it all workers."""

    def make(self) -> Process:
        """Make a process, which takes some milliseconds. Raises NurseryLostError."""
        control, its_control = socket.socketpair()
        state, its_state = socket.socketpair()
        try:
            socket.send_fds(self._sock, [b"m"], [its_control.fileno(), its_state.fileno()])
            answer, handles, _, _ = socket.recv_fds(self._sock, _PID.size, 1)
            if not answer:
                raise ConnectionError("it has ended")
        except OSError as error:
            control.close()
            state.close()
            raise NurseryLostError(f"no new worker: {error}") from None
        finally:
            its_control.close()
            its_state.close()
        return Process(_PID.unpack(answer)[0], handles[0], control, state)

    def close(self) -> None:
        """Make no more, and wait for its end, which is at once and ends all workers."""
        self._sock.close()
        os.close(self.handle)
        os.waitpid(self.pid, 0)


def send_sockets(channel: socket.socket, sockets: Sequence[socket.socket]) -> None:
    """Give a new worker its sockets, before anything else goes over its channel."""
    channel.sendall(_COUNT.pack(len(sockets)))
    fds = [sock.fileno() for sock in sockets]
    for start in range(0, len(fds), FDS_AT_ONCE):
        socket.send_fds(channel, [b"s"], fds[start : start + FDS_AT_ONCE])


def receive_sockets(channel: socket.socket) -> list[socket.socket]:
    """Take what `send_sockets` gives. Raises OSError."""
    head = channel.recv(_COUNT.size, socket.MSG_WAITALL)
    if len(head) < _COUNT.size:
        raise ConnectionError("the supervisor has ended")
    (count,) = _COUNT.unpack(head)
    fds: list[int] = []
    while len(fds) < count:
        said, more, _, _ = socket.recv_fds(channel, 1, FDS_AT_ONCE)
        if not said:
            raise ConnectionError("the supervisor has ended")
        fds += more
    return [socket.socket(fileno=fd) for fd in fds]


def _leave(work: Callable[[], int]) -> NoReturn:
    """End this process with its work, whatever else the one before had planned."""
    code = EXIT_CRASHED
    try:
        code = work()
    except BaseException:  # nobody is left to whom it could be raised
        sys.excepthook(*sys.exc_info())
    finally:
        log_queue.wait_written()
        os._exit(code)


def _make_on_demand(sock: socket.socket, supervisor: int, work: WorkerMain) -> int:
    """Fork when it is asked for, until the supervisor has gone; then all ends."""
    _end_with(supervisor)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor says what is to be done
    signal.signal(signal.SIGCHLD, _forget_ended)
    own = os.getpid()
    while True:
        said, fds, _, _ = socket.recv_fds(sock, 1, 2)
        if not said:
            return 0
        # Until there is a handle of a new one, it is not forgotten when it ends.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
        pid = os.fork()
        if pid == 0:
            sock.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))
            _end_with(own)
            control, state = (socket.socket(fileno=fd) for fd in fds)
            _leave(partial(work, control, state))
        for fd in fds:
            os.close(fd)
        handle = os.pidfd_open(pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))
        socket.send_fds(sock, [_PID.pack(pid)], [handle])
        os.close(handle)


def _forget_ended(_: int, __: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_with(parent: int) -> None:
    """Have the system kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(EXIT_CRASHED)
