"""Keeps what clients owe in the state, while their slot moves, and for a proxy that is killed."""

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

from structlog import get_logger

from metrics.clock import MS_PER_SECOND, clock_ms
from proxy.quota.manager import QuotaManager, SensorDebt
from proxy.slices import TimeSlicer
from proxy.state import Record, StateError, Store

DEBTS = "debts/"
DEBTS_SCHEMA = 1
"""Version of what is written there."""

DEBT_PARTS = 256
"""Records of all debts together: one that changes is written with its part, and of 10,000 that all
change no more than so many are written."""

KEPT_INTERVAL_S = 1.0
"""Between two writes."""

LEAST_KEPT_MS = 500.0
"""Less is not kept: who owes that owes as much again, or nothing, by the next time."""

MOVED_DEBT_MS = 100.0
"""A debt that ends no more than so much earlier or later than what is kept of it is the same."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_UP_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

_log = get_logger(__name__)


@cache
def boot_id() -> str:
    """Return what differs from one start of this machine to the next; empty: it is not known."""
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""


def debts_record(key: str, debts: Iterable[SensorDebt]) -> Record:
    """Return the record of what is owed now; `read_debts` reads that."""
    value: dict[str, Any] = {"boot": boot_id(), "at_s": time.time()}
    value["up_s"] = time.clock_gettime(_UP_CLOCK)
    value["owed"] = [debt.document() for debt in debts]
    return Record.of(key, value, DEBTS_SCHEMA)


def read_debts(record: Record, served_on_ms: float = 0.0) -> list[SensorDebt] | None:
    """Return what is still owed of a record; None: it is damaged, which is logged.

    The time that has passed is that of the machine while it runs, whatever its clock was set to,
    and else, as on another machine, that of the clock; less `served_on_ms`. What is owed never
    becomes more.
    """
    try:
        record.check_schema(DEBTS_SCHEMA)
        document: Any = record.value
        if boot_id() and document["boot"] == boot_id():
            passed_s = time.clock_gettime(_UP_CLOCK) - float(document["up_s"])
        else:
            passed_s = time.time() - float(document["at_s"])
        passed_ms = max(0.0, passed_s * MS_PER_SECOND - served_on_ms)
        return [SensorDebt.of(row).after(passed_ms) for row in document["owed"]]
    except (ArithmeticError, KeyError, StateError, TypeError, ValueError) as error:
        _log.warning("debts not taken over", record=record.key, error=str(error))
        return None


class DebtStore:
    """The records in a store. All methods block; one call at a time."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[str, float]] = {}
        """Until when what is kept is owed, by part and sensor; by the clock of `write`."""

    def read(self, store: Store, now_ms: float) -> list[SensorDebt]:
        """Return what is still owed of what a store has; `write` goes on with that.

        Raises StateError.
        """
        debts: list[SensorDebt] = []
        self._kept = {}
        for record in store.items(DEBTS):
            number, found = record.key.removeprefix(DEBTS), read_debts(record)
            if found is not None and number.isdecimal():
                self._kept[int(number)] = {each.name: now_ms + each.owed_ms for each in found}
                debts += [each for each in found if 0 < each.owed_ms < math.inf]
        return debts

    def write(self, store: Store, debts: Iterable[SensorDebt], now_ms: float) -> None:
        """Write what is owed now, as far as that is not kept by now. Raises StateError."""
        parts: dict[int, dict[str, SensorDebt]] = {}
        for debt in debts:
            parts.setdefault(crc32(debt.name.encode()) % DEBT_PARTS, {})[debt.name] = debt
        records: list[Record] = []
        kept = dict(self._kept)
        for number in parts.keys() | kept.keys():
            owed = parts.get(number, {})
            until_ms = {name: now_ms + debt.owed_ms for name, debt in owed.items()}
            if not owed:
                del kept[number]
            elif self._has_moved(number, until_ms, now_ms):
                kept[number] = until_ms
                records.append(debts_record(f"{DEBTS}{number}", owed.values()))
        gone = [f"{DEBTS}{number}" for number in self._kept.keys() - kept.keys()]
        if records or gone:
            store.put_many(records, delete=gone)
        self._kept = kept

    def _has_moved(self, number: int, until_ms: Mapping[str, float], now_ms: float) -> bool:
        """Return whether what a part owes is not what is kept of it, less the time."""
        kept = self._kept.get(number, {})
        least_ms = now_ms + LEAST_KEPT_MS
        return any(
            abs(until_ms.get(name, least_ms) - max(kept.get(name, least_ms), least_ms))
            > MOVED_DEBT_MS
            for name in until_ms.keys() | kept.keys()
        )


class DebtWriter:
    """Writes what clients owe each second. `take` first; `close` it before the store is closed.

    Where the state is no file nothing is kept: memory forgets it, and a topic would grow by each
    second of each client that is held.
    """

    def __init__(self, state_kind: str, quotas: QuotaManager, slices: TimeSlicer) -> None:
        self._is_kept = state_kind == "sqlite"
        self._quotas, self._slices = quotas, slices
        self._records = DebtStore()
        self._store: Store | None = None
        self._writing = asyncio.Lock()

    async def take(self, store: Store) -> None:
        """Have clients owe what they did where another process served them, and write there.

        Raises StateError.
        """
        if self._is_kept:
            self._store = store
            debts = await asyncio.to_thread(self._records.read, store, clock_ms())
            self._quotas.take_debts(debts, clock_ms())

    async def run(self) -> None:
        """Write each second, until cancelled; what the state does not take now it takes later."""
        while True:
            await asyncio.sleep(KEPT_INTERVAL_S)
            await self._write()

    async def close(self) -> None:
        """Write what is owed now, and then no more."""
        await self._write()
        self._store = None

    async def _write(self) -> None:
        async with self._writing:
            if self._store is None:
                return
            walk = self._quotas.owing(lambda _: True, clock_ms, LEAST_KEPT_MS)
            debts = [debt for debt in await self._slices.collect(walk) if debt is not None]
            with suppress(StateError):  # the log tells of it where the store is watched
                await asyncio.to_thread(self._records.write, self._store, debts, clock_ms())
