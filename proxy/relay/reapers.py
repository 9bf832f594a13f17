"""The delay queues of the relay, on the event loop's timers."""

import asyncio
from collections.abc import Callable, Collection
from typing import get_args

from metrics.clock import MS_PER_SECOND, clock_ms
from metrics.instruments import Instruments
from proxy.quota.delay_queue import DelayQueue, Reaper
from proxy.wire.apis import ApiFamily, api_of


class Reapers:
    """A delay queue for each family of APIs, each with a timer of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, instruments: Instruments) -> None:
        self._loop = loop
        lag = instruments.delay_queue_lag_seconds
        self._by_family: dict[ApiFamily, Reaper] = {
            family: Reaper(DelayQueue(family), clock_ms, self._call_at, lag.observe)
            for family in get_args(ApiFamily)
        }
        self.all: Collection[Reaper] = self._by_family.values()
        for reaper in self.all:
            gauge = instruments.delay_queue_size.labels(reaper.queue.api)
            gauge.set_function(reaper.queue.__len__)

    def for_api(self, api_key: int) -> Reaper:
        """Return the reaper of this API's family."""
        return self._by_family[api_of(api_key).family]

    def release_all(self) -> None:
        """Release everything now."""
        for reaper in self.all:
            reaper.release_all()

    def close(self) -> None:
        """Stop the timers."""
        for reaper in self.all:
            reaper.close()

    def _call_at(self, due_ms: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        # The loop's own clock may stand for a whole round; a delay does not depend on it.
        delay = max(due_ms - clock_ms(), 0.0) / MS_PER_SECOND
        return self._loop.call_later(delay, callback)
