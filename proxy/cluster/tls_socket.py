"""TLS over a socket, which reads no more in one call than can be read in a millisecond.

A TLS socket of Python's own reads on as long as there is something that is no data. Whoever sends
key updates (RFC 8446, 4.6.3) without end, of which each costs the reader 20 us, keeps it there.
"""

import errno
import os
import socket
import ssl
from contextlib import suppress
from math import inf
from typing import Any

MOST_TAKEN_BYTES = MOST_WRITTEN_BYTES = 32 << 10
"""Taken from the kernel, or encrypted, at a time: two records, for a peer that may not read."""

MOST_IN_VAIN = 32
"""Records in a row without data, of which a handshake has ten: who sends more is given up."""

MOST_HELLO_BYTES, MOST_HANDSHAKE_BYTES = 8 << 10, 24 << 10
"""Taken from a client before it is answered, and before its handshake is done: its certificates.
OpenSSL looks at a hello of 64 KiB for 27 ms, and may keep 3 MiB for it as long as the connection
lasts. Those of clients have less than 2 KiB, and what they resume."""

_HEADER_BYTES, _LENGTH = 5, slice(3, 5)  # of a record

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
        self._may_take: float = MOST_HELLO_BYTES if server_side else inf
        """How much more of a handshake."""
        self._is_answered = False
        self._unsent, self._written = b"", 0
        """What TLS has made; how many bytes of data of that are not sent as a whole."""
        self._taken, self._missing, self._in_vain = memoryview(b""), 0, 0
        """What TLS has not read; what of its record has not come; records in a row without data."""

    def do_handshake(self) -> None:
        """Do the next steps of the handshake."""
        try:
            while True:
                try:
                    self.tls.do_handshake()
                    self._may_take = inf
                    return
                except ssl.SSLWantReadError:
                    if self._to_send.pending and not self._is_answered:
                        self._is_answered = True
                        self._may_take += MOST_HANDSHAKE_BYTES - MOST_HELLO_BYTES
                    if not self._flush():
                        raise ssl.SSLWantWriteError from None
                    self._take()
        finally:
            self._answer()

    def pending(self) -> int:
        """Return how many bytes have been taken from the kernel and not been read."""
        return self.tls.pending() + self._come.pending + len(self._taken)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:  # noqa: ARG002
        """Fill the start of a buffer with data."""
        try:
            if not (self._come.eof or self.tls.pending()):
                self._take()
            while True:
                try:
                    count: int = self._read(nbytes or len(buffer), buffer)
                    self._in_vain = 0
                    if not count:
                        self._come.write_eof()  # who asks again is told again, as by other sockets
                    return count
                except ssl.SSLWantReadError:
                    self._take()
        finally:
            if self._to_send.pending or self._unsent:
                self._answer()

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

    def say_end(self) -> None:
        """Send that nothing will follow (RFC 8446, 6.1), if it can be sent at once."""
        with suppress(ssl.SSLError):  # the peer has not said so yet
            self.tls.unwrap()
        self._answer()

    def _answer(self) -> None:
        """Send what TLS has to say, if the peer is there: what came before its end is read."""
        with suppress(ConnectionError):
            self._flush()

    def _take(self) -> None:
        """Have TLS read a record, or the part of it that has come. Raises BlockingIOError: none."""
        data, is_kept = self._taken, True
        while len(data) < (1 if self._missing else _HEADER_BYTES):
            if have := len(data):
                _scratch[:have] = self._taken = memoryview(bytes(data))
            try:
                count = super().recv_into(_scratch[have:])
            except ConnectionResetError:  # to OpenSSL it is an end, as any other
                count = 0
            if not count:
                self._come.write_eof()
                return
            data, is_kept = _scratch[: have + count], False
        if not self._missing:
            self._missing = _HEADER_BYTES + int.from_bytes(data[_LENGTH], "big")
            self._in_vain += 1
            if self._in_vain > MOST_IN_VAIN:
                raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
        count = self._come.write(data[: self._missing])
        self._may_take -= count
        if self._may_take < 0:
            raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
        self._missing -= count
        self._taken = data[count:] if is_kept else memoryview(bytes(data[count:]))

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
