"""What of a part's state is to be written: which of its things have changed, which keys go."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from .store import Record

Thing = TypeVar("Thing", bound=Hashable)


class Due(Generic[Thing]):
    """Collects between two writes what the next one is to do.

    Args:
        record_of: makes the record of a thing; None when it is to have none.
        key_of: its record's key.

    """

    def __init__(
        self, record_of: Callable[[Thing], Record | None], key_of: Callable[[Thing], str]
    ) -> None:
        self._record_of = record_of
        self._key_of = key_of
        self._changed: dict[Thing, None] = {}
        self._deletes: dict[str, None] = {}
        self._taken: tuple[dict[Thing, None], dict[str, None]] = {}, {}

    def changed(self, thing: Thing) -> None:
        """Take note that a thing's record is out of date."""
        self._changed[thing] = None

    def removed(self, thing: Thing) -> None:
        """Take note that a thing is gone: its record is to be deleted."""
        self._changed.pop(thing, None)
        self.delete(self._key_of(thing))

    def delete(self, key: str) -> None:
        """Take note that a record is to be deleted, unless it is written anew."""
        self._deletes[key] = None

    def take(self) -> tuple[list[Record], list[str]]:
        """Return what to write and which keys to delete, since the last call."""
        self._taken = changed, deletes = self._changed, self._deletes
        self._changed, self._deletes = {}, {}
        records: list[Record] = []
        gone = dict(deletes)
        for thing in changed:
            record = self._record_of(thing)
            if record is None:
                gone[self._key_of(thing)] = None
            else:
                records.append(record)
        written = {record.key for record in records}
        return records, [key for key in gone if key not in written]

    def give_back(self) -> None:
        """Put back what the last `take` returned: it could not be written."""
        changed, deletes = self._taken
        self._taken = {}, {}
        self._changed = changed | self._changed
        self._deletes = deletes | self._deletes
