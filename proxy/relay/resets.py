"""Tells of sockets that were reset.

libuv polls a socket no more once it has told of an error. Where a reset comes together with data, a
callback that reads the data alone is the last one. To read again each time would cost a system call
for each frame; here the kernel tells of errors alone, once.
"""

import asyncio
import select
from collections.abc import Callable

MOST_TOLD = 256
"""Resets told of in one round of the event loop."""


class ResetWatcher:
    """The sockets of all connections."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._on_reset: dict[int, Callable[[], None]] = {}
        """By file descriptor."""
        self._errors = select.epoll()
        loop.add_reader(self._errors.fileno(), self._tell)

    def watch(self, fd: int, on_reset: Callable[[], None]) -> None:
        """Call back once, from the event loop, when this socket is reset; until `forget`."""
        if fd not in self._on_reset:
            self._errors.register(fd, select.EPOLLERR | select.EPOLLET)
        self._on_reset[fd] = on_reset

    def forget(self, fd: int) -> None:
        """Watch a socket no more, which is about to be closed."""
        if self._on_reset.pop(fd, None) is not None:
            self._errors.unregister(fd)

    def close(self) -> None:
        """Watch none any more. Does nothing the second time."""
        if not self._errors.closed:
            self._loop.remove_reader(self._errors.fileno())
            self._errors.close()

    def _tell(self) -> None:
        for fd, _ in self._errors.poll(0, MOST_TOLD):
            if fd in self._on_reset:  # else one before has ended it
                self._on_reset[fd]()
