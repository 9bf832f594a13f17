"""Observes rates while the proxy runs: samples them, and writes them to the state slowly."""

import asyncio
import time
from collections.abc import Callable

from structlog import get_logger

from metrics.clock import MS_PER_SECOND
from proxy.admin.rates.observed_rates import (
    OBSERVED_INTERVAL_MS,
    RATES_FORMAT,
    Counters,
    ObservedRates,
)
from proxy.slices import Slices
from proxy.state import StateError, StateWriter, Store

RATES_WRITE_INTERVAL_S = 300.0
"""So much is lost when the proxy is killed."""

WRITTEN_AT_ONCE = 200
"""Records in one write: some 5 ms to make them."""

RATES_WRITE_PAUSE_S = 0.2  # between two writes

_log = get_logger(__name__)


class RateObserver:
    """Keeps `rates` up to date. `run` it; `close` it before the store is closed."""

    def __init__(
        self,
        counters: Counters,
        max_clients: int,
        clock_ms: Callable[[], float],
        slices: Slices,
    ) -> None:
        self.rates = ObservedRates(counters, max_clients)
        self.writes = True
        """Whether this process keeps them, where several have one state."""
        self._clock_ms = clock_ms
        self._slices = slices
        self._store: Store | None = None
        self._writer: StateWriter | None = None
        self._writing = asyncio.Lock()

    def use(self, store: Store) -> None:
        """Read from there, with the start of `run`, what an earlier process wrote, and write."""
        self._store = store

    def resume(self, store: Store) -> None:
        """Write to this store from now on, after `close`; what was observed is still known."""
        self._store, self._writer = store, StateWriter(store)

    async def run(self) -> None:
        """Sample and write, until cancelled."""
        store = self._store
        try:
            # Tens of thousands of records take seconds.
            problems = await asyncio.to_thread(self._load, store)
        except StateError as error:
            _log.error("observed rates are neither read nor kept", error=str(error))
        else:
            for problem in problems:
                _log.warning("observed rates not taken up", problem=problem)
            if store is not None and self._store is store:  # and was not closed meanwhile
                self._writer = StateWriter(store)
        next_s = time.monotonic() + RATES_WRITE_INTERVAL_S
        while True:
            try:
                await self._slices.collect(self.rates.sample(self._clock_ms(), time.time()))
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + RATES_WRITE_INTERVAL_S
                    await self.write(RATES_WRITE_PAUSE_S)
            except Exception as error:  # a defect of ours must not end the proxy
                _log.error("unexpected error about observed rates", exc_info=error)
            await asyncio.sleep(OBSERVED_INTERVAL_MS / MS_PER_SECOND)

    async def close(self) -> None:
        """Write what is not written yet, and nothing more."""
        self._store = None
        await self.write()
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.close()

    def _load(self, store: Store | None) -> list[str]:
        records = [] if store is None else store.items(RATES_FORMAT.prefix)
        return self.rates.load(records, time.time())

    async def write(self, pause_s: float = 0.0) -> None:
        """Write what is not written yet."""
        async with self._writing:
            while self.writes and (writer := self._writer) is not None and self.rates.journal:
                records, deleted = self.rates.journal.take(WRITTEN_AT_ONCE)
                try:
                    await writer.put_many(records, delete=deleted)
                except StateError as error:
                    self.rates.journal.give_back()
                    _log.error("observed rates not kept, trying again", error=str(error))
                    return
                await asyncio.sleep(pause_s)
