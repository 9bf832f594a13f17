"""What of a part's state is to be written, and how its records are keyed and read."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from .store import SEPARATOR, Json, Record

QUOTED_PARTS = 16_384
"""Parts of keys that are kept quoted: thousands of records differ in one part only."""

Item = TypeVar("Item", bound=Hashable)
Form = TypeVar("Form", bound=BaseModel)


@lru_cache(QUOTED_PARTS)
def _quoted(part: str) -> str:
    return quote(part, safe="", errors="surrogatepass")


@dataclass(frozen=True, slots=True)
class RecordFormat(Generic[Form]):
    """Records with keys `NAMESPACE/PART/PART...`, which a model checks when they are read."""

    namespace: str
    version: int
    form: type[Form]

    @property
    def prefix(self) -> str:
        """What all keys begin with."""
        return self.namespace + SEPARATOR

    def key(self, *parts: object) -> str:
        """Return the key of a record; each part is quoted as in URLs."""
        return SEPARATOR.join((self.namespace, *map(_quoted, map(str, parts))))

    def record(self, parts: tuple[object, ...], value: Json) -> Record:
        """Return the record of these parts; `value` is what the form reads."""
        return Record.of(self.key(*parts), value, self.version)

    def read(self, record: Record) -> Form:
        """Return what a record says. Raises ValueError with what is wrong with it, for people."""
        record.check_schema(self.version)
        try:
            return self.form.model_validate_json(record.text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None


class Journal(Generic[Item]):
    """Which records of a part are out of date, between two writes; an item stands for one record.

    `record_of` makes it when it is written, None when the item is to have none; `key_of` has its
    key.
    """

    def __init__(
        self, record_of: Callable[[Item], Record | None], key_of: Callable[[Item], str]
    ) -> None:
        self._record_of = record_of
        self._key_of = key_of
        self._changed: dict[Item, None] = {}
        self._deletes: dict[str, None] = {}
        self._taken: tuple[dict[Item, None], dict[str, None]] = {}, {}

    def __bool__(self) -> bool:
        return bool(self._changed or self._deletes)

    def mark_changed(self, item: Item) -> None:
        """Record that an item's record is out of date."""
        self._changed[item] = None

    def mark_removed(self, item: Item) -> None:
        """Record that an item is gone: its record is to be deleted."""
        self._changed.pop(item, None)
        self._deletes[self._key_of(item)] = None

    def forget(self, items: Iterable[Item]) -> None:
        """Write nothing of these items any more, and delete nothing: their records are others'.

        Nor is anything deleted that could not be so far: who has its record now is not known here.
        """
        for item in items:
            self._changed.pop(item, None)
            self._taken[0].pop(item, None)
        self._deletes.clear()
        self._taken[1].clear()

    def mark_deleted(self, key: str) -> None:
        """Record that the record of a key is to be deleted, unless it is written anew."""
        self._deletes[key] = None

    def take(self, max_items: int | None = None) -> tuple[list[Record], list[str]]:
        """Return what to write and which keys to delete, since the last call.

        At most `max_items` items are looked at (None: all). Keys to delete come with the last of
        them: what replaces them is written by then.
        """
        changed = dict.fromkeys(islice(self._changed, max_items))
        for item in changed:
            del self._changed[item]
        deletes: dict[str, None] = {}
        if not self._changed:
            deletes, self._deletes = self._deletes, {}
        self._taken = changed, deletes
        changes: dict[str, Record | None] = dict.fromkeys(deletes)
        for item in changed:
            record = self._record_of(item)
            if record is None:
                changes.setdefault(self._key_of(item))
            else:
                changes[record.key] = record
                self._deletes.pop(record.key, None)
        written = [record for record in changes.values() if record is not None]
        return written, [key for key, record in changes.items() if record is None]

    def give_back(self) -> None:
        """Put back what the last `take` returned: it could not be written."""
        changed, deletes = self._taken
        self._taken = {}, {}
        self._changed = changed | self._changed
        self._deletes = deletes | self._deletes
