"""Looks up the addresses of brokers, and gives the last good ones while their names do not resolve.

A cluster goes on while the name service is away; so should those who want to reach it. A look-up
goes on after its time: who asks next finds what it brought.
"""

import asyncio
import socket
from collections import OrderedDict
from functools import partial
from typing import Any, TypeAlias

from structlog import get_logger

from .upstream import Address

MAX_LOOKUP_S = 1.0
"""A look-up that takes longer is not waited for where there are addresses of an earlier one."""

MAX_LOOKUPS = 3
"""At a time. Each blocks one of the few threads of the event loop, for many seconds where no name
server answers; there are four at least."""

MAX_RESOLVED_NAMES = 1_000
"""Names, with ports, whose addresses are kept; of more, those found longest ago are forgotten."""

MAX_HOST_CHARS = 254
"""Of a name (RFC 1035) with a dot at its end. A longer one takes up to 0.2 s to encode."""

FAILING_S = 60.0
"""A name counts as failing for so long after its last addresses had to serve."""

Found: TypeAlias = list[tuple[Any, ...]]
"""As of `getaddrinfo`."""

_log = get_logger(__name__)


class Resolver:
    """The look-ups of one event loop. At its end those under way are cancelled with its tasks."""

    def __init__(self) -> None:
        self._failed_s: dict[str, float] = {}
        """When the last good addresses of a name had to serve."""
        self._good: OrderedDict[Address, Found] = OrderedDict()
        self._lookups: dict[Address, tuple[asyncio.Task[None], float]] = {}
        """Those under way, and when they are late."""
        self._turns = asyncio.Semaphore(MAX_LOOKUPS)

    async def find(self, server: Address) -> Found:
        """Return a server's addresses. Raises OSError, UnicodeError for a name never resolved."""
        chars = len(server[0] or "")  # a broker's answer may have null
        if not 0 < chars <= MAX_HOST_CHARS:
            raise socket.gaierror(socket.EAI_NONAME, f"a name of {chars} characters")
        try:
            numeric = socket.AI_NUMERICHOST
            return list(socket.getaddrinfo(*server, type=socket.SOCK_STREAM, flags=numeric))
        except socket.gaierror:  # it is a name
            pass
        loop = asyncio.get_running_loop()
        if server not in self._lookups:
            task = loop.create_task(self._look_up(server))
            self._lookups[server] = task, loop.time() + MAX_LOOKUP_S
            task.add_done_callback(partial(self._looked_up, server))
        task, late_s = self._lookups[server]
        left_s = max(late_s - loop.time(), 0.0) if server in self._good else None
        await asyncio.wait((task,), timeout=left_s)
        error = task.exception() if task.done() else TimeoutError(f"not in {MAX_LOOKUP_S:g} s")
        if error is None:
            return self._good[server]
        if server not in self._good:
            raise error
        if server[0] not in self.failing():
            text = "a name does not resolve, its last addresses serve"
            _log.warning(text, name=server[0], error=str(error))
        self._failed_s[server[0]] = loop.time()
        return self._good[server]

    def _looked_up(self, server: Address, task: asyncio.Task[None]) -> None:
        del self._lookups[server]
        if not task.cancelled():
            task.exception()  # there may be nobody left who asks for it

    def failing(self) -> list[str]:
        """Return the names that did not resolve lately, or not in time."""
        oldest_s = asyncio.get_running_loop().time() - FAILING_S
        for name in [name for name, at_s in self._failed_s.items() if at_s < oldest_s]:
            del self._failed_s[name]
        return list(self._failed_s)

    async def _look_up(self, server: Address) -> None:
        async with self._turns:
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(*server, type=socket.SOCK_STREAM)
        self._good[server] = list(found)
        self._good.move_to_end(server)
        if len(self._good) > MAX_RESOLVED_NAMES:
            self._good.popitem(last=False)
        if self._failed_s.pop(server[0], None) is not None:
            _log.info("a name resolves again", name=server[0])
