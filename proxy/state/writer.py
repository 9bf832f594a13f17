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
        self._changes: dict[str, Record | None] = {}
        """To be written next, by key; None: to be deleted."""
        self._waiters: list[asyncio.Future[None]] = []
        """Of those who asked for it."""
        self._task: asyncio.Task[None] | None = None
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
        done = asyncio.get_running_loop().create_future()
        self._waiters.append(done)
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="state-writer")
        await done

    async def close(self) -> None:
        """Write what was asked for, then end the thread; a second time does nothing."""
        self._closed = True
        if self._task is not None:
            await asyncio.wait((self._task,))
        self._thread.shutdown()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiters:
                changes, self._changes = self._changes, {}
                waiters, self._waiters = self._waiters, []
                error: Exception | None = None
                try:
                    await loop.run_in_executor(self._thread, self._write, changes)
                except Exception as caught:  # it belongs to those who wait for it
                    error = caught
                for done in waiters:
                    if done.done():  # its caller was cancelled
                        continue
                    if error is None:
                        done.set_result(None)
                    else:
                        done.set_exception(error)
        finally:
            self._task = None

    def _write(self, changes: dict[str, Record | None]) -> None:
        self._store.put_many(
            [record for record in changes.values() if record is not None],
            delete=[key for key, record in changes.items() if record is None],
        )
