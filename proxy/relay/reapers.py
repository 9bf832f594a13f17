"""The delay queues of the relay, on the event loop's timers."""

import asyncio
from collections.abc import Callable

from metrics.clock import MS_PER_SECOND, clock_ms
from metrics.instruments import Instruments
from proxy.quota.delay_queue import DelayQueue, Reaper
from proxy.wire.apis import FETCH, PRODUCE


class Reapers:
    """The three delay queues, one per API family, with a timer of the event loop each."""

    FAMILIES = ("fetch", "produce", "request")

    def __init__(self, loop: asyncio.AbstractEventLoop, instruments: Instruments) -> None:
        self._loop = loop
        lag = instruments.delay_queue_lag_seconds
        self.all = tuple(
            Reaper(DelayQueue(family), clock_ms, self._call_at, lag.observe)
            for family in self.FAMILIES
        )
        self._fetch, self._produce, self._request = self.all
        for reaper in self.all:
            gauge = instruments.delay_queue_size.labels(reaper.queue.api)
            gauge.set_function(reaper.queue.__len__)

    def for_api(self, api_key: int) -> Reaper:
        """Return the reaper of this API's family."""
        if api_key == FETCH:
            return self._fetch
        return self._produce if api_key == PRODUCE else self._request

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
