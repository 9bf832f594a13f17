"""Calls between a supervisor and a worker, both ways over one socket pair.

A frame is a length of 4 bytes and a JSON document: a call, which has a number and is answered, a
notice, which is not, or an answer.
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from struct import Struct
from typing import Any

from structlog import get_logger

CALL_LENGTH = Struct("!I")

MAX_CALL_BYTES = 256 * 2**20
"""More than the configuration with the most rules, or all that a state has, takes."""

MAX_UNSENT_CALL_BYTES = MAX_CALL_BYTES
"""What may wait until the other side reads; one that does not read is lost."""

MAX_HANDLED = 1_000
"""Calls of the other side that may be under way."""

Handler = Callable[..., Awaitable[Any] | Any]
"""Gets the parameters of a call; what it returns, or awaits, is the answer, as JSON has it."""

_log = get_logger(__name__)


class ChannelLostError(Exception):
    """The other process has ended, or does not speak any more."""


class CallFailedError(Exception):
    """The other process could not do what it was asked for; its words."""


class ControlChannel:
    """One end. `run` it; `handlers` answer what the other end calls, by the names of methods.

    The socket belongs to the channel. What a handler raises goes to the other end as text.
    """

    def __init__(self, sock: socket.socket, handlers: Mapping[str, Handler]) -> None:
        self._sock = sock
        self._handlers = handlers
        self._writer: asyncio.StreamWriter | None = None
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._next = 1
        self._is_lost = False

    async def open(self) -> None:
        """Begin to use the socket; calls can be made from now on, and are answered in `run`."""
        self._sock.setblocking(False)
        self._reader, self._writer = await asyncio.open_unix_connection(
            sock=self._sock, limit=2**20
        )

    async def run(self) -> None:
        """Take what comes, until the other end is lost. Only after `open`."""
        try:
            while True:
                (length,) = CALL_LENGTH.unpack(await self._reader.readexactly(CALL_LENGTH.size))
                if length > MAX_CALL_BYTES:
                    raise ConnectionError(f"a frame of {length} bytes")
                self._take(json.loads(await self._reader.readexactly(length)))
        except (OSError, EOFError, ValueError, KeyError) as error:
            if not isinstance(error, (asyncio.IncompleteReadError, ConnectionError)):
                _log.error("unexpected error on a control channel", exc_info=error)
        finally:
            self.close()

    async def call(self, method: str, limit_s: float | None, **params: Any) -> Any:
        """Have the other end do something; return its answer.

        Raises CallFailedError, ChannelLostError, and TimeoutError after `limit_s`; without one the
        other end must be watched in another way.
        """
        number, self._next = self._next, self._next + 1
        answer = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._send({"call": method, "number": number, "params": params})
            async with asyncio.timeout(limit_s):
                return await answer
        finally:
            self._answers.pop(number, None)

    def notify(self, method: str, **params: Any) -> None:
        """Send the other end a notice; one that is lost is not told."""
        if not self._is_lost:
            self._send({"call": method, "params": params})

    def close(self) -> None:
        """Use the socket no more; who waits for an answer gets ChannelLostError."""
        if self._is_lost:
            return
        self._is_lost = True
        if self._writer is not None:
            self._writer.transport.abort()
        else:
            self._sock.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ChannelLostError("the other process has ended"))
        for task in self._tasks:
            task.cancel()

    def _send(self, document: Mapping[str, Any]) -> None:
        """Send a frame. Raises ChannelLostError."""
        writer = self._writer
        if self._is_lost or writer is None:
            raise ChannelLostError("the other process has ended")
        body = json.dumps(document, separators=(",", ":")).encode()
        if writer.transport.get_write_buffer_size() > MAX_UNSENT_CALL_BYTES:
            self.close()
            raise ChannelLostError("the other process does not read")
        writer.write(CALL_LENGTH.pack(len(body)) + body)

    def _take(self, document: Mapping[str, Any]) -> None:
        if "call" not in document:
            answer = self._answers.get(document["answer"])
            if answer is None or answer.done():
                return
            if "error" in document:
                answer.set_exception(CallFailedError(document["error"]))
            else:
                answer.set_result(document["result"])
            return
        if len(self._tasks) >= MAX_HANDLED:
            raise ConnectionError("too many calls at once")
        method, number = document["call"], document.get("number")
        task = asyncio.create_task(self._handle(method, number, document["params"]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, method: str, number: int | None, params: Mapping[str, Any]) -> None:
        said: dict[str, Any]
        try:
            result = self._handlers[method](**params)
            said = {"result": await result if isinstance(result, Awaitable) else result}
        except Exception as error:  # the other end is told, and says it where it belongs
            said = {"error": str(error) or type(error).__name__}
            if number is None:
                _log.error("unexpected error after a notice", method=method, exc_info=error)
        if number is not None and not self._is_lost:
            self._send({"answer": number, **said})
