"""Keeps what the clients of a slot owe while the slot goes from one machine to another."""

import time
from collections.abc import Collection, Iterable
from typing import Any

from structlog import get_logger

from metrics.clock import MS_PER_SECOND
from proxy.state import Record, Store
from proxy.workers.tier_store import OWED, slot_key

_log = get_logger(__name__)


class OwedRecords:
    """The records, one for each slot, in the slot itself. All methods block."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, owed: Iterable[tuple[int, list[Any]]]) -> None:
        """Write debts, as `debt_row` makes them, with their slots. Raises StateError."""
        by_slot: dict[int, list[list[Any]]] = {}
        for slot, row in owed:
            by_slot.setdefault(slot, []).append(row)
        at_s = time.time()
        records = [
            Record.of(slot_key(OWED, slot), {"at_s": at_s, "owed": rows})
            for slot, rows in by_slot.items()
        ]
        if records:
            self._store.put_many(records)

    def take(self, slots: Collection[int]) -> list[list[Any]]:
        """Return what is still owed in these slots, and delete that. Raises StateError.

        The clock that it was written by may be another one: what is owed never becomes more.
        """
        keys = {slot_key(OWED, slot) for slot in slots}
        found = [record for key in keys if (record := self._store.get(key)) is not None]
        if not found:
            return []
        self._store.put_many((), delete=[record.key for record in found])
        owed: list[list[Any]] = []
        for record in found:
            try:
                owed += _still_owed(record)
            except (ValueError, KeyError, TypeError) as error:
                _log.warning("debts not taken over", record=record.key, error=str(error))
        return owed


def _still_owed(record: Record) -> list[list[Any]]:
    document: Any = record.value
    gone_ms = max(0.0, (time.time() - float(document["at_s"])) * MS_PER_SECOND)
    rows = []
    for *names, owed_ms in document["owed"]:
        if (left_ms := float(owed_ms) - gone_ms) > 0:
            rows.append([*names, left_ms])
    return rows
