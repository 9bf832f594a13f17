"""Waits, in an event loop, for what others do in it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from support.proxy_process import POLL_S, WAIT_S


async def eventually(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Return the first true value of the condition; fail when there is none in time."""
    try:
        async with asyncio.timeout(timeout_s):
            while not (value := condition()):  # noqa: ASYNC110 - others do not know of us
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"not in {timeout_s:g} s: {what}") from None
    return value


@asynccontextmanager
async def at_work(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Let something run that ends by being cancelled only, and at once."""
    task = asyncio.create_task(work)
    try:
        yield task
        assert not task.done(), "it ended by itself"
    finally:
        task.cancel()
        done, _ = await asyncio.wait((task,), timeout=WAIT_S)
        assert done, "it does not end when cancelled"
        if not task.cancelled():
            task.result()
    assert task.cancelled(), "it swallowed the cancellation"
