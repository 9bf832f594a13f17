"""Wait for what may go on for good, and end it."""

import asyncio
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from typing import Any


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these, and return when all have ended; what they end with is not raised."""
    ending = tuple(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def wait_at_most(limit_s: float, waiting: Awaitable[object]) -> None:
    """Return when this has ended, or after so long; then it is cancelled."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await waiting
