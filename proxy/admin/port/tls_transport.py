"""A TLS connection to the admin port, for the server of HTTP: addresses take turns to be read from.

That of uvloop reads all that has come in one go, which may be a thousand key updates.
"""

import asyncio
from contextlib import suppress
from typing import Any

from proxy.cluster.tls_socket import TlsSocket
from proxy.relay.channel import BLOCKED, Channel, ChannelLost
from proxy.relay.paced_steps import PacedSteps

MOST_READ_BYTES = 16 << 10  # in one step
MOST_PILED_BYTES = 64 << 10
"""Beyond it the server of HTTP is to pause."""

_scratch = memoryview(bytearray(MOST_READ_BYTES))


class TlsTransport(asyncio.Transport):
    """Reads a socket whose handshake is done by paced steps, and sends what the client takes."""

    def __init__(
        self, sock: TlsSocket, protocol: asyncio.Protocol, steps: PacedSteps, address: str
    ) -> None:
        extra = {"peername": sock.getpeername(), "sslcontext": sock.tls.context, "socket": sock}
        super().__init__(extra)
        self._loop = asyncio.get_running_loop()
        self._sock, self._channel = sock, Channel(sock)
        self._protocol, self._steps, self._address = protocol, steps, address
        self._unsent = bytearray()
        self._is_closing = self._is_over = False
        self._reads, self._is_full = True, False
        """Whether the protocol wants to read, and whether it was told to pause."""
        protocol.connection_made(self)
        self._steps.queue(self._read, address)  # what came with the end of the handshake, as well

    def write(self, data: Any) -> None:  # noqa: D102
        is_blocked = bool(self._unsent)
        if not self._is_closing:
            self._unsent += data
            if not is_blocked:
                self._send()
            if not self._is_full and len(self._unsent) > MOST_PILED_BYTES:
                self._is_full = True
                self._protocol.pause_writing()

    def is_closing(self) -> bool:  # noqa: D102
        return self._is_closing

    def pause_reading(self) -> None:  # noqa: D102
        self._reads = False

    def resume_reading(self) -> None:  # noqa: D102
        if not self._reads:
            self._reads = True
            self._wait_to_read()

    def close(self) -> None:
        """Close once everything is sent."""
        if not self._is_closing:
            self._is_closing = True
            self._loop.remove_reader(self._channel.fd)
            if not self._unsent:
                self.abort()

    def abort(self, error: Exception | None = None) -> None:
        """Close at once, but for the protocol in the next round of the loop, as asyncio does."""
        self._is_closing, self._unsent = True, bytearray()
        self._loop.call_soon(self._end, error)

    def _wait_to_read(self) -> None:
        if self._reads and not self._is_closing:
            if self._channel.buffered_bytes():
                self._steps.queue(self._read, self._address)
            else:
                self._loop.add_reader(self._channel.fd, self._readable)

    def _readable(self) -> None:
        self._loop.remove_reader(self._channel.fd)
        self._steps.add(self._read, self._address)

    def _read(self) -> None:
        if not self._reads or self._is_closing:
            return
        try:
            count = self._channel.recv_into(_scratch)
        except ChannelLost as error:
            self.abort(error)
            return
        if count == BLOCKED:
            self._loop.add_reader(self._channel.fd, self._readable)
        elif count:
            try:
                self._protocol.data_received(bytes(_scratch[:count]))
            except Exception as error:  # a step must not raise
                self._loop.call_exception_handler({"message": "no HTTP", "exception": error})
                self.abort(error)
            self._wait_to_read()
        elif not self._protocol.eof_received():
            self.close()

    def _send(self) -> None:
        try:
            sent = self._channel.send(self._unsent)
        except ChannelLost as error:
            self.abort(error)
            return
        del self._unsent[: max(sent, 0)]
        if self._unsent:
            self._loop.add_writer(self._channel.fd, self._send)
            return
        self._loop.remove_writer(self._channel.fd)
        if self._is_full:
            self._is_full = False
            self._protocol.resume_writing()
        if self._is_closing:
            self.abort()

    def _end(self, error: Exception | None) -> None:
        if self._is_over:
            return
        self._is_closing = self._is_over = True
        self._loop.remove_reader(self._channel.fd)
        self._loop.remove_writer(self._channel.fd)
        with suppress(OSError):  # gone already
            self._sock.say_end()
        self._sock.close()
        self._protocol.connection_lost(error)
