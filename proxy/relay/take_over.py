"""How a process takes the place of another, in steps that the other can go back on.

The successor asks where the predecessor listens. When it could serve, it has it release what only
one can have: state and admin port. When it can serve, it has it stop. If it dies before, or gives
up, the connection between them ends, and the predecessor takes back what it had released. If it
hangs, the predecessor takes new connections back, and the rest when the successor ends.

Each proxy listens on a socket in Linux's abstract namespace that is named by its process id. The
kernel says which process listens there, and who connects. So nothing but a proxy is told to stop,
and by nobody but a process of the same user.
"""

import asyncio
import json
import os
import select
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from struct import Struct
from typing import Protocol

from structlog import get_logger

from metrics.clock import MS_PER_SECOND
from proxy.cluster.upstream import Address
from proxy.errors import ProxyError
from proxy.relay.ports import ReusePortSockets
from proxy.tasks import end_tasks

TAKE_OVER_SCHEMA = 2
"""Of the answer to a successor, and of the words that follow; others are not understood."""

RELEASE, STOP = "release", "stop"
"""The words of a successor; behind the first one, in how many seconds it says the second."""

RELEASED = "released"
"""The answer to RELEASE, once that is done."""

STOPPING, LATE = "stopping", "late"
"""The answers to STOP."""

RELEASE_TIMEOUT_S = 30.0
"""How long a successor waits for RELEASED. It goes on then: it may be given what it needs."""

SERVE_TIMEOUT_S = 120
"""From RELEASE to STOP. Opening the state gives up earlier by itself."""

MAX_WORD_BYTES = 64
"""More than a line of a successor takes."""

TAKE_OVER_TIMEOUT_S = 5.0
"""For the answer of a predecessor; one that is busy for longer does not serve either."""

MAX_TAKE_OVER_BYTES = 4 * 2**20
"""More than all 65535 ports take."""

TAKE_OVER_BACKLOG = 8

_CREDENTIALS = Struct("3i")  # Linux's ucred: process, user, group

_log = get_logger(__name__)


class TakeOverError(ProxyError):
    """A process cannot be replaced; it goes on as before."""


