"""Writes usage records to their topic, and keeps what the cluster does not take, within bounds.

What was tried keeps its content and its numbers until it is written: it may be there already. The
rest is summed up by client once it is old, and the oldest is lost beyond a bound; then numbers are
skipped, so that a reader sees the gap.
"""

import asyncio
from collections import deque
from collections.abc import Iterator

from structlog import get_logger

from metrics import UsageInstruments
from metrics.clock import MS_PER_SECOND, clock_ms
from proxy.cluster.upstream import RefusedError, UpstreamError
from proxy.slices import Slices
from proxy.state import StateError
from proxy.usage.usage_record import UsageKey, UsageRecord
from proxy.usage.usage_topic import INVALID_TIMESTAMP, UsageTopic

FINE_MS = 10 * 60_000
"""What is not written for so long is summed up by client."""

MAX_UNWRITTEN = 50_000  # records; about 1 kB each
WRITTEN_TOGETHER = 150  # some ms to encode and compress, in steps; fits a batch with long names

ATTEMPT_LIMIT_S = 20.0
RETRY_S, RETRY_REFUSED_S = 2.0, 60.0
CLOSE_LIMIT_S = 3.0
"""How long an end waits for the last records to be written."""

_log = get_logger(__name__)


class UsageWriter:
    """Writes what is added, until cancelled; `close` it then."""

    def __init__(
        self, topic: UsageTopic, instruments: UsageInstruments, slices: Slices, number: int = 0
    ) -> None:
        self._topic, self._instruments, self._slices = topic, instruments, slices
        self._sequence = number
        self._trying: list[UsageRecord] = []
        """Those that may be in the topic already."""
        self._fine: deque[UsageRecord] = deque()
        self._coarse: dict[UsageKey, UsageRecord] = {}
        """What is old, summed up."""
        self._added = asyncio.Event()
        self._is_ready = False
        """Whether the topic is known to be there."""
        self._problem: str | None = None
        self._written_ms: float | None = None
        instruments.usage_written_age_seconds.set_function(self._age_s)

    @property
    def unwritten(self) -> int:
        """How many records wait."""
        return len(self._trying) + len(self._fine) + len(self._coarse)

    def add(self, record: UsageRecord) -> None:
        """Write a record soon."""
        self._fine.append(record)
        self._added.set()

    def coarsening(self, now_ms: float) -> Iterator[None]:
        """Sum up in small steps what is old, and give up what is too much; time since 1970."""
        while self._fine and self._fine[0].end_ms < now_ms - FINE_MS:
            self._sum_up(self._fine.popleft())
            yield
        while self.unwritten > MAX_UNWRITTEN and self._fine:
            self._sum_up(self._fine.popleft())
            yield
        while self.unwritten > MAX_UNWRITTEN and self._coarse:
            del self._coarse[next(iter(self._coarse))]
            self._lose(1)
            yield

    def take(self) -> list[UsageRecord]:
        """Return what is to be written now, the oldest, with its numbers; the same until it is."""
        while len(self._trying) < WRITTEN_TOGETHER and (self._coarse or self._fine):
            oldest = self._coarse.pop(next(iter(self._coarse))) if self._coarse else None
            record = oldest or self._fine.popleft()
            record.sequence = self._sequence
            self._sequence += 1
            self._trying.append(record)
        return self._trying

    def written(self) -> None:
        """Forget what `take` gave: it is in the topic."""
        self._instruments.usage_records_written_total.inc(len(self._trying))
        self._trying = []
        self._written_ms = clock_ms()

    async def run(self) -> None:
        """Write, until cancelled."""
        while True:
            await self._added.wait()
            self._added.clear()
            await self._write_all()

    async def close(self) -> None:
        """Write what is left, if the cluster takes it in time; what it does not take is lost."""
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._write_all()
        except TimeoutError:
            self._lose(self.unwritten)
            _log.error("the last usage records are lost", records=self.unwritten)
        finally:
            self._topic.close()

    async def _write_all(self) -> None:
        while records := self.take():
            try:
                async with self._topic.within(ATTEMPT_LIMIT_S):
                    if not self._is_ready:
                        await self._topic.ensure(ATTEMPT_LIMIT_S)
                        self._is_ready = True
                    await self._topic.append(records)
            except (UpstreamError, RefusedError, StateError) as error:
                self._failed(error)
                self._is_ready = False
                refused = not isinstance(error, UpstreamError)
                await asyncio.sleep(RETRY_REFUSED_S if refused else RETRY_S)
            else:
                self.written()
                if self._problem is not None:
                    self._problem = None
                    _log.info("usage is written again", topic=self._topic.name)

    def _failed(self, error: Exception) -> None:
        """Count a failure; log the first one, and another kind of it."""
        self._instruments.usage_write_errors_total.inc()
        kind = type(error).__name__
        if self._problem != kind:
            self._problem, name = kind, self._topic.name
            fix = "check that the brokers are up, and cluster.bootstrap_servers, tls and sasl"
            if isinstance(error, RefusedError):
                fix = f"let quota-proxy create, describe, read and write topic {name}"
                if error.error_code == INVALID_TIMESTAMP:
                    fix = "set this machine's clock, which is ahead of that of the brokers"
            fix = getattr(error, "fix", fix)
            about = {"topic": name, "error": str(error), "fix": fix}
            _log.error("usage is not written, trying again; relaying goes on", **about)

    def _sum_up(self, record: UsageRecord) -> None:
        earlier = self._coarse.setdefault(record.summed_by, record)
        if earlier is not record:
            earlier.include(record)

    def _lose(self, count: int) -> None:
        self._sequence += count
        self._instruments.usage_records_lost_total.inc(count)

    def _age_s(self) -> float:
        written_ms = self._written_ms
        return 0.0 if written_ms is None else (clock_ms() - written_ms) / MS_PER_SECOND
