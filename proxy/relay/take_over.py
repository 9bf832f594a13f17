"""How a process takes the place of another: it proves which, asks what it has, has it stop.

Each proxy listens on a socket in Linux's abstract namespace that is named by its process id. The
kernel says which process listens there, and who connects. So nothing but a proxy is told to stop,
and by nobody but a process of the same user; and a proxy sees when its successor has died.
"""

import asyncio
import json
import os
import socket
from collections.abc import Callable, Collection, Iterable
from struct import Struct

from structlog import get_logger

from proxy.cluster.upstream import Address

FORM = 1
"""Of the answer to a successor."""

STOP = b"stop\n"

ANSWER_TIMEOUT_S = 5.0
"""For the answer of a predecessor; one that is busy for longer does not serve either."""

MAX_ANSWER_BYTES = 4 * 2**20
"""More than all 65535 ports take."""

READ_BYTES = 64 * 2**10
BACKLOG = 8

_CREDENTIALS = Struct("3i")  # Linux's ucred: process, user, group

_log = get_logger(__name__)


class TakeOverError(Exception):
    """A process cannot be replaced; it goes on as before."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}\n    fix: {fix}")


class Predecessor:
    """The running proxy that this process is to replace. It serves on until `stop`.

    Raises TakeOverError when the process is no proxy that can be replaced now.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(ANSWER_TIMEOUT_S)
        try:
            self.addresses = self._ask()
            """Where it listens; these ports may be shared with it."""
        except BaseException:
            self._sock.close()
            raise

    def stop(self) -> bool:
        """Have it stop; return False when it has ended already."""
        try:
            self._sock.sendall(STOP)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """End the connection; before `stop` that means that it is not replaced."""
        self._sock.close()

    def _ask(self) -> frozenset[Address]:
        try:
            self._sock.connect(_name(self.pid))
            pid, uid = _peer(self._sock)
        except OSError:
            pid, uid = 0, os.geteuid()
        if pid != self.pid or uid != os.geteuid():
            raise TakeOverError(
                f"process {self.pid} is no `quota-proxy run` of this user that serves now",
                "give the process id of a proxy that has said `ready` and was not told to stop",
            )
        try:
            answer = json.loads(self._read_line())
            rival, addresses = answer["replaced_by"], answer["addresses"]
            found = frozenset((str(host), int(port)) for host, port in addresses)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TakeOverError(
                f"process {self.pid} does not answer: {error or type(error).__name__}",
                "if it does not serve any more, kill it and start without --take-over",
            ) from None
        if rival is not None:
            raise TakeOverError(
                f"process {self.pid} is being replaced by process {rival} now",
                "wait for that one, or end it: then the proxy can be replaced again",
            )
        return found

    def _read_line(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n"):
            part = self._sock.recv(READ_BYTES)
            line += part
            if not part or len(line) > MAX_ANSWER_BYTES:
                raise ConnectionError("the connection ended")
        return bytes(line)


class Replaceable:
    """Lets one successor at a time take this process's place. Make it inside an event loop.

    `addresses` returns where this proxy listens; `stop` is called when the successor has what it
    needs. If it dies before, this proxy serves on, and the next one may come.
    """

    def __init__(
        self, addresses: Callable[[], Iterable[Address]], stop: Callable[[], None]
    ) -> None:
        self._addresses = addresses
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._successor: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.setblocking(False)

    def open(self) -> None:
        """Begin to listen; where that is not possible the log says so, and nothing else is lost."""
        try:
            self._sock.bind(_name(os.getpid()))
            self._sock.listen(BACKLOG)
        except OSError as error:
            text = "this proxy cannot be replaced by run --take-over"
            _log.warning(text, error=str(error))
            return
        self._start(self._accept())

    async def close(self) -> None:
        """Be replaceable no more."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sock.close()

    def _start(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._sock)
            except OSError as error:
                _log.error("can't accept a successor", error=str(error))
                await asyncio.sleep(ANSWER_TIMEOUT_S)
                continue
            sock.setblocking(False)
            pid, uid = _peer(sock)
            if uid != os.geteuid() or len(self._tasks) > BACKLOG:
                sock.close()
            else:
                self._start(self._attend(sock, pid))

    async def _attend(self, sock: socket.socket, pid: int) -> None:
        """Answer a process that wants to take over, and wait for its word."""
        rival = self._successor
        if rival is None:
            self._successor = pid
            _log.info("to be replaced", by=pid)
        try:
            with sock:
                said = await self._word_of(sock, rival)
        finally:
            if rival is None:
                self._successor = None
        if rival is None and said == STOP:
            _log.info("replaced", by=pid)
            self._stop()
        elif rival is None:
            _log.warning("not replaced, serving on: the successor has given up", successor=pid)

    async def _word_of(self, sock: socket.socket, rival: int | None) -> bytes:
        addresses = [] if rival is not None else list(self._addresses())
        answer = {"form": FORM, "replaced_by": rival, "addresses": addresses}
        try:
            await self._loop.sock_sendall(sock, json.dumps(answer).encode() + b"\n")
            word = b"" if rival is not None else await self._loop.sock_recv(sock, len(STOP))
            # Whoever has died since then does not take over; of the living nothing more comes.
            return b"" if not word or _has_ended(sock) else word
        except OSError:
            return b""


def share(addresses: Collection[Address], wanted: Address) -> bool:
    """Return whether a port that is wanted is that of one of these addresses."""
    host, port = wanted
    return any(
        port == other_port and (host == other or not _ANY.isdisjoint((host, other)))
        for other, other_port in addresses
    )


_ANY = frozenset({"0.0.0.0", "::"})


def _name(pid: int) -> str:
    return f"\0quota-proxy/{pid}"


def _has_ended(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Return process and user of who connected, or of who listens."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid
