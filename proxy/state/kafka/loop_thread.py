"""An event loop in a thread of its own: who calls a store may be in another one."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

from proxy.tasks import end_tasks

Value = TypeVar("Value")


class LoopThread:
    """Runs coroutines for callers in any thread but its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.SelectorEventLoop()
        # Daemon: who forgot to close a store can still end.
        self._thread = Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Run this to its end; return its result or raise its error."""
        return self.start(work).result()

    def start(self, work: Coroutine[Any, Any, Value]) -> Future[Value]:
        """Begin this and return at once."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, *last: Callable[[], None]) -> None:
        """Cancel what runs still, call these in the loop, then end it."""
        self.run(self._end(last))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self, last: tuple[Callable[[], None], ...]) -> None:
        await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()
        for call in last:
            call()
