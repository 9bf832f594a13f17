"""Do something with each connection, without keeping the event loop from others."""

import asyncio
from collections.abc import Callable, Collection
from time import perf_counter

from proxy.relay.connection import Connection

SLICE_S = 0.002
"""For how long a walk goes on in each round of the event loop."""


class ConnectionWalk:
    """Calls `step` with each of the `connections`, in the next rounds of the event loop.

    There may be thousands. A step may close its connection, and must not raise.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connections: Collection[Connection],
        step: Callable[[Connection], None],
    ) -> None:
        self._loop = loop
        self._connections = connections
        self._step = step
        self._left: list[Connection] = []
        self._next: asyncio.Handle | None = None

    def begin(self) -> None:
        """Walk over all that are open now; one that is under way begins again."""
        self._left = list(self._connections)
        if self._next is None:
            self._next = self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        end_s, self._next = perf_counter() + SLICE_S, None
        try:
            while self._left and perf_counter() < end_s:
                connection = self._left.pop()
                if connection in self._connections:
                    self._step(connection)
        finally:
            if self._left:
                self._next = self._loop.call_soon(self._go_on)
