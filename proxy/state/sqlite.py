"""State in one SQLite file that survives a crash, owned by one proxy at a time.

A write is a transaction in the write-ahead log, with `synchronous=FULL`: it is on the disk when
the call returns, also if the power fails. NORMAL would be ten times quicker (15 us instead of
180 us on a cloud disk), but may lose the last writes with the power: an override, or progress.
"""

import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from struct import Struct
from tempfile import TemporaryDirectory
from threading import Lock

from structlog import get_logger

from .store import ClosedError, DamagedStateError, MemoryStore, Record, StateError, Store

_log = get_logger(__name__)

APPLICATION_ID = 0x4B515072
"""Marks the file as ours in its header (`PRAGMA application_id`): the letters KQPr."""

SCHEMA = 1
"""Of the file (`PRAGMA user_version`). Who changes the table counts on, and mends older files."""

# No ROWID: the table is one tree ordered by key, so a prefix is one range of it.
TABLE = (
    "CREATE TABLE record ("
    " key TEXT NOT NULL PRIMARY KEY,"
    " version INTEGER NOT NULL,"
    " value TEXT NOT NULL"
    ") WITHOUT ROWID"
)

LAST_CHARACTER = "\U0010ffff"
"""Sorts behind everything that may stand in a key."""

PRIVATE_MODE = 0o600
"""Of the file: who may change what is in it, and who did, is nobody else's business."""

IDENTITY = ("st_dev", "st_ino")
"""Tells whether a file is the same one."""

WRITTEN = ("st_ino", "st_size", "st_mtime_ns")
"""Tells whether a file was written."""

LOCK_WAIT_S = 1.0
"""A process that was killed has the file for a moment still."""

COPIES = 20
COPY_PAUSE_S = 0.1
"""A copy during which the owner wrote is of no use, and is made again after so long."""

_LOCK = Struct("hhqqi4x")  # Linux's flock: type, whence, start, length, process
_LOCK_START, _LOCK_LENGTH = 0x4000_0000, 512  # the bytes that SQLite locks

PRIMARY_CODE = 0xFF
"""The part of SQLite's result code that says the kind of error."""


