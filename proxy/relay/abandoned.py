"""Finds out what requests cost a broker whose client has not waited for their answers."""

import asyncio
from collections.abc import Callable

from proxy.relay.channel import Channel

MAX_ABANDONED = 64
"""Connections to brokers that are kept for it; of more the oldest is charged as it stands."""

ABANDONED_S = 10.0
"""For so long an answer is waited for; then its request has cost that."""


class AbandonedRequests:
    """Connections to brokers that are at work for clients that have left.

    A broker is at work all the same, as with Kafka's own quota. The first byte of an answer tells
    for how long it was; the connection is closed then.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._kept: dict[Channel, tuple[asyncio.TimerHandle, Callable[[], None]]] = {}

    def keep(self, channel: Channel, charge: Callable[[], None]) -> None:
        """Call `charge` when an answer comes on a connection, or it ends; close it then."""
        timer = self._loop.call_later(ABANDONED_S, self._end, channel)
        self._kept[channel] = timer, charge
        self._loop.add_reader(channel.fd, self._end, channel)
        if channel.buffered_bytes():
            self._end(channel)
        elif len(self._kept) > MAX_ABANDONED:
            self._end(next(iter(self._kept)))

    def close(self) -> None:
        """Charge all as they stand. Does nothing the second time."""
        for channel in tuple(self._kept):
            self._end(channel)

    def _end(self, channel: Channel) -> None:
        timer, charge = self._kept.pop(channel)
        timer.cancel()
        self._loop.remove_reader(channel.fd)
        channel.sock.close()
        charge()
