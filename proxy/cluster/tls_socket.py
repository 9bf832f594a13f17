"""TLS over a socket, which takes no more from it in one call than can be read in milliseconds.

A TLS socket of Python's own reads on as long as there is something that is no data. Whoever sends
key updates (RFC 8446, 4.6.3) without end, of which each costs the reader 20 us, keeps it there.
"""

import errno
import os
import socket
import ssl
from contextlib import suppress
from typing import Any

MOST_TAKEN_BYTES, LEAST_TAKEN_BYTES = 32 << 10, 1 << 10
"""From the kernel in one call; the least from a peer that sends little but key updates. The most
has a whole record in it, wherever that begins."""

RECORD_BYTES = 17 << 10
"""So much may have come of a record before it is there as a whole."""

LEAST_DATA_SHARE = 4
"""One byte in so many is data, where small requests are sent in records of their own."""

MOST_WRITTEN_BYTES = 32 << 10
"""Encrypted at a time, and kept for a peer that does not read: two records."""

MOST_UNSENT_BYTES = 256 << 10
"""Answers to key updates, besides what is sent: a peer that does not take them is given up."""

_scratch = memoryview(bytearray(MOST_TAKEN_BYTES))


class TlsSocket(socket.socket):
    """A connected socket that does not block; it owns what `sock` was.

    As of an SSLSocket, `do_handshake`, `recv_into` and `send` raise SSLWantReadError,
    SSLWantWriteError and BlockingIOError; a blocked `send` is to be repeated with the same bytes.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        server_hostname: str | None,
    ) -> None:
        self._come, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._come, self._to_send, server_side, server_hostname)
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self.setblocking(False)
        self._read: Any = self.tls.read
        self._unsent = b""
        self._written = 0
        """Bytes that are encrypted, and not sent as a whole."""
        self._taken_bytes = self._data_bytes = 0

    def do_handshake(self) -> None:
        """Do the next steps of the handshake."""
        try:
            while True:
                try:
                    return self.tls.do_handshake()
                except ssl.SSLWantReadError:
                    if not self._flush():
                        raise ssl.SSLWantWriteError from None
                    self._take()
        finally:
            self._answer()

    def pending(self) -> int:
        """Return how many bytes have been taken from the kernel and not been read."""
        return self.tls.pending() + self._come.pending

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:  # noqa: ARG002
        """Fill the start of a buffer with data."""
        if is_taken := not (self._come.eof or self.pending()):
            self._take()
        try:
            count: int = self._read(nbytes or len(buffer), buffer)
        except ssl.SSLWantReadError:
            if is_taken:
                raise
            self._take()  # it was the start of a record
            count = self._read(nbytes or len(buffer), buffer)
        finally:
            if self._to_send.pending or self._unsent:
                self._answer()
        self._data_bytes += count
        if not count:
            self._come.write_eof()  # whoever asks again is told again, as by other sockets
        return count

    def send(self, data: Any, flags: int = 0) -> int:  # noqa: ARG002
        """Send the start of some data; return how many bytes."""
        view, sent = memoryview(data), 0
        while sent < len(view):
            if not self._written:
                self._written = self.tls.write(view[sent : sent + MOST_WRITTEN_BYTES])
            if not self._flush():
                if not sent:
                    raise ssl.SSLWantWriteError
                break
            sent += self._written
            self._written = 0
        return sent

    def _answer(self) -> None:
        """Send what TLS has to say, if the peer is there: what came before its end is read."""
        with suppress(ConnectionError):
            self._flush()

    def _take(self) -> None:
        """Have TLS read what has come."""
        is_data = self._data_bytes * LEAST_DATA_SHARE >= self._taken_bytes - RECORD_BYTES
        count = 0
        with suppress(ConnectionResetError):  # to OpenSSL it is an end, as any other
            count = super().recv_into(_scratch, MOST_TAKEN_BYTES if is_data else LEAST_TAKEN_BYTES)
        self._taken_bytes += count
        if self._taken_bytes >= 4 * RECORD_BYTES:
            self._taken_bytes, self._data_bytes = self._taken_bytes // 2, self._data_bytes // 2
        self._come.write(_scratch[:count])
        if not count:
            self._come.write_eof()

    def _flush(self) -> bool:
        """Send what TLS has to send; return whether that is all."""
        while data := self._unsent or self._to_send.read():
            try:
                self._unsent = data[super().send(data) :]
            except BlockingIOError:
                self._unsent = data
                if self._to_send.pending > MOST_UNSENT_BYTES:
                    raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS)) from None
                return False
        return True
