"""Watches whether a store takes what is written: it should not show at the next override."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from structlog import get_logger

from .store import Record, StateError, Store

WRITE_INTERVAL_S = 30.0
"""In which something is written in any case."""

WATCH_KEY = "watch/written"

_log = get_logger(__name__)


class WatchedStore(Store):
    """Another store, and whether it took the last write.

    It may be closed while others go on, for another proxy: then a write raises StateError.
    """

    def __init__(self, store: Store) -> None:
        self.inner = store
        self._closed = False
        self._is_idle = True
        """Whether nothing was written since the last check."""
        self.writable = True

    def use(self, store: Store) -> None:
        """Replace the store: the one before is closed, or was empty."""
        self.inner, self._closed, self.writable = store, False, True

    def get(self, key: str) -> Record | None:
        """Return the record of that key, or None."""
        return self.inner.get(key)

    def items(self, prefix: str) -> list[Record]:
        """Return the records whose key begins with `prefix`, sorted by key."""
        return self.inner.items(prefix)

    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> int:
        """Delete keys and write records, all or nothing; return how many were deleted."""
        try:
            deleted = self.inner.put_many(records, delete=delete)
        except StateError as error:
            if self.writable:
                _log.error("state not writable", problem=error.what, fix=error.fix)
            self.writable = False
            raise
        except RuntimeError:
            if not self._closed:
                raise
            fix = "ask that one; or wait until this one has it again"
            raise StateError("the state is released to another proxy", fix) from None
        if not self.writable:
            _log.info("state writable again")
        self.writable, self._is_idle = True, False
        return deleted

    def close(self) -> None:
        """Close the state; a second time does nothing."""
        self._closed = True
        self.inner.close()

    async def watch(self) -> None:
        """Write something now and then when nobody else does, until cancelled."""
        while True:
            await asyncio.sleep(WRITE_INTERVAL_S)
            await asyncio.to_thread(self.check)

    def check(self) -> None:
        """Write something if nothing was written since the last check, or if that failed."""
        if not self._closed and (self._is_idle or not self.writable):
            with suppress(StateError):
                self.put(WATCH_KEY, None)
        self._is_idle = True
