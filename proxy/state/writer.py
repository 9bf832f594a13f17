"""Writes state from the event loop without stopping it."""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from .store import Record, Store


class StateWriter:
    """Writes to a store in one thread, in the order of the calls, which are of one event loop.

    What is asked for while a transaction (0.1 to 10 ms) is on its way goes together into the next.
    The store stays open on `close`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="state")
        self._writing = asyncio.Lock()
        self._changes: dict[str, Record | None] = {}
        """To be written next, by key; None: to be deleted."""
        self._next: asyncio.Task[None] | None = None
        """Writes them when it has the lock."""
        self._closed = False

    async def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> None:
        """Delete keys and write records as `Store.put_many`, also if the caller is cancelled.

        Raises StateError when it could not be written, nor what was asked for at the same time,
        and RuntimeError after `close`.
        """
        if self._closed:
            raise RuntimeError("the state writer is closed")
        self._changes.update(dict.fromkeys(delete))
        self._changes.update({record.key: record for record in records})
        if self._next is None:
            self._next = asyncio.create_task(self._write_changes(), name="state-writer")
        await asyncio.shield(self._next)

    async def close(self) -> None:
        """Write what was asked for, then end the thread; a second time does nothing."""
        self._closed = True
        if self._next is not None:
            await asyncio.wait((self._next,))
        async with self._writing:
            self._thread.shutdown()

    async def _write_changes(self) -> None:
        async with self._writing:
            changes, self._changes, self._next = self._changes, {}, None
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._write, changes)

    def _write(self, changes: dict[str, Record | None]) -> None:
        self._store.put_many(
            [record for record in changes.values() if record is not None],
            delete=[key for key, record in changes.items() if record is None],
        )
