"""What of a part's state is to be written, how its records are keyed and read, and documents."""

from collections.abc import Container
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar
from urllib.parse import quote, unquote

from pydantic import BaseModel, TypeAdapter, ValidationError

from .store import SEPARATOR, Json, Record

QUOTED_PARTS = 16_384
"""Parts of keys that are kept quoted: thousands of records differ in one part only."""

Form = TypeVar("Form", bound=BaseModel)


@lru_cache(QUOTED_PARTS)
def _quoted(part: str) -> str:
    return quote(part, safe="", errors="surrogatepass")


def key_parts(key: str) -> list[str]:
    """Return the namespace of a key and its other parts, as `RecordFormat.key` was given them."""
    return [unquote(part, errors="surrogatepass") for part in key.split(SEPARATOR)]


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


class JsonDataclass:
    """A dataclass with a JSON object of its fields."""

    __slots__ = ()

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it; `of` reads that."""
        document: dict[str, Any] = self._adapter().dump_python(self, mode="json", by_alias=True)
        return document

    @classmethod
    def of(cls, document: object) -> Self:
        """Read a `document`. Raises ValueError for anything else."""
        read: Self = cls._adapter().validate_python(document)
        return read

    @classmethod
    @cache
    def _adapter(cls) -> TypeAdapter[Any]:
        return TypeAdapter(cls)


class RecordSource(Protocol):
    """Something that has records in the state: one for each of its items."""

    def key(self, *item: Any, **_: Any) -> str:
        """Return the key of an item's record."""

    def record(self, *item: Any, **_: Any) -> Record | None:
        """Make an item's record; None when it is to have none."""


UnwrittenItem: TypeAlias = tuple[Any, ...]
"""A RecordSource, and which of its items."""


class UnwrittenRecords:
    """Which records of a member's parts are out of date, between two writes.

    Parts that leave for another member are written to the end; then `forget_leaving`.
    """

    def __init__(self, max_items: int | None = None) -> None:
        """`max_items`: in one write; None: all."""
        self.max_items = max_items
        self.leaving: set[Any] = set()
        self.changed: dict[UnwrittenItem, None] = {}
        """For reading."""
        self._deletes: dict[str, None] = {}
        self._taken: tuple[dict[UnwrittenItem, None], dict[str, None]] = {}, {}

    def __bool__(self) -> bool:
        return bool(self.changed or self._deletes)

    def mark_changed(self, part: RecordSource, *item: Any) -> None:
        """Record that an item's record is out of date."""
        self.changed[part, *item] = None

    def mark_removed(self, part: RecordSource, *item: Any) -> None:
        """Record that an item is gone: its record is to be deleted."""
        self.changed.pop((part, *item), None)
        self._deletes[part.key(*item)] = None

    def mark_deleted(self, key: str) -> None:
        """Record that the record of a key is to be deleted, unless it is written anew."""
        self._deletes[key] = None

    def forget(self, parts: Container[RecordSource]) -> None:
        """Write nothing of these parts any more, also of what was just taken."""
        for items in (self.changed, self._taken[0]):
            for item in [item for item in items if item[0] in parts]:
                del items[item]

    def forget_leaving(self) -> bool:
        """Write nothing more of what has left; return whether all of it was written.

        Nothing is deleted then that could not be so far: who has its record now is not known here.
        """
        gone, self.leaving = self.leaving, set()
        is_kept = not any(item[0] in gone for item in self.changed)
        if gone:
            self.forget(gone)
            self._deletes.clear()
            self._taken[1].clear()
        return is_kept

    def take(self) -> tuple[list[Record], list[str]]:
        """Return what to write and which keys to delete, since the last call.

        At most `max_items` items are looked at. Keys to delete come with the last of them: what
        replaces them is written by then.
        """
        changed = dict.fromkeys(islice(self.changed, self.max_items))
        for item in changed:
            del self.changed[item]
        deletes: dict[str, None] = {}
        if not self.changed:
            deletes, self._deletes = self._deletes, {}
        self._taken = changed, deletes
        changes: dict[str, Record | None] = dict.fromkeys(deletes)
        for part, *which in changed:
            record = part.record(*which)
            if record is None:
                changes.setdefault(part.key(*which))
            else:
                changes[record.key] = record
                self._deletes.pop(record.key, None)
        written = [record for record in changes.values() if record is not None]
        return written, [key for key, record in changes.items() if record is None]

    def give_back(self) -> None:
        """Put back what the last `take` returned: it could not be written."""
        changed, deletes = self._taken
        self._taken = {}, {}
        self.changed = changed | self.changed
        self._deletes = deletes | self._deletes