class Predecessor:
    """The running proxy that this process is to replace. It serves clients until `stop`.

    Raises TakeOverError when the process is no proxy that can be replaced now.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(TAKE_OVER_TIMEOUT_S)
        self._answers = self._sock.makefile("rb")
        try:
            self.sockets = self._ask()
            """How many sockets it has by where they listen; these ports may be shared with it."""
        except BaseException:
            self.close()
            raise

    def release(self, limit_s: int = SERVE_TIMEOUT_S) -> bool:
        """Have it release state and admin port, and wait; return False when it ends by itself.

        If it is not told to `stop` within `limit_s` after that it takes new connections back.
        """
        if not self._say(f"{RELEASE} {limit_s}"):
            return False
        answer = select.poll()
        answer.register(self._sock, select.POLLIN)
        if not answer.poll(RELEASE_TIMEOUT_S * MS_PER_SECOND):
            _log.warning("the proxy to be replaced has not released all", process=self.pid)
            return True
        with suppress(OSError):
            return bool(self._read_line())
        return False

    def stop(self) -> None:
        """Have it stop: this process can serve. Raises TakeOverError when that comes too late.

        A predecessor that has ended by itself, or hangs, does not serve either.
        """
        said = RELEASED  # which may have come late
        if self._say(STOP):
            with suppress(OSError):
                while said == RELEASED:
                    said = self._read_line().decode().rstrip()
        self.close()
        if said == LATE:
            raise TakeOverError(
                f"process {self.pid} serves again, as this one took too long to begin",
                "see in the log what took so long, then start it again",
            )

    def close(self) -> None:
        """End the connection; before `stop` that means that it is not replaced."""
        self._answers.close()
        self._sock.close()

    def _say(self, line: str) -> bool:
        try:
            self._sock.sendall(f"{line}\n".encode())
        except OSError:
            return False
        return True

    def _ask(self) -> Counter[Address]:
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
            form, rival, addresses = answer["form"], answer["replaced_by"], answer["addresses"]
            found = Counter((str(host), int(port)) for host, port in addresses)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TakeOverError(
                f"process {self.pid} does not answer: {error}",
                "if it does not serve any more, kill it and start without --take-over",
            ) from None
        if form != TAKE_OVER_SCHEMA:
            raise TakeOverError(
                f"process {self.pid} is of a version that this one cannot replace",
                "stop it, then start this one without --take-over",
            )
        if rival is not None:
            raise TakeOverError(
                f"process {self.pid} is being replaced by process {rival} now",
                "wait for that one, or end it: then the proxy can be replaced again",
            )
        return found

    def _read_line(self) -> bytes:
        line = self._answers.readline(MAX_TAKE_OVER_BYTES)
        if not line.endswith(b"\n"):
            raise ConnectionError("the connection ended")
        return line


class ReplaceableProxy(Protocol):
    """What a proxy does while it is replaced, and at its end."""

    tasks: Sequence[asyncio.Task[None]]
    """The work that goes on and does not end."""

    @property
    def ports(self) -> ReusePortSockets:
        """The ports that a successor shares. What connects is taken back from one that hangs."""

    async def release(self) -> None:
        """Close what only one process can have."""

    async def resume(self) -> None:
        """Open again what was released, as far as that works: the successor has ended."""

    async def stop(self) -> None:
        """Drain, then close everything."""


class TakeOverServer:
    """Lets one successor at a time take the place of this proxy; `stop` is set when it serves.

    If the successor dies before that, this proxy serves on, and the next one may come.
    """

    def __init__(self, proxy: ReplaceableProxy, stop: asyncio.Event) -> None:
        self._proxy, self._stop = proxy, stop
        self._successor: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Begin to listen; where that is not possible the log says so, and nothing else is lost."""
        try:
            self._server = await asyncio.start_unix_server(
                self._attend, _name(os.getpid()), limit=MAX_WORD_BYTES, backlog=TAKE_OVER_BACKLOG
            )
        except OSError as error:
            text = "this proxy cannot be replaced by run --take-over"
            _log.warning(text, error=str(error))

    async def close(self) -> None:
        """Be replaceable no more."""
        if self._server is not None:
            self._server.close()
        await end_tasks(self._tasks)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a process that wants to take over, and follow its words."""
        task = asyncio.current_task()
        assert task is not None
        pid, uid = _peer(writer.get_extra_info("socket"))
        if uid != os.geteuid() or len(self._tasks) >= TAKE_OVER_BACKLOG:
            writer.close()
            return
        self._tasks.add(task)
        try:
            if self._successor is not None:
                await _answer(writer, [], rival=self._successor)
                return
            self._successor = pid
            try:
                _log.info("to be replaced", by=pid)
                if await self._is_replaced(reader, writer, pid):
                    _log.info("replaced", by=pid)
                    self._stop.set()
                else:
                    text = "not replaced, serving on: the successor has given up"
                    _log.warning(text, successor=pid)
            except Exception as error:  # a defect of ours must not end the proxy
                _log.error("unexpected error while being replaced", exc_info=error)
            finally:
                self._successor = None
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _is_replaced(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int
    ) -> bool:
        """Return whether the successor serves; when it does not, all is as it was."""
        await _answer(writer, list(self._proxy.ports.addresses()), rival=None)
        word, _, limit_s = (await _next_word(reader)).partition(" ")
        await asyncio.sleep(0)  # who has died since it spoke needs nothing
        if word != RELEASE or not limit_s.isdecimal() or reader.at_eof():
            return False
        try:
            await self._proxy.release()
        except Exception as error:  # the successor finds out what it can have
            _log.error("not all released to the successor", exc_info=error)
        await _say(writer, RELEASED)
        try:
            async with asyncio.timeout(int(limit_s)):
                word = await _next_word(reader)
        except TimeoutError:
            self._proxy.ports.take_back()
            text = "the successor hangs: connections come here again, admin port and state when "
            _log.error(f"{text}it ends", successor=pid, fix=f"end process {pid}")
            await _say(writer, LATE)
            while await _next_word(reader):
                pass
        else:
            if word == STOP:
                await _say(writer, STOPPING)
                return True
        await self._proxy.resume()
        return False


async def _answer(
    writer: asyncio.StreamWriter, addresses: Sequence[Address], rival: int | None
) -> None:
    answer = {"form": TAKE_OVER_SCHEMA, "replaced_by": rival, "addresses": addresses}
    await _say(writer, json.dumps(answer))


async def _say(writer: asyncio.StreamWriter, line: str) -> None:
    with suppress(OSError):
        writer.write(f"{line}\n".encode())
        await writer.drain()


async def _next_word(reader: asyncio.StreamReader) -> str:
    """Return the next line, an empty one when the successor has gone or sends no lines."""
    with suppress(OSError, ValueError):  # too long
        line = await reader.readline()
        if line.endswith(b"\n"):
            return line[:-1].decode(errors="replace")
    return ""


def _name(pid: int) -> str:
    return f"\0quota-proxy/{pid}"


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Return process and user of who connected, or of who listens."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid
