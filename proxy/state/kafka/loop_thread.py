"""An event loop in a thread of its own: who calls a store may be in another one."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from threading import Thread
from typing import Any, TypeVar

Value = TypeVar("Value")


class LoopThread:
    """Runs coroutines for callers in any thread but its own, on behalf of `user`."""

    def __init__(self, name: str, user: str) -> None:
        self._user = user
        self.closed = False
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._loop = self._runner.get_loop()
        self._closing = asyncio.Event()
        # Daemon: who forgot to close a store can still end.
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def check_open(self) -> None:
        """Raise RuntimeError after `close`."""
        if self.closed:
            raise self._closed_error()

    def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Run this to its end; return its result or raise its error, RuntimeError for `close`."""
        try:
            return self.start(work).result()
        except CancelledError:
            raise self._closed_error() from None

    def start(self, work: Coroutine[Any, Any, Value]) -> Future[Value]:
        """Begin this and return at once."""
        if self.closed:
            work.close()
            raise self._closed_error()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what runs still, then end the loop."""
        self.closed = True
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _closed_error(self) -> RuntimeError:
        return RuntimeError(f"{self._user} is closed")

    def _serve(self) -> None:
        with self._runner:  # which cancels, in the end, what runs still
            self._runner.run(self._closing.wait())
