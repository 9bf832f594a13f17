"""Meters for as long as the process runs: when a rate is taken, when an interval ends, the end."""

import asyncio
from collections.abc import Callable
from functools import partial
from time import time

from structlog import get_logger

from metrics.clock import MS_PER_SECOND, clock_ms
from proxy.slices import Slices
from proxy.usage.usage_meter import UsageMeter
from proxy.usage.usage_record import UsageRecord
from proxy.usage.usage_writer import UsageWriter

RATE_INTERVAL_MS = 10_000.0
"""Over so long a rate is taken: as long as Kafka's windows look back on."""

MAX_OFF_MS = 1000.0
"""An interval ends when it should by the clock of the day, unless that was set meanwhile."""

_log = get_logger(__name__)


class Metering:
    """Takes rates and writes records of intervals that begin with the hour; `close` it in the end.

    `member` is who writes, `interval_s` how long an interval is; clocks are of the day, in seconds
    since 1970, and monotonic, in milliseconds.
    """

    def __init__(
        self,
        meter: UsageMeter,
        writer: UsageWriter,
        slices: Slices,
        *,
        member: str,
        interval_s: float,
        clock_s: Callable[[], float] = time,
        clock_ms: Callable[[], float] = clock_ms,
    ) -> None:
        self.meter, self._writer, self._slices = meter, writer, slices
        self._interval_ms = interval_s * MS_PER_SECOND
        self._clock_s, self._clock_ms = clock_s, clock_ms
        self._start_ms = self._day_ms()
        self._make = partial(UsageRecord, member=member, epoch=self._start_ms, sequence=0)
        self._rated_ms = clock_ms()
        self._plan()

    def _day_ms(self) -> int:
        return round(self._clock_s() * MS_PER_SECOND)

    def _plan(self) -> None:
        """Choose the end of the interval: of the day, and by the monotonic clock."""
        now_ms = self._day_ms()
        self._end_ms = (now_ms // self._interval_ms + 1) * self._interval_ms
        self._due_ms = self._clock_ms() + self._end_ms - now_ms

    async def run(self) -> None:
        """Meter, until cancelled."""
        writing = asyncio.create_task(self._writer.run(), name="write usage")
        try:
            while True:
                next_ms = min(self._due_ms, self._rated_ms + RATE_INTERVAL_MS)
                await asyncio.sleep(max(next_ms - self._clock_ms(), 0.0) / MS_PER_SECOND)
                try:
                    await self.tick()
                except Exception as error:  # a defect of ours must not end the proxy
                    _log.error("unexpected error about usage", exc_info=error)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def tick(self) -> None:
        """Take a rate, and end the interval, if it is time."""
        now_ms = self._clock_ms()
        await self._slices.collect(self.meter.reading())
        if now_ms >= self._rated_ms + RATE_INTERVAL_MS:
            seconds, self._rated_ms = (now_ms - self._rated_ms) / MS_PER_SECOND, now_ms
            await self._slices.collect(self.meter.rating(seconds))
        if now_ms >= self._due_ms:
            await self._record()

    async def _record(self) -> None:
        """Write what came since the last time, as an interval that ends now."""
        planned_ms, now_ms = self._end_ms, self._day_ms()
        end_ms = planned_ms if abs(now_ms - planned_ms) < MAX_OFF_MS else now_ms
        # Where the clock was put back the interval has no length that is known.
        start_ms, end_ms = min(self._start_ms, round(end_ms) - 1), round(end_ms)
        make = partial(self._make, start_ms=start_ms, end_ms=end_ms)
        self._start_ms = end_ms
        self._plan()
        await self._slices.collect(self.meter.recording(make, self._writer.add))
        await self._slices.collect(self._writer.coarsening(now_ms))

    async def close(self) -> None:
        """Write the last interval, which is shorter, when `run` has ended and nothing moves."""
        await self._slices.collect(self.meter.reading())
        await self._record()
        await self._writer.close()
