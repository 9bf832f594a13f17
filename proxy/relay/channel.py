"""One non-blocking stream socket, plain or TLS, behind the same three calls."""

import socket
import ssl
from typing import Protocol

from proxy.wire.layout import Buffer

BLOCKED = -1
"""Returned by `recv_into` and `send` when the socket can't go on now."""


class ChannelLost(OSError):  # noqa: N818 - named for what happened, as in the logs
    """A connection broke; says which of the two it was."""

    def __init__(self, channel: "Channel", error: OSError) -> None:
        super().__init__(error.errno, error.strerror or str(error))
        self.channel = channel


class Channel(Protocol):
    """What a flow needs of a socket. `recv_into` and `send` raise ChannelLost when it is gone."""

    @property
    def sock(self) -> socket.socket:
        """The socket."""
        ...

    fd: int
    spliceable: bool
    """Whether the kernel may move bytes to or from this socket by itself."""

    def recv_into(self, view: memoryview) -> int:
        """Fill the start of `view`; return how many bytes, 0 at the end, or BLOCKED."""
        ...

    def send(self, data: Buffer, *, more: bool = False) -> int:
        """Send a part of `data`; return how many bytes, or BLOCKED. `more`: more will follow."""
        ...

    def has_buffered(self) -> bool:
        """Say whether bytes wait in user space, where no selector would show them."""
        ...

    def has_ended(self) -> bool:
        """Say whether the peer is gone and nothing it sent is left to be read. Reads nothing."""
        ...


class PlainChannel:
    """A TCP socket."""

    __slots__ = ("_recv_into", "_send", "fd", "sock", "spliceable")

    def __init__(self, sock: socket.socket, *, spliceable: bool = True) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.spliceable = spliceable
        self._recv_into = sock.recv_into
        self._send = sock.send

    def recv_into(self, view: memoryview) -> int:
        """See Channel."""
        try:
            return self._recv_into(view)
        except BlockingIOError:
            return BLOCKED
        except OSError as error:
            raise ChannelLost(self, error) from error

    def send(self, data: Buffer, *, more: bool = False) -> int:
        """See Channel."""
        try:
            return self._send(data, socket.MSG_MORE) if more else self._send(data)
        except BlockingIOError:
            return BLOCKED
        except OSError as error:
            raise ChannelLost(self, error) from error

    def has_buffered(self) -> bool:
        """See Channel."""
        return False

    def has_ended(self) -> bool:
        """See Channel."""
        return _has_ended(self.sock)


class TlsChannel:
    """A TLS connection whose handshake is done.

    OpenSSL wants a blocked write repeated with the same bytes: callers keep what was not sent and
    send it again before anything else.
    """

    __slots__ = ("fd", "sock", "spliceable")

    sock: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.spliceable = False

    def recv_into(self, view: memoryview) -> int:
        """See Channel."""
        try:
            return self.sock.recv_into(view)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return BLOCKED
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return 0
        except OSError as error:
            raise ChannelLost(self, error) from error

    def send(self, data: Buffer, *, more: bool = False) -> int:  # noqa: ARG002
        """See Channel."""
        try:
            return self.sock.send(data)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return BLOCKED
        except OSError as error:
            raise ChannelLost(self, error) from error

    def has_buffered(self) -> bool:
        """See Channel."""
        return self.sock.pending() > 0

    def has_ended(self) -> bool:
        """See Channel. A TLS goodbye is not decrypted for this: it counts as something to read."""
        return not self.has_buffered() and _has_ended(self.sock)


def _has_ended(sock: socket.socket) -> bool:
    try:
        # Of the base class: a TLS socket refuses to look ahead, but here any byte will do.
        return not socket.socket.recv(sock, 1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
