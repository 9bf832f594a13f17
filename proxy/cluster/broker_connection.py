"""One connection to a broker: requests of the proxy's own go out, their responses come back."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from struct import Struct
from typing import Any

from kafka.protocol.api_key import ApiKey

from .dial import run_when_ready
from .login import Login
from .upstream import CONNECTION_CLOSED, Address, UpstreamError

CLIENT_ID = "kafka-quota-proxy"
"""As which the brokers know the proxy itself."""

IDLE_S = 60.0
"""A connection on which nothing was asked for so long is closed; brokers would do so later."""

MAX_RESPONSE_BYTES, MAX_SHORT_BYTES, MAX_LOGIN_BYTES = 16 << 20, 1 << 20, 64 << 10
"""A longer one is none of Kafka's: we ask for far less. What it is decoded to takes 40 times as
much, and nothing ends the thread that decodes it."""

LONG_ANSWERED = frozenset(
    {
        *(ApiKey.Fetch, ApiKey.Metadata, ApiKey.OffsetFetch, ApiKey.DescribeClientQuotas),
        *(ApiKey.JoinGroup, ApiKey.SyncGroup, ApiKey.ListGroups, ApiKey.DescribeGroups),
    }
)
"""What these are answered may be long; all else has 1,000 rows at most, in some 300 KB."""

DECODED_HERE_BYTES = 16 * 1024
"""A longer response is decoded in a thread: Metadata of 10,000 partitions takes some 50 ms."""

_INT32 = Struct(">i")

_WANTS_LOGIN = (
    "; so does a listener that wants a login, which the proxy itself has not (cluster.sasl)"
)


class BrokerConnection:
    """Asks one request after the other; `sock` is non-blocking, connected, and TLS is done."""

    def __init__(self, sock: socket.socket, broker: Address) -> None:
        self.sock = sock
        self.broker = broker
        self.client_id = CLIENT_ID
        self._logs_in = False
        self._asked = 0
        self._idle: asyncio.TimerHandle | None = None
        """Closes the connection; None before the first answer to more than a login."""

    @property
    def is_open(self) -> bool:
        """Whether the next request may go out here. An end that the broker made is seen."""
        if self.sock.fileno() < 0:
            return False
        if self._idle is None:
            return True
        if self._idle.when() <= asyncio.get_running_loop().time():  # where the loop stood still
            return False
        try:
            # Of the base class: a TLS socket refuses to look ahead. Nothing is due to be read.
            socket.socket.recv(self.sock, 1, socket.MSG_PEEK)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    @property
    def login_may_be_over(self) -> bool:
        """Whether the broker may end the connection for its login's age (at the next request)."""
        return self._logs_in and self._idle is not None

    def close(self) -> None:
        """Close the connection; a second time does nothing."""
        if self._idle is not None:
            self._idle.cancel()
        self.sock.close()

    async def log_in(self, login: Login, limit_s: float) -> None:
        """Log the proxy in before anything is asked; raises as `ask`, and login_refused."""
        self._logs_in = True
        exchange = login.exchange(self.broker)
        answer: Any = None
        async with self._within(limit_s, "not logged in after"):
            # SCRAM computes for some milliseconds, or up to a second where the broker wants that.
            while (request := await asyncio.to_thread(exchange.send, answer)) is not None:
                answer = await self._ask(request, MAX_LOGIN_BYTES)

    async def ask(self, request: Any, limit_s: float, most_bytes: int | None = None) -> Any:
        """Send a request of kafka-python's, made with its version, and return its response.

        Whatever goes wrong, or cancels the caller, closes the connection.
        Raises UpstreamError: timeout, closed or bad_response.
        """
        if most_bytes is None:
            is_long = request.API_KEY in LONG_ANSWERED
            most_bytes = MAX_RESPONSE_BYTES if is_long else MAX_SHORT_BYTES
        async with self._within(limit_s, "no answer in"):
            response = await self._ask(request, most_bytes)
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self.close)
        return response

    @asynccontextmanager
    async def _within(self, limit_s: float, failing: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(limit_s):
                yield
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise self._failure("timeout", f"{failing} {limit_s:g} s") from None
            raise

    async def _ask(self, request: Any, most_bytes: int) -> Any:
        if self._idle is not None:
            self._idle.cancel()
        correlation_id = self._asked
        self._asked += 1
        request.with_header(correlation_id=correlation_id, client_id=self.client_id)
        frame = memoryview(request.encode(framed=True, header=True))
        try:
            while frame:
                sent_bytes = await run_when_ready(
                    self.sock, partial(self.sock.send, frame), write=True
                )
                frame = frame[sent_bytes:]
            (length,) = _INT32.unpack(await self._receive(_INT32.size))
            if not _INT32.size <= length <= most_bytes:
                text = "what answers is not Kafka, or wants TLS (cluster.tls)"
                raise self._failure("bad_response", f"a response of {length} bytes: {text}")
            response = await self._receive(length)
        except TimeoutError:
            raise
        except (EOFError, ConnectionError, ssl.SSLZeroReturnError, ssl.SSLEOFError):
            text = "the broker closed the connection" + ("" if self._logs_in else _WANTS_LOGIN)
            raise self._failure(CONNECTION_CLOSED, text) from None
        except OSError as error:
            raise self._failure(CONNECTION_CLOSED, str(error)) from None
        (received_id,) = _INT32.unpack_from(response)
        if received_id != correlation_id:
            text = f"correlation ids do not match: {correlation_id} sent, {received_id} received"
            raise self._failure("bad_response", text)
        kind = request.header.get_response_class()
        try:
            if length <= DECODED_HERE_BYTES:
                return kind.decode(response, header=True)
            decoding = asyncio.create_task(asyncio.to_thread(kind.decode, response, header=True))
            try:
                return await asyncio.shield(decoding)
            finally:  # out of time or not: who asks again begins no second one meanwhile
                await asyncio.gather(decoding, return_exceptions=True)
        except Exception as error:  # who knows what answers at that address
            text = f"no {kind.name}: {str(error) or type(error).__name__}"
            raise self._failure("bad_response", text) from error

    async def _receive(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            receive = partial(self.sock.recv_into, view)
            received_bytes = await run_when_ready(self.sock, receive, write=False)
            if not received_bytes:
                raise EOFError
            view = view[received_bytes:]
        return data

    def _failure(self, reason: str, text: str) -> UpstreamError:
        return UpstreamError(reason, f"{self.broker[0]}:{self.broker[1]}: {text}")
