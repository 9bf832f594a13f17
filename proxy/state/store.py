"""What a store of state is: records by key, written together or not at all; one in memory."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Lock
from typing import Any, TypeAlias

from proxy.errors import ProxyError

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
"""A value as JSON has it. It is read back as `dict`, `list` and so on; a tuple becomes a list."""

Document: TypeAlias = Mapping[str, Any]
"""A JSON object."""

SEPARATOR = "/"
"""Ends the namespace of a key: `quotas/user=alice`."""

_to_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class StateError(ProxyError):
    """State cannot be read or written, and is as it was."""


class DamagedStateError(StateError):
    """What is kept cannot be read, and never will be."""


class ClosedError(StateError):
    """The state was closed."""

    def __init__(self) -> None:
        super().__init__(
            "the state is not open, since another proxy took it over or it could not be opened",
            "wait for the end of the take-over; after one that failed restart quota-proxy",
        )


class UnknownSchemaError(ValueError):
    """A record was written by another version of the program, and is to be left as it is."""


@dataclass(frozen=True, slots=True)
class Record:
    """One value, as JSON text, under its key; make it with `of`."""

    key: str
    text: str
    version: int
    """Of the value's form, 1 or more: how to read what an older program wrote."""

    @classmethod
    def of(cls, key: str, value: Json, version: int = 1) -> "Record":
        """Make a record that every store takes.

        `key` is `NAMESPACE/NAME`, printable; quote what may be anything else. Raises ValueError
        for another key, a value that JSON cannot express (as NaN), or a version below 1.
        """
        namespace, _, name = key.partition(SEPARATOR)
        if not (namespace and name and key.isprintable()):
            raise ValueError(f"{key!r} is no key: write NAMESPACE{SEPARATOR}NAME, printable")
        if version < 1:
            raise ValueError(f"the version of {key!r} must be 1 or more, not {version}")
        try:
            text = _to_json(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the value of {key!r} cannot be written as JSON: {error}") from error
        return cls(key, text, version)

    def check_schema(self, known: int) -> None:
        """Raise UnknownSchemaError, with what is wrong, when the value has a form not known."""
        if self.version != known:
            text = f"it has form {self.version}, this version of quota-proxy knows {known}"
            raise UnknownSchemaError(text)

    @property
    def value(self) -> Json:
        """The value, a new copy each time. Raises DamagedStateError when the text is not JSON."""
        try:
            value: Json = json.loads(self.text)
        except (TypeError, ValueError, RecursionError) as error:
            raise DamagedStateError(
                f"the value of {self.key!r} in the state is damaged: {error}",
                "restore the state from a backup, or remove this record",
            ) from error
        return value


class Store(ABC):
    """Records by key, kept until they are deleted; may be used from several threads.

    What was written is kept when the method returns; nothing of it when it raised. Every method
    raises StateError when the state cannot be read or written, a ClosedError after `close`.
    """

    def get(self, key: str) -> Record | None:
        """Return the record of that key, or None."""
        return next((record for record in self.items(key) if record.key == key), None)

    @abstractmethod
    def items(self, prefix: str) -> list[Record]:
        """Return the records whose key begins with `prefix`, sorted by key."""

    @abstractmethod
    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> None:
        """Delete keys, then write records, all or nothing; of two with one key the later stays."""

    @cached_property
    def _writing(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="state")

    async def write(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> None:
        """Write as `put_many` for the event loop, in the order of the calls, also if cancelled.

        It is in a thread of its own: a write takes 0.1 to 10 ms, or longer than the other threads
        of a process can be spared while brokers are away.
        """
        work = partial(self.put_many, tuple(records), delete=tuple(delete))
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._writing, work))

    def put(self, key: str, value: Json, version: int = 1) -> Record:
        """Write one value, as `Record.of` makes it; return the record."""
        record = Record.of(key, value, version)
        self.put_many((record,))
        return record

    @abstractmethod
    def close(self) -> None:
        """Close the state; a second time does nothing."""


class MemoryStore(Store):
    """Records in a dictionary, as long as the process lasts: for trials and tests."""

    def __init__(self) -> None:
        self._records: dict[str, Record] | None = {}
        self._lock = Lock()

    def items(self, prefix: str) -> list[Record]:
        """Return the records whose key begins with `prefix`, sorted by key."""
        with self._lock:
            records = [item for key, item in self._open().items() if key.startswith(prefix)]
        return sorted(records, key=lambda record: record.key)

    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> None:
        """Delete keys and write records, all or nothing."""
        new = {record.key: record for record in records}
        gone = tuple(delete)
        with self._lock:
            kept = self._open()
            for key in gone:
                kept.pop(key, None)
            kept.update(new)

    def close(self) -> None:
        """Forget everything."""
        self._records = None

    def _open(self) -> dict[str, Record]:
        if self._records is None:
            raise ClosedError
        return self._records
