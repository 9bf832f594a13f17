"""Calls what may block for good, such as reading a file of a hung network file system."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

Result = TypeVar("Result")


class LimitedThread:
    """Calls functions in a thread, one at a time, and gives up waiting for them after a while.

    A thread that hangs is left alone: it keeps neither the event loop nor the process from its end.
    There is never more than one.
    """

    def __init__(self) -> None:
        self._running: asyncio.Future[Any] | None = None

    async def call(self, function: Callable[[], Result], limit_s: float) -> Result:
        """Return what the function returns, or raise what it raises; TimeoutError when it hangs.

        While an earlier call hangs, that one is waited for, and this one is not begun.
        """
        async with asyncio.timeout(limit_s):
            if self._running is not None:
                await asyncio.wait((self._running,))
            self._running = done = asyncio.get_running_loop().create_future()
            done.add_done_callback(_look_at)
            work = Thread(target=_run, args=(function, done), name="limited", daemon=True)
            work.start()
            await asyncio.wait((done,))
        self._running = None
        result: Result = done.result()
        return result


def _run(function: Callable[[], Any], done: "asyncio.Future[Any]") -> None:
    try:
        result = function()
    except Exception as error:  # it belongs to who called
        end, outcome = done.set_exception, error
    else:
        end, outcome = done.set_result, result
    with suppress(RuntimeError):  # the event loop has ended
        done.get_loop().call_soon_threadsafe(end, outcome)


def _look_at(done: "asyncio.Future[Any]") -> None:
    """Take the error of a call that nobody waits for any more, so that none is reported."""
    if not done.cancelled():
        done.exception()
