"""The records of the slots that a machine reads, in memory."""

from collections.abc import Callable, Collection, Mapping
from threading import Lock

from proxy.state.store import Record

from .messages import Content, Place, size_of


class SlotRecords:
    """Records by slot and key, changed by one thread and read by several.

    The slot of a record follows from the rules, and they may change. What then stands in another
    slot than it belongs to is a stray: it is not found, as what is written or deleted in the right
    slot counts, and that may be on another machine.
    """

    def __init__(self, slot_of_record: Callable[[str], int]) -> None:
        self._slot_of = slot_of_record
        self._slots: dict[int, dict[str, Record]] = {}
        self._lock = Lock()
        self.size_bytes = 0
        """Of all keys and values."""

    def place(self, key: str) -> Place:
        """Return where the record of that key belongs."""
        return self._slot_of(key), key

    def at(self, place: Place) -> Record | None:
        """Return the record that stands there, or None: there is none, or the slot is not read."""
        slot, key = place
        with self._lock:
            return self._slots.get(slot, {}).get(key)

    def items(self, prefix: str) -> list[Record]:
        """Return the records of all slots whose key begins with `prefix`, sorted by key."""
        found = [record for slot, record in self._all(prefix) if self._slot_of(record.key) == slot]
        return sorted(found, key=lambda record: record.key)

    def strays(self, slots: Collection[int]) -> dict[Place, Record]:
        """Return the records in these slots that belong to another by now, by where they stand."""
        return {
            (slot, record.key): record
            for slot, record in self._all("")
            if slot in slots and self._slot_of(record.key) != slot
        }

    def change(self, changes: Mapping[Place, Content]) -> set[str]:
        """Write records, or delete those that are None; return the keys that differ now."""
        changed: set[str] = set()
        with self._lock:
            for (slot, key), content in changes.items():
                records = self._slots.setdefault(slot, {})
                before = records.pop(key, None)
                if isinstance(content, Record):
                    records[key] = content
                if records.get(key) != before:
                    changed.add(key)
                    self.size_bytes += size_of(content) - size_of(before)
        return changed

    def replace(self, slots: Collection[int], records: Mapping[Place, Content]) -> set[str]:
        """Replace all that is in these slots; return the keys that differ now."""
        gone: dict[Place, Content] = {
            (slot, key): None for slot in slots for key in self._slots.get(slot, ())
        }
        return self.change({**gone, **records})

    def _all(self, prefix: str) -> list[tuple[int, Record]]:
        with self._lock:
            return [
                (slot, record)
                for slot, records in self._slots.items()
                for key, record in records.items()
                if key.startswith(prefix)
            ]
