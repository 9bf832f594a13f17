"""One stream socket, plain or TLS, behind the same calls, and what it has moved."""

import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from metrics.clock import MS_PER_SECOND
from proxy.cluster.tls_socket import TlsSocket
from proxy.wire.layout import Buffer

SHARED_BUFFER_BYTES = 12 << 20
"""Divided by the connections that are open, it is the receive buffer of each socket of the next
one, and what may wait to be sent there."""

MIN_BUFFER_BYTES = 64 * 1024
"""But at least this much: what Kafka's consumers ask for themselves (receive.buffer.bytes)."""

MAX_BUFFER_BYTES = 1 << 20
"""And at most this much: a larger one makes large responses hardly faster."""

TRAFFIC_INTERVAL_MS = 5_000.0
"""Between two measurements of a connection: its rates are those of that time."""

BLOCKED = -1
"""Returned by `recv_into` and `send` when the socket can't go on now."""

# Of Linux's tcp_info: tcpi_bytes_acked, tcpi_bytes_received, tcpi_data_segs_in, tcpi_data_segs_out.
_TOTALS = struct.Struct("QQ16xII")
_TOTALS_OFFSET = 120
_INFO_BYTES = _TOTALS_OFFSET + _TOTALS.size
_UINT32 = 0xFFFFFFFF
_TCP_CLOSE, _TCP_CLOSE_WAIT = 7, 8  # its first field, tcpi_state

_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ChannelLost(OSError):  # noqa: N818 - named for what happened, as in the logs
    """A connection broke; says which of the two it was."""

    def __init__(self, channel: "Channel", error: OSError) -> None:
        super().__init__(error.errno, error.strerror or str(error))
        self.channel = channel


class Channel:
    """A non-blocking TCP socket, or a TLS one whose handshake is done.

    `recv_into` and `send` raise ChannelLost when the connection is gone. OpenSSL wants a blocked
    write repeated with the same bytes: callers send what was not sent before anything else.
    """

    __slots__ = ("_recv_into", "_send", "buffered_bytes", "fd", "is_plain", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.is_plain = not isinstance(sock, TlsSocket)
        """Whether what the kernel has is what the peer has sent: it may move that by itself."""
        self.buffered_bytes: Callable[[], int] = getattr(sock, "pending", int)
        """Returns how many bytes wait in user space, where no selector would show them."""
        self._recv_into = sock.recv_into
        self._send = sock.send

    def recv_into(self, view: memoryview, flags: int = 0) -> int:
        """Fill the start of `view`; return how many bytes, 0 at the end, or BLOCKED.

        With MSG_PEEK, of a plain one only, they stay to be read.
        """
        try:
            return self._recv_into(view, 0, flags)
        except _WOULD_BLOCK:
            return BLOCKED
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return 0
        except OSError as error:
            raise ChannelLost(self, error) from error

    def send(self, data: Buffer, *, more: bool = False) -> int:
        """Send a part of `data`; return how many bytes, or BLOCKED. `more` will follow at once."""
        try:
            return self._send(data, socket.MSG_MORE) if more and self.is_plain else self._send(data)
        except _WOULD_BLOCK:
            return BLOCKED
        except OSError as error:
            raise ChannelLost(self, error) from error

    @property
    def is_reset(self) -> bool:
        """Whether nothing comes any more but what the kernel has, and why it ended."""
        return self._tcp_state == _TCP_CLOSE

    @property
    def sends_no_more(self) -> bool:
        """Whether the peer has left; what it sent before may not have been read yet."""
        return self._tcp_state in (_TCP_CLOSE, _TCP_CLOSE_WAIT)

    @property
    def _tcp_state(self) -> int:
        return self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]

    def has_ended(self) -> bool | None:
        """Return whether the peer is gone, False when it has sent more, None when neither is so.

        Reads nothing. A TLS goodbye is not decrypted for this: it counts as something to read.
        """
        if self.buffered_bytes():
            return False
        try:
            return not self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except OSError:
            return True


@dataclass(slots=True, eq=False)
class ConnectionRates:
    """What one connection has moved, and how fast lately; of TLS the encrypted bytes.

    Nothing is counted here: the kernel has counted it already.
    """

    _at_ms: float
    received_rate: float | None = None
    """Bytes per second from the client; None before the first measurement."""
    sent_rate: float | None = None
    exchange_rate: float = 0.0
    """Requests with their responses per second, roughly: each is a segment both ways at least, and
    the shorter of the two is one mostly. Such as come together count as one."""
    _received_bytes: int = 0
    _received_segments: int = 0
    _sent_bytes: int = 0
    _sent_segments: int = 0

    def measure(self, sock: socket.socket, now_ms: float) -> None:
        """Compute the rates since the last measurement; do nothing without time between them."""
        passed_s = (now_ms - self._at_ms) / MS_PER_SECOND
        if passed_s <= 0:
            return
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            totals = _TOTALS.unpack_from(info, _TOTALS_OFFSET)
        except (OSError, struct.error):  # closed, or a system that does not tell
            return
        sent_bytes, received_bytes, received, sent = totals
        segments = min(
            received - self._received_segments & _UINT32, sent - self._sent_segments & _UINT32
        )
        self.exchange_rate = segments / passed_s
        self._received_segments, self._sent_segments = received, sent
        self.received_rate = (received_bytes - self._received_bytes) / passed_s
        self.sent_rate = (sent_bytes - self._sent_bytes) / passed_s
        self._at_ms, self._sent_bytes, self._received_bytes = now_ms, sent_bytes, received_bytes


def socket_buffer_bytes(connections: int) -> int:
    """Return the share of the last of so many connections, in bytes."""
    share_bytes = SHARED_BUFFER_BYTES // max(connections, 1)
    return min(max(share_bytes, MIN_BUFFER_BYTES), MAX_BUFFER_BYTES)


def limit_socket_buffers(sock: socket.socket, connections: int) -> None:
    """Bound what the kernel keeps of a connection whose peer does not read, for good.

    Left alone, it lets a socket's buffers grow to some MiB: for a client that is held, or does not
    read, the whole response is then in this machine's memory instead of the broker's. What it takes
    in is up to twice as much, its own overhead included; what is set is cut to net.core.rmem_max.
    """
    size = socket_buffer_bytes(connections)
    with suppress(OSError):  # gone already: who reads from it will see
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size)
