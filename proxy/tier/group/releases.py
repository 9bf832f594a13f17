"""Have slots released, each in a limited time, before they are given to other members."""

import asyncio
from collections.abc import Awaitable, Callable

from structlog import get_logger

from .holding import Holding

RELEASE_LIMIT_S = 5.0
"""For what has to be done before a slot is given to another member."""

_log = get_logger(__name__)


class Releases:
    """The releases under way; `released` is called after each."""

    def __init__(
        self,
        holding: Holding,
        on_revoked: Callable[[frozenset[int]], Awaitable[None]],
        released: Callable[[], None],
    ) -> None:
        self._holding = holding
        self._on_revoked = on_revoked
        self._released = released
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, slots: frozenset[int], tasks: asyncio.TaskGroup) -> None:
        """Begin to release slots."""
        task = tasks.create_task(self._release(slots))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Stop at once: the slots are lost."""
        for task in self._tasks:
            task.cancel()

    async def finish(self) -> None:
        """Release all that the member still owns, and wait until what was begun is done."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=RELEASE_LIMIT_S)
        if rest := frozenset(self._holding.owned):
            self._holding.letting_go |= rest
            await self._release(rest)

    async def _release(self, slots: frozenset[int]) -> None:
        try:
            async with asyncio.timeout(RELEASE_LIMIT_S):
                await self._on_revoked(slots)
        except TimeoutError:
            text = "slots are given away before all was released"
            _log.warning(text, slots=len(slots), limit_s=RELEASE_LIMIT_S)
        except Exception:
            _log.exception("slots are given away, and were not released in order")
        self._holding.released(slots)
        self._released()
