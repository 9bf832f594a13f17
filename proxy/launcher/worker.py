"""One member of a host: its process as the launcher has it, and the work in that process.

Both sides send lines: the launcher a Directive, the member a WorkerEvent, FAILED with what it ends
of. Whose channel ends has lost the other one.
"""

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Any, NoReturn

import structlog
import uvloop
from structlog import get_logger

from proxy.errors import ProxyError
from proxy.garbage import spare_full_collections
from proxy.log_queue import log_queue
from proxy.member import SETTLED_S, Member
from proxy.tasks import wait_at_most

BEAT_INTERVAL_S, HANG_S = 2.0, 10.0
"""A member that has not said anything for HANG_S hangs, and is killed."""

MAX_LINE_BYTES = 64 * 1024

FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
"""Before the second restart in a row, and at most; the first one comes at once."""

LOOP_WINDOW_S, LOOP_CRASHES = 60.0, 5
"""More crashes than that in such a time are a crash loop."""

EXIT_DONE, EXIT_CRASHED, EXIT_LOST = 0, 1, 3

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The launcher says what is to be done on these."""

_PR_SET_PDEATHSIG = 1  # Linux's prctl; the os module has no name for it

_log = get_logger(__name__)


class Directive(StrEnum):
    """What a launcher has a member do."""

    ACCEPT = "accept"
    RELEASE = "release"
    """What only one process can have, for a successor."""
    RESUME = "resume"
    RELOAD = "reload"
    STOP = "stop"


class WorkerEvent(StrEnum):
    """What a member reports to its launcher."""

    BEAT = "beat"
    """Every BEAT_INTERVAL_S, while its event loop runs."""
    READY = "ready"
    """It could accept clients."""
    DONE = "done"
    """It has done what it was ordered to, which it may have been before it was ready."""
    FAILED = "failed"


class WorkerError(ProxyError):
    """A member cannot begin, or does not do what it is told."""


class RestartPolicy:
    """When a worker that has crashed is started again. Times are of a monotonic clock."""

    def __init__(self) -> None:
        self._crashes: deque[float] = deque(maxlen=LOOP_CRASHES + 1)
        self._in_a_row = 0
        self.started_s = 0.0
        """Since when it serves."""
        self.count = 0
        """How often it was started again."""
        self.is_looping = False
        """Whether it crashes again and again, as of its last crash."""

    def crashed(self, now_s: float) -> float:
        """Record that it has ended by itself; return after how many seconds to start it again."""
        if now_s - self.started_s >= SETTLED_S:
            self._in_a_row = 0
            if self.is_looping and self.started_s > self._crashes[-1]:
                self.is_looping = False
                self._crashes.clear()
        self._crashes.append(now_s)
        self.count += 1
        if len(self._crashes) > LOOP_CRASHES and now_s - self._crashes[0] <= LOOP_WINDOW_S:
            self.is_looping = True
        delay_s = min(FIRST_DELAY_S * 2 ** (self._in_a_row - 1), MAX_DELAY_S)
        self._in_a_row += 1
        return delay_s if self._in_a_row > 1 else 0.0


class WorkerHandle:
    """One member. All but `fork` is for the launcher's event loop."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.restarts = RestartPolicy()
        self.serves = False
        """Whether it was told to accept clients."""
        self.pid: int | None = None
        self.ended = asyncio.Event()
        """Set while there is no process."""
        self.ended.set()
        self.heard_s = 0.0
        """When it said something last, in the loop's time."""
        self._loop = asyncio.get_running_loop()
        self._failure: str | None = None
        self._is_ready = asyncio.Event()
        self._is_done = asyncio.Event()
        self.channel: socket.socket | None = None
        """The launcher's end."""
        self._writer: asyncio.StreamWriter | None = None
        self._following: asyncio.Task[None] | None = None

    async def fork(
        self, work: Callable[[socket.socket], int], not_its: Iterable[socket.socket]
    ) -> None:
        """Start a process that does this work, with its end of the channel.

        What is `not_its` own of our sockets is closed there: a port is free when its member ends.
        Raises WorkerError where the system has no room for another process.
        """
        try:
            self.pid, self.channel = _fork(work, not_its)
        except OSError as error:
            text = f"worker {self.number} cannot be forked: {error.strerror or error}"
            raise WorkerError(text) from error
        self._failure, self.heard_s = None, self._loop.time()
        for event in (self.ended, self._is_ready, self._is_done):
            event.clear()
        reader, self._writer = await asyncio.open_connection(
            sock=self.channel, limit=MAX_LINE_BYTES
        )
        self._following = asyncio.create_task(self._follow(reader, self._writer))

    async def until_ready(self, limit_s: float) -> None:
        """Return when it could accept clients. Raises WorkerError."""
        await self._until(self._is_ready, "begin", limit_s)

    async def do(self, order: Directive, limit_s: float) -> None:
        """Have it do something, and return when that is done. Raises WorkerError."""
        self._is_done.clear()
        self.send(order)
        await self._until(self._is_done, order, limit_s)

    def send(self, order: Directive) -> None:
        """Send it an order, if it is there."""
        if self._writer is not None:
            self._writer.write(f"{order}\n".encode())

    def kill(self) -> None:
        """End its process at once; `ended` is set a moment later."""
        if self.pid is not None:  # which no other process has as long as it is not waited for
            os.kill(self.pid, signal.SIGKILL)

    def heard(self) -> None:
        """Take it for one that has said something just now."""
        self.heard_s = self._loop.time()

    def hangs(self) -> bool:
        """Return whether its event loop stands still."""
        return self.pid is not None and self._loop.time() - self.heard_s > HANG_S

    async def _until(self, event: asyncio.Event, what: str, limit_s: float) -> None:
        if not self.ended.is_set():  # which sets the event, too
            await wait_at_most(limit_s, event.wait())
        if self.ended.is_set():
            raise WorkerError(self._failure or f"worker {self.number} has ended; see the log")
        if not event.is_set():
            raise WorkerError(f"worker {self.number} did not {what} within {limit_s:g} s")

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take what it reports until its channel ends, which it does with the process."""
        with suppress(OSError, ValueError):  # it had not read all; it sends no lines
            while line := await reader.readline():
                self.heard()
                word, _, rest = line.decode().rstrip().partition(" ")
                if word == WorkerEvent.READY:
                    self._is_ready.set()
                elif word == WorkerEvent.DONE:
                    self._is_done.set()
                elif word == WorkerEvent.FAILED:
                    self._failure = str(json.loads(rest))
        writer.close()
        self.kill()  # most often it has ended
        assert self.pid is not None
        os.waitpid(self.pid, 0)  # noqa: ASYNC222 - that takes no time now
        self.serves = False
        self.pid = self.channel = self._writer = self._following = None
        for event in (self.ended, self._is_ready, self._is_done):
            event.set()


def _fork(
    work: Callable[[socket.socket], int], not_its: Iterable[socket.socket]
) -> tuple[int, socket.socket]:
    """Start a process, see WorkerHandle; return it and our end of the channel. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        parent = os.getpid()
        # A signal that arrives in between would be the launcher's, and told to both.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for number in SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                for sock in (ours, *not_its):
                    sock.close()
                _end_with(parent)
                _leave(lambda: work(theirs.dup()))  # the channel ends with the process, not before
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return pid, ours


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


