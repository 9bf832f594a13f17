"""Write state from the event loop without stopping it."""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .store import Record, Store


@dataclass(frozen=True, slots=True)
class _Write:
    records: tuple[Record, ...]
    delete: tuple[str, ...]
    done: asyncio.Future[None]


class StateWriter:
    """Writes to a store in one thread, in the order of the calls.

    A disk takes from a tenth of a millisecond to ten for each transaction. What is asked for while
    one is on its way goes together into the next one, so a thousand writers wait for two
    transactions, not for a thousand, and the event loop for none.

    Make and use it within one event loop. The store stays open on `close`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="state")
        self._waiting: list[_Write] = []
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> None:
        """Delete keys and write records, all or nothing, as `Store.put_many`; then return.

        A caller that is cancelled while it waits does not take its write back.

        Raises:
            StateError: it could not be written; nor could what was asked for at the same time,
                whose callers are told as well.
            RuntimeError: after `close`.

        """
        if self._closed:
            raise RuntimeError("the state writer is closed")
        write = _Write(tuple(records), tuple(delete), asyncio.get_running_loop().create_future())
        self._waiting.append(write)
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="state-writer")
        await write.done

    async def close(self) -> None:
        """Write what was asked for, then end the thread; a second time does nothing."""
        self._closed = True
        if self._task is not None:
            await asyncio.wait((self._task,))
        self._thread.shutdown()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                writes, self._waiting = self._waiting, []
                try:
                    await loop.run_in_executor(self._thread, self._write, writes)
                except Exception as error:  # it belongs to those who wait for it
                    _finish(writes, error)
                else:
                    _finish(writes, None)
        finally:
            self._task = None

    def _write(self, writes: list[_Write]) -> None:
        changes: dict[str, Record | None] = {}
        for write in writes:
            changes.update(dict.fromkeys(write.delete))
            changes.update({record.key: record for record in write.records})
        self._store.put_many(
            [record for record in changes.values() if record is not None],
            delete=[key for key, record in changes.items() if record is None],
        )


def _finish(writes: list[_Write], error: Exception | None) -> None:
    for write in writes:
        if write.done.done():  # its caller was cancelled
            continue
        if error is None:
            write.done.set_result(None)
        else:
            write.done.set_exception(error)
