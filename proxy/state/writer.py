"""Writes state from the event loop without stopping it."""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from .store import Record, Store


class StateWriter:
    """Writes to a store in a thread of its own, in the order of the calls.

    A write takes 0.1 to 10 ms, or longer than the other threads of a process can be spared while
    brokers are away. The store stays open on `close`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="state")

    async def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> None:
        """Delete keys and write records as `Store.put_many`, also if the caller is cancelled.

        Raises StateError when it could not be written, and RuntimeError after `close`.
        """
        write = partial(self._store.put_many, tuple(records), delete=tuple(delete))
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, write))

    async def close(self) -> None:
        """Write what was asked for, then end the thread; a second time does nothing."""
        await asyncio.to_thread(self._thread.shutdown)