def _end_with(parent: int) -> None:
    """Have the system kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(EXIT_LOST)


def run_worker(number: int, make: Callable[[], Member], channel: socket.socket) -> int:
    """Run the member that `make` makes until the launcher stops it; return the exit code."""
    # In place: loggers that were used before have this list.
    structlog.get_config()["processors"].insert(0, partial(_add_worker, number))
    return uvloop.run(_run(make, channel))


async def _run(make: Callable[[], Member], channel: socket.socket) -> int:
    reader, writer = await asyncio.open_connection(sock=channel)

    def send(line: str) -> None:
        writer.write(f"{line}\n".encode())

    async def beat() -> None:
        while True:
            send(WorkerEvent.BEAT)
            await asyncio.sleep(BEAT_INTERVAL_S)

    beating = asyncio.create_task(beat())
    try:
        member = make()
        await member.start()
        send(WorkerEvent.READY)
        return await _obey(member, reader, send)
    except (ProxyError, OSError) as error:
        send(f"{WorkerEvent.FAILED} {json.dumps(str(error))}")
        await writer.drain()
        return EXIT_CRASHED
    finally:
        beating.cancel()


async def _obey(member: Member, reader: asyncio.StreamReader, send: Callable[[str], None]) -> int:
    """Do what the launcher orders; end when work has ended that should not have."""
    while True:
        reading = asyncio.create_task(reader.readline())
        await asyncio.wait((reading, *member.tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in member.tasks:
            if task.done():
                return _explain(task)
        match reading.result().decode().rstrip():
            case "":
                _log.error("the launcher has ended, so this member ends")
                log_queue.wait_written()
                os._exit(EXIT_LOST)  # its ports must be free
            case Directive.ACCEPT:
                spare_full_collections()
                member.accept()
            case Directive.RELOAD:
                member.reload()
            case Directive.RELEASE:
                await member.release()
                send(WorkerEvent.DONE)
            case Directive.RESUME:
                await member.resume()
                send(WorkerEvent.DONE)
            case Directive.STOP:
                await member.stop()
                return EXIT_DONE


def _explain(task: asyncio.Task[None]) -> int:
    """Log why the member ends; the launcher starts another one."""
    error = None if task.cancelled() else task.exception()
    if isinstance(error, ProxyError):
        _log.error("this member ends", error=str(error))
    else:
        _log.error("unexpected end of work", work=task.get_name(), exc_info=error)
    return EXIT_CRASHED


def _add_worker(
    number: int, _: Any, __: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Have each line of the log say which worker writes it."""
    event["worker"] = number
    return event
