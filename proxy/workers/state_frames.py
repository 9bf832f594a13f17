"""Frames of JSON between a worker and the state of its machine: a length of 4 bytes, and that."""

import json
import socket
from contextlib import suppress
from struct import Struct
from typing import Any

MAX_STATE_FRAME_BYTES = 64 * 1024 * 1024
"""Of one frame, which has STATE_PIECE_BYTES of records, or one larger record."""

STATE_PIECE_BYTES = 1024 * 1024
"""About how much of records goes into one frame: others have their turn between two."""

STATE_READ_BYTES = 256 * 1024

_LENGTH = Struct(">I")


class FrameError(Exception):
    """The other side sent what is no frame, or has closed its end."""


class FrameSocket:
    """Sends and receives frames over a socket that blocks for `timeout_s` at most; None: forever.

    What a timeout cuts short goes on with the next call: no frame is torn. For one thread at once.
    """

    def __init__(self, sock: socket.socket, timeout_s: float | None) -> None:
        sock.settimeout(timeout_s)
        self._socket = sock
        self._received = bytearray()
        self._unsent = bytearray()

    def send(self, document: Any) -> None:
        """Send a document. Raises TimeoutError (it is sent with the next one), and OSError."""
        body = json.dumps(document, separators=(",", ":")).encode()
        if len(body) > MAX_STATE_FRAME_BYTES:
            raise FrameError(f"{len(body)} bytes are too many for one frame")
        self._unsent += _LENGTH.pack(len(body))
        self._unsent += body
        while self._unsent:
            sent = self._socket.send(self._unsent)
            del self._unsent[:sent]

    def receive(self) -> Any:
        """Return the next document. Raises TimeoutError, FrameError, OSError."""
        self._receive_until(_LENGTH.size)
        (length,) = _LENGTH.unpack_from(self._received)
        if length > MAX_STATE_FRAME_BYTES:
            raise FrameError(f"a frame of {length} bytes")
        end = _LENGTH.size + length
        self._receive_until(end)
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        try:
            return json.loads(body)
        except ValueError as error:
            raise FrameError(f"a frame that is not JSON: {error}") from error

    def close(self) -> None:
        """Close the socket; who waits for it in another thread is woken."""
        with suppress(OSError):  # the other side has closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive_until(self, count: int) -> None:
        while len(self._received) < count:
            read = self._socket.recv(STATE_READ_BYTES)
            if not read:
                raise FrameError("the other side has closed the connection")
            self._received += read
