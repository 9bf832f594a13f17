"""Reads the state file that another process has locked, to see whether a successor could use it."""

import fcntl
import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from struct import Struct
from tempfile import TemporaryDirectory

from .sqlite import explain_failure, identify, log_of, migrate
from .store import MemoryStore, Record, StateError

COPIES = 20
COPY_PAUSE_S = 0.1
"""A copy during which the owner wrote is of no use, and is made again after so long."""

_LOCK = Struct("hhqqi4x")  # Linux's flock: type, whence, start, length, process
_LOCK_START, _LOCK_LENGTH = 0x4000_0000, 512  # the bytes that SQLite locks

Stamp = tuple[tuple[int, int, int], ...]
"""Which files there are, and how they were written last."""


def read_snapshot(path: Path, owner: int) -> MemoryStore:
    """Return what is in a state file that process `owner` has, or will make; change nothing.

    Never for a file that this process has open itself: that would take the lock off it.
    Raises StateError when another process has it, when it is damaged or of no use otherwise, and
    when the owner never stops writing.
    """
    store = MemoryStore()
    try:
        if not path.exists():
            return store
        holder = _holder(path)
        if holder not in (None, owner):
            raise StateError(
                f"{path} is in use by process {holder}, and not by process {owner}",
                "name the process that has it, or another file as state.path",
            )
        with TemporaryDirectory(prefix="quota-proxy-") as folder:
            store.put_many(_records(path, _copy(path, Path(folder))))
    except OSError as error:
        fix = "let quota-proxy read it, and make room for a copy of it in the directory for such"
        raise StateError(f"{path} cannot be looked at: {error}", fix) from None
    return store


def _copy(path: Path, folder: Path) -> Path:
    copy = folder / path.name
    for _ in range(COPIES):
        before = _stamp(path)
        shutil.copyfile(path, copy)
        if (log := log_of(path)).exists():
            shutil.copyfile(log, log_of(copy))
        if _stamp(path) == before:
            return copy
        log_of(copy).unlink(missing_ok=True)
        time.sleep(COPY_PAUSE_S)
    raise StateError(f"{path} cannot be looked at: it is being written all the time", "try again")


def _records(path: Path, copy: Path) -> list[Record]:
    try:
        with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
            migrate(connection, identify(connection, str(path)))
            rows = connection.execute("SELECT key, value, version FROM record").fetchall()
    except sqlite3.Error as error:
        raise explain_failure(str(path), error) from error
    return [Record(*row) for row in rows]


def _holder(path: Path) -> int | None:
    """Return the process that has the file locked, None if none has."""
    with path.open("rb+") as file:
        wanted = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _LOCK_START, _LOCK_LENGTH, 0)
        kind, *_, pid = _LOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, wanted))
    return None if kind == fcntl.F_UNLCK else int(pid)


def _stamp(path: Path) -> Stamp:
    found = (each.stat() for each in (path, log_of(path)) if each.exists())
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found)
