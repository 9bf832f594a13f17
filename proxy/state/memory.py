"""State that lasts as long as the process: for trials and tests."""

from collections.abc import Iterable
from threading import Lock

from .store import Record, Store


class MemoryStore(Store):
    """Records in a dictionary; what is read is always a copy, as with a file."""

    def __init__(self) -> None:
        self._records: dict[str, Record] | None = {}
        self._lock = Lock()

    def get(self, key: str) -> Record | None:
        """Return the record of that key, or None."""
        with self._lock:
            return self._open().get(key)

    def items(self, prefix: str) -> list[Record]:
        """Return the records whose key begins with `prefix`, sorted by key."""
        with self._lock:
            records = [item for key, item in self._open().items() if key.startswith(prefix)]
        return sorted(records, key=lambda record: record.key)

    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> int:
        """Delete keys and write records, all or nothing; return how many were deleted."""
        new = {record.key: record for record in records}
        gone = tuple(delete)
        with self._lock:
            kept = self._open()
            deleted = sum(kept.pop(key, None) is not None for key in gone)
            kept.update(new)
        return deleted

    def close(self) -> None:
        """Forget everything."""
        self._records = None

    def _open(self) -> dict[str, Record]:
        if self._records is None:
            raise RuntimeError("the state is closed")
        return self._records
