"""Bounds what the kernel keeps of a connection while its other side takes nothing.

Left alone, the kernel lets a socket's buffers grow to some MiB each: for a client that is held, or
does not read, the whole response is then in this machine's memory instead of the broker's.
"""

import socket
from contextlib import suppress

SHARED_RECEIVE_BYTES = 12 << 20
"""Divided by the connections that are open, it is the receive buffer of the next one."""

MIN_RECEIVE_BYTES = 64 * 1024
"""But at least this much: what Kafka's consumers ask for themselves (receive.buffer.bytes)."""

MAX_RECEIVE_BYTES = 1 << 20
"""And at most this much: a larger one makes large responses hardly faster."""


def receive_bytes(connections: int) -> int:
    """Return the receive buffer, in bytes, of the last of so many connections."""
    share = SHARED_RECEIVE_BYTES // max(connections, 1)
    return min(max(share, MIN_RECEIVE_BYTES), MAX_RECEIVE_BYTES)


def bound_receive_buffer(sock: socket.socket, connections: int) -> None:
    """Bound what is taken in for a connection that is not read from, for good.

    The kernel keeps up to twice as much, its own overhead included; what is set is cut to
    net.core.rmem_max.
    """
    with suppress(OSError):  # gone already: who reads from it will see
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes(connections))
