"""The lag of the event loop is how late its timers are."""

import asyncio

from proxy.admin import request_times
from proxy.admin.request_times import watch_loop_lag

TIMES = 3


async def test_a_timer_that_is_late_is_seen_and_an_early_one_is_not(monkeypatch):
    monkeypatch.setattr(request_times, "LAG_INTERVAL_S", 0.0)
    clock = iter((0.0, 0.0, 10.0, 260.0, 300.0, 299.5))
    seen: list[float] = []
    enough = asyncio.Event()

    def observe(lag_s: float) -> None:
        seen.append(lag_s)
        if len(seen) == TIMES:
            enough.set()

    watch = asyncio.create_task(watch_loop_lag(observe, lambda: next(clock, 300.0)))
    async with asyncio.timeout(10.0):
        await enough.wait()
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    assert seen[:TIMES] == [0.0, 0.25, 0.0]
