"""Runs attempts at one thing in a staggered race, as RFC 8305 does for connections."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

ATTEMPT_DELAY_S = 0.25
"""Between the starts of two attempts: the Connection Attempt Delay of RFC 8305, section 5."""

T = TypeVar("T")


class AllFailed(Exception):  # noqa: N818 - named for what happened, as in the logs
    """No attempt succeeded."""

    def __init__(self, errors: list[Exception]) -> None:
        super().__init__(errors)
        self.errors = errors
        """One of each attempt, in the order in which they came."""


async def first_of(
    attempts: Iterable[Callable[[], Coroutine[Any, Any, T]]],
    discard: Callable[[T], object],
    expected: type[Exception],
) -> T:
    """Return what the first attempt that succeeds returns, and cancel the others.

    The next attempt starts when one fails, or ATTEMPT_DELAY_S after the one before.

    Args:
        attempts: at least one.
        discard: gets what an attempt returns that could not be cancelled in time.
        expected: what attempts raise when they fail. Anything else ends the race.

    Raises AllFailed.
    """
    waiting = deque(attempts)
    if len(waiting) == 1:  # most often; it needs no task
        try:
            return await waiting[0]()
        except expected as error:
            raise AllFailed([error]) from error
    running: set[asyncio.Task[T]] = set()
    errors: list[Exception] = []

    def end(late: asyncio.Task[T]) -> None:
        if not late.cancelled() and late.exception() is None:
            discard(late.result())

    has_won = False
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.create_task(waiting.popleft()()))
            done, _ = await asyncio.wait(
                running,
                timeout=ATTEMPT_DELAY_S if waiting else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                running.discard(task)
                try:
                    result = task.result()
                except expected as error:
                    errors.append(error)
                else:
                    has_won = True
                    return result
        raise AllFailed(errors)
    finally:
        for task in running:
            task.add_done_callback(end)
            task.cancel()
        if running and not has_won:  # a winner would be lost if we were cancelled while we wait
            await asyncio.wait(running)
