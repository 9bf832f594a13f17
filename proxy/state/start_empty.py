"""Opens a state file, or where that is damaged a new one, and keeps the damaged one aside."""

import time
from itertools import count
from pathlib import Path

from structlog import get_logger

from .sqlite import DamagedError, SqliteStore, log_of
from .store import StateError

_log = get_logger(__name__)


def open_or_start_empty(path: Path, *, wait_ms: float = 0.0) -> SqliteStore:
    """Return the state in a file, of which every record can be read, or an empty one.

    The damaged file is renamed then, and the log says so. Raises StateError for what is no damage,
    and for a damaged file that cannot be renamed.
    """
    try:
        return _open_whole(path, wait_ms)
    except DamagedError as error:
        kept = _set_aside(path)
        _log.error(
            "the state is damaged, starting without its overrides and positions",
            problem=error.what,
            kept=str(kept),
            fix="restore it from a backup, or set the overrides again",
        )
    return SqliteStore(path, wait_ms=wait_ms)


def _open_whole(path: Path, wait_ms: float) -> SqliteStore:
    store = SqliteStore(path, wait_ms=wait_ms)
    try:
        store.items("")
    except BaseException:
        store.close()
        raise
    return store


def _set_aside(path: Path) -> Path:
    """Rename the file, and what SQLite keeps beside it; return its new name."""
    day = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    names = (path.with_name(f"{path.name}.damaged-{day}-{number}") for number in count(1))
    try:
        kept = next(name for name in names if not name.exists())
        path.rename(kept)
        if log_of(path).exists():
            log_of(path).rename(log_of(kept))
    except OSError as error:
        what = f"{path} is damaged, and cannot be renamed: {error.strerror}"
        raise StateError(what, "let quota-proxy write to its directory, or move it away") from None
    return kept
