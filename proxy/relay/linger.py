"""Ends a connection whose client has all its answers: the client is to close first."""

import asyncio
import socket
from collections.abc import Callable

from proxy.relay.channel import Channel

LINGER_S = 1.0
"""How long a drained connection waits for the client to close its side."""

_discarded = memoryview(bytearray(4096))


class Linger:
    """Waits until a client closes, or LINGER_S have passed; then calls `close` with the reason."""

    __slots__ = ("_channel", "_close", "_loop", "_timer")

    def __init__(
        self, channel: Channel, loop: asyncio.AbstractEventLoop, close: Callable[[str], None]
    ) -> None:
        self._channel, self._loop, self._close = channel, loop, close
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Close our side, and wait from now on."""
        try:
            self._channel.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._close("client lost")
            return
        self._timer = self._loop.call_later(LINGER_S, self._close, "drained")
        self._loop.add_reader(self._channel.fd, self._discard)

    def close(self) -> None:
        """Wait no longer."""
        self._loop.remove_reader(self._channel.fd)
        if self._timer is not None:
            self._timer.cancel()

    def _discard(self) -> None:
        """Read on until the client closes: closing first could cost it our last answer."""
        try:
            got = self._channel.recv_into(_discarded)
        except OSError:
            got = 0
        if not got:
            self._close("drained")
