"""Measures what each connection moves without counting: the kernel has counted it already."""

import socket
import struct

from metrics.clock import MS_PER_SECOND

TRAFFIC_INTERVAL_MS = 5_000.0
"""Between two measurements of a connection: its rates are those of that time."""

# Of Linux's tcp_info: tcpi_bytes_acked, tcpi_bytes_received, tcpi_data_segs_in, tcpi_data_segs_out.
_TOTALS = struct.Struct("QQ16xII")
_TOTALS_OFFSET = 120
_INFO_BYTES = _TOTALS_OFFSET + _TOTALS.size
_UINT32 = 0xFFFFFFFF


class Traffic:
    """What one connection has moved, and how fast lately; of TLS the encrypted bytes."""

    __slots__ = (
        *("_at_ms", "_received_bytes", "_received_segments", "_sent_bytes", "_sent_segments"),
        *("exchange_rate", "received_rate", "sent_rate"),
    )

    def __init__(self, now_ms: float) -> None:
        self._at_ms = now_ms
        self._received_bytes = self._sent_bytes = self._received_segments = self._sent_segments = 0
        self.received_rate: float | None = None
        """Bytes per second from the client; None before the first measurement."""
        self.sent_rate: float | None = None
        self.exchange_rate = 0.0
        """Requests with their responses per second, roughly: each is a segment both ways at least,
        and the shorter of the two is one mostly. Such as come together count as one."""

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
