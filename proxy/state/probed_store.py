"""Watches whether a store takes what is written."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress

from structlog import get_logger

from .store import Record, StateError, Store

PROBE_WRITE_INTERVAL_S = 30.0
"""In which something is written in any case."""

WATCH_KEY = "watch/written"

_log = get_logger(__name__)


class ProbedStore(Store):
    """Another store, and if it took the last write: that should not show at the next override.

    After `close` another one may come by `use`.
    """

    def __init__(self, store: Store) -> None:
        self.inner = store
        self.watch_key: Callable[[], str | None] = lambda: WATCH_KEY
        """Gives the key that `check` writes; None: there is none that may be written now."""
        self._is_idle = True
        """Whether nothing was written since the last check."""
        self.writable = True

    def use(self, store: Store) -> None:
        """Replace the store: the one before is closed, or was empty."""
        self.inner, self.writable = store, True

    def items(self, prefix: str) -> list[Record]:
        """Return the records whose key begins with `prefix`, sorted by key."""
        return self.inner.items(prefix)

    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> None:
        """Delete keys and write records, all or nothing."""
        try:
            self.inner.put_many(records, delete=delete)
        except StateError as error:
            if self.writable:
                _log.error("state not writable", problem=error.what, fix=error.fix)
            self.writable = False
            raise
        if not self.writable:
            _log.info("state writable again")
        self.writable, self._is_idle = True, False

    def close(self) -> None:
        """Close the state behind what is being written; a second time does nothing."""
        self._writing.submit(self._close).result()

    def _close(self) -> None:
        self.writable = False
        self.inner.close()

    async def watch(self) -> None:
        """Write something now and then when nobody else does, until cancelled."""
        while True:
            await asyncio.sleep(PROBE_WRITE_INTERVAL_S)
            await asyncio.to_thread(self.check)

    def check(self) -> None:
        """Write something if nothing was written since the last check, or if that failed."""
        if self._is_idle or not self.writable:
            key = self.watch_key()
            with suppress(StateError):
                if key is not None:
                    self.put(key, None)
        self._is_idle = True
