"""Measures how late the event loop is: what every client of the proxy waits for as well."""

import asyncio
from collections.abc import Callable

from metrics.clock import MS_PER_SECOND

LAG_INTERVAL_S = 0.1
"""Between two measurements. A stall that is longer is always seen; they cost some 0.02 % of a
core."""


async def watch_lag(observe: Callable[[float], None], clock_ms: Callable[[], float]) -> None:
    """Call `observe` with how late a timer was, in seconds, until cancelled."""
    while True:
        due_ms = clock_ms() + LAG_INTERVAL_S * MS_PER_SECOND
        await asyncio.sleep(LAG_INTERVAL_S)
        observe(max(clock_ms() - due_ms, 0.0) / MS_PER_SECOND)