class SqliteStore(Store):
    """Records in a SQLite file, which is made when it does not exist.

    The file is locked until `close` or the end of the process: two proxies would each go on with
    what they read at start. Errors speak of `name`, the path by default.

    Raises StateError, and leaves the file as it is, when it cannot be opened, is in use, damaged (a
    DamagedStateError), not ours, or too new. A write raises it when either file was deleted or
    replaced since: it would be lost with the file that is open.
    """

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self._path = path
        self._name = name or str(path)
        self._lock = Lock()
        with self._explained(), ExitStack() as failing:
            with suppress(OSError):  # SQLite says what goes wrong
                path.touch(PRIVATE_MODE, exist_ok=False)
            connection = sqlite3.connect(
                path,
                timeout=LOCK_WAIT_S,
                isolation_level=None,  # transactions begin and end where we say so
                check_same_thread=False,  # the lock is ours
            )
            failing.callback(connection.close)
            # Set before the first access, so that SQLite shares no memory and the lock stays.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            is_new = _identify(connection, self._name)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            # Fails now, not at the first write, when the file may only be read.
            connection.execute("BEGIN EXCLUSIVE")
            if is_new:
                connection.execute(TABLE)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA}")
            connection.execute("COMMIT")
            connection.execute("SELECT key, value, version FROM record LIMIT 0")
            failing.pop_all()
        self.connection: sqlite3.Connection | None = connection
        self._files = _files_there(path, *IDENTITY)

    def items(self, prefix: str) -> list[Record]:
        """Return the records whose key begins with `prefix`, sorted by key."""
        with self._use() as connection:
            rows = connection.execute(
                "SELECT key, value, version FROM record WHERE key >= ? AND key < ? ORDER BY key",
                (prefix, prefix + LAST_CHARACTER),
            ).fetchall()
        return [Record(*row) for row in rows]

    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> None:
        """Delete keys and write records, all or nothing."""
        rows = [(record.key, record.text, record.version) for record in records]
        gone = [(key,) for key in delete]
        with self._use() as connection, connection:  # commits, or rolls back after an error
            self._check_files()
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("DELETE FROM record WHERE key = ?", gone)
            connection.executemany(
                "INSERT OR REPLACE INTO record (key, value, version) VALUES (?, ?, ?)", rows
            )

    def _check_files(self) -> None:
        """Raise StateError when what is written now would be lost."""
        if _files_there(self._path, *IDENTITY) != self._files:
            fix = "GET /v1/quotas shows the overrides in force: note them, restart quota-proxy, "
            raise StateError(
                f"{self._name} was deleted or replaced while it is in use, so nothing can be kept",
                f"{fix}which begins with the file that is there then, and set them again",
            )

    def close(self) -> None:
        """Close and unlock the file; the log beside it goes too."""
        with self._lock, self._explained():
            connection, self.connection = self.connection, None
            if connection is not None:
                connection.close()

    @contextmanager
    def _use(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._explained():
            if self.connection is None:
                raise ClosedError
            yield self.connection

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _explain_failure(self._name, error) from error


def _files_there(path: Path, *fields: str) -> tuple[tuple[int, ...] | None, ...]:
    """Return these figures of the file and of its log, None for one that is not there."""
    found: list[tuple[int, ...] | None] = [None, None]
    for number, each in enumerate((path, wal_of(path))):
        with suppress(OSError):
            stat = each.stat()
            found[number] = tuple(getattr(stat, field) for field in fields)
    return tuple(found)


def wal_of(path: Path) -> Path:
    """Return where SQLite keeps what is not in the file yet, while the file is open."""
    return path.with_name(path.name + "-wal")


def _identify(connection: sqlite3.Connection, path: str) -> bool:
    """Return whether a file is an empty one; change nothing.

    Raises StateError when it is of another program, a newer one, or damaged, and sqlite3.Error when
    it cannot be read.
    """
    query = (
        "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_master)"
        " FROM pragma_application_id, pragma_user_version"
    )
    application_id, schema, tables = map(int, connection.execute(query).fetchone())
    if not (application_id or schema or tables):
        return True
    if application_id != APPLICATION_ID:
        what = f"{path} is a database of another program"
        raise StateError(what, "name another file as state.path")
    if schema > SCHEMA:
        raise StateError(
            f"{path} was written by a newer version of quota-proxy: its schema is {schema}, "
            f"this version knows {SCHEMA}",
            "start that version, restore a backup, or name another file as state.path",
        )
    (finding,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if finding != "ok":
        raise _damaged(path, finding.splitlines()[-1])
    return False


def _damaged(path: str, finding: str) -> StateError:
    fix = "restore it from a backup, or move it away to start without the overrides and positions "
    return DamagedStateError(f"{path} is damaged: {finding}", f"{fix}that it holds")


def _explain_failure(path: str, error: sqlite3.Error) -> StateError:
    """Return SQLite's error in words that help."""
    # Errors of Python's own layer, such as text that is not UTF-8, have no code of SQLite.
    match getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & PRIMARY_CODE:
        case sqlite3.SQLITE_NOTADB:
            fix = "name another file as state.path, or restore this one from a backup"
            return DamagedStateError(f"{path} is not a state file: {error}", fix)
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_ERROR:
            return _damaged(path, str(error))
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            what = "is in use by another process, most likely another quota-proxy"
            fix = "stop that one, or give each proxy a state.path of its own"
        case sqlite3.SQLITE_FULL:
            what, fix = f"cannot grow: {error}", "make room on its disk"
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM | sqlite3.SQLITE_READONLY:
            what = f"cannot be opened for writing: {error}"
            fix = "let quota-proxy write to the file and its directory"
        case _:
            what = f"cannot be read or written: {error}"
            fix = "check its disk, and that quota-proxy may write to the file and its directory"
    return StateError(f"{path} {what}", fix)


def open_or_start_empty(path: Path) -> SqliteStore:
    """Return the state in a file, of which every record can be read, or an empty one.

    The damaged file is renamed then, and the log says so. Raises StateError for what is no damage,
    and for a damaged file that cannot be renamed.
    """
    try:
        with closing(SqliteStore(path)) as store:
            _ = [each.value for each in store.items("")]
    except DamagedStateError as error:
        kept = _set_aside(path)
        _log.error(
            "the state is damaged, starting without its overrides and positions",
            problem=error.what,
            kept=str(kept),
            fix="restore it from a backup, or set the overrides again",
        )
    return SqliteStore(path)


def _set_aside(path: Path) -> Path:
    """Rename the file, and what SQLite keeps beside it; return its new name."""
    day = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    names = (path.with_name(f"{path.name}.damaged-{day}-{number}") for number in count(1))
    try:
        kept = next(name for name in names if not name.exists())
        path.rename(kept)
        if wal_of(path).exists():
            wal_of(path).rename(wal_of(kept))
    except OSError as error:
        what = f"{path} is damaged, and cannot be renamed: {error.strerror}"
        raise StateError(what, "let quota-proxy write to its directory, or move it away") from None
    return kept


def read_live_state(path: Path, owner: int) -> MemoryStore:
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
        with (
            TemporaryDirectory(prefix="quota-proxy-") as folder,
            closing(SqliteStore(_copy(path, Path(folder)), name=str(path))) as copy,
        ):
            store.put_many(copy.items(""))
    except OSError as error:
        fix = "let quota-proxy read it, and make room for a copy of it in the directory for such"
        raise StateError(f"{path} cannot be looked at: {error}", fix) from None
    return store


def _copy(path: Path, folder: Path) -> Path:
    copy = folder / path.name
    for _ in range(COPIES):
        before = _files_there(path, *WRITTEN)
        shutil.copyfile(path, copy)
        if (log := wal_of(path)).exists():
            shutil.copyfile(log, wal_of(copy))
        if _files_there(path, *WRITTEN) == before:
            return copy
        wal_of(copy).unlink(missing_ok=True)
        time.sleep(COPY_PAUSE_S)
    raise StateError(f"{path} cannot be looked at: it is being written all the time", "try again")


def _holder(path: Path) -> int | None:
    """Return the process that has the file locked, None if none has."""
    with path.open("rb+") as file:
        wanted = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _LOCK_START, _LOCK_LENGTH, 0)
        kind, *_, pid = _LOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, wanted))
    return None if kind == fcntl.F_UNLCK else int(pid)
