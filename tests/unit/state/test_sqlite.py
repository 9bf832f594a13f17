"""The state file: what opens, what is refused untouched, and what a killed process leaves."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from proxy.state import Record, SqliteStore, StateError
from proxy.state.sqlite import APPLICATION_ID, SCHEMA

WRITER = """
import sys
from pathlib import Path
from proxy.state import Record, SqliteStore

store = SqliteStore(Path(sys.argv[1]))
number = 0
while True:
    number += 1
    store.put_many(
        [Record.of(f"pair/{side}", [number, "x" * 500]) for side in "ab"]
        + [Record.of(f"log/{number:06}", number)],
    )
    print(number, flush=True)
"""


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "state.db"


def filled(path: Path, records: int = 200) -> Path:
    with closing(SqliteStore(path)) as store:
        store.put_many(Record.of(f"a/{number:04}", "x" * 100) for number in range(records))
    return path


def plain(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def test_records_survive_a_restart_in_one_marked_file(path):
    with closing(SqliteStore(path)) as store:
        store.put("a/b", {"c": 1}, version=2)
    assert [entry.name for entry in path.parent.iterdir()] == ["state.db"]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA,)
    with closing(SqliteStore(path)) as store:
        assert store.items("") == [Record("a/b", '{"c":1}', 2)]


def test_an_empty_file_is_a_new_one(path):
    path.touch()
    with closing(SqliteStore(path)) as store:
        store.put("a/b", 1)


# Files that cannot be used


def _text(path):
    path.write_text("cluster:\n  bootstrap_servers: [b:9092]\n" * 50)


def _short(path):
    path.write_bytes(b"SQLite")


def _head_overwritten(path):
    content = filled(path).read_bytes()
    path.write_bytes(b"\0" * 100 + content[100:])


def _cut(path):
    content = filled(path).read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _page_overwritten(path):
    content = bytearray(filled(path).read_bytes())
    content[4096 * 2 : 4096 * 3] = b"\xa5" * 4096
    path.write_bytes(content)


def _table_gone(path):
    plain(filled(path), "DROP TABLE record")


def _of_another_program(path):
    plain(path, "CREATE TABLE bookmarks (url TEXT)")


def _marked_by_another_program(path):
    plain(path, "PRAGMA application_id = 7", "CREATE TABLE record (key TEXT)")


def _newer(path):
    plain(filled(path), "PRAGMA user_version = 99", "ALTER TABLE record ADD COLUMN more TEXT")


DAMAGED = "is damaged: .*\n    fix: restore it from a backup, or move it away"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_text, "is not a state file: .*\n    fix: name another file as state.path"),
        (_short, "is not a state file"),
        (_head_overwritten, "is not a state file"),
        (_cut, DAMAGED),
        (_page_overwritten, DAMAGED),
        (_table_gone, DAMAGED),
        (_of_another_program, "is a database of another program\n    fix: name another file"),
        (_marked_by_another_program, "is a database of another program"),
        (
            _newer,
            "was written by a newer version of quota-proxy: its schema is 99, this version knows "
            f"{SCHEMA}\n    fix: start that version, restore a backup, or",
        ),
        (Path.mkdir, "cannot be opened for writing: .*\n    fix: let quota-proxy write"),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("_"),
)
def test_a_file_that_cannot_be_used_is_refused_and_left_as_it_is(path, spoil, message):
    spoil(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StateError, match=message) as caught:
        SqliteStore(path)
    assert str(path) in caught.value.what
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_directory_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(StateError, match="cannot be opened for writing"):
        SqliteStore(tmp_path / "nowhere" / "state.db")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every file")
def test_a_file_that_may_only_be_read_is_refused_at_the_start(path):
    filled(path).chmod(0o400)
    with pytest.raises(StateError, match=r"quota-proxy (may )?write to the file"):
        SqliteStore(path)


def test_text_that_is_not_unicode_is_damage(path):
    plain(filled(path), "UPDATE record SET value = CAST(x'22ff22' AS TEXT) WHERE key = 'a/0007'")
    with closing(SqliteStore(path)) as store:
        with pytest.raises(StateError, match="is damaged"):
            store.items("a/")
        assert store.get("a/0008").value == "x" * 100


def test_a_disk_without_room_is_reported_and_the_batch_undone(path):
    with closing(SqliteStore(path)) as store:
        store.put("a/b", "old")
        (pages,) = store.connection.execute("PRAGMA page_count").fetchone()
        store.connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StateError, match=r"cannot grow: .*\n    fix: make room on its disk"):
            store.put_many([Record.of("a/b", "new"), Record.of("a/c", "x" * 10_000)])
        assert [(item.key, item.value) for item in store.items("")] == [("a/b", "old")]
        store.put("a/b", "later")


# Two proxies


@pytest.mark.parametrize("new", [True, False])
def test_a_file_in_use_is_refused_until_its_owner_closes_it(path, new):
    if not new:
        filled(path)
    with closing(SqliteStore(path)) as owner:
        message = "is in use by another process, most likely another quota-proxy\n    fix: stop"
        with pytest.raises(StateError, match=message):
            SqliteStore(path)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            plain(path, "SELECT * FROM record")
        owner.put("a/b", 1)
    with closing(SqliteStore(path)) as store:
        assert store.get("a/b").value == 1


def test_one_that_ends_is_waited_for(path, monkeypatch):
    monkeypatch.setattr("proxy.state.sqlite.LOCK_WAIT_S", 60.0)
    owner = SqliteStore(path)
    owner.put("a/b", 1)
    opened: list[SqliteStore] = []
    successor = threading.Thread(target=lambda: opened.append(SqliteStore(path)), daemon=True)
    successor.start()
    owner.close()
    successor.join(60.0)
    with closing(opened[0]) as store:
        assert store.get("a/b").value == 1


# Files that go while they are in use


def _deleted(path):
    path.unlink()


def _log_deleted(path):
    path.with_name("state.db-wal").unlink()


def _moved(path):
    path.rename(path.with_name("moved.db"))


def _replaced(path):
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize("spoil", [_deleted, _log_deleted, _moved, _replaced])
def test_a_write_to_a_file_that_is_gone_is_an_error(path, spoil):
    with closing(SqliteStore(path)) as store:
        store.put("a/b", "old")
        spoil(path)
        for _ in range(2):
            with pytest.raises(StateError, match=r"was deleted or replaced .*\n    fix: GET "):
                store.put("a/b", "new")
            with pytest.raises(StateError, match="was deleted or replaced"):
                store.put_many((), delete=("a/b",))
        assert store.get("a/b").value == "old"


def test_a_file_that_is_put_back_is_written_again(path):
    with closing(SqliteStore(path)) as store:
        path.rename(path.with_name("moved.db"))
        with pytest.raises(StateError, match="was deleted or replaced"):
            store.put("a/b", 1)
        path.with_name("moved.db").rename(path)
        store.put("a/b", 2)
    with closing(SqliteStore(path)) as store:
        assert store.get("a/b").value == 2


# Crashes


@pytest.mark.parametrize("writes", [1, 40, 700])
def test_a_killed_process_loses_nothing_that_was_written(path, writes):
    """700 writes reach beyond the first checkpoint of the log."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        told = [int(process.stdout.readline()) for _ in range(writes)]
        process.send_signal(signal.SIGKILL)
        told += [int(line) for line in process.stdout if line.endswith("\n")]
    assert process.returncode == -signal.SIGKILL
    assert path.with_name("state.db-wal").exists()
    with closing(SqliteStore(path)) as store:
        log = [item.value for item in store.items("log/")]
        pair = [item.value[0] for item in store.items("pair/")]
    assert log[: len(told)] == told
    assert log == list(range(1, len(log) + 1))
    assert pair == [log[-1]] * 2


@pytest.mark.parametrize("umask", [0o022, 0o000, 0o077])
def test_the_file_is_its_owners_alone(tmp_path, umask):
    path = tmp_path / "state.db"
    before = os.umask(umask)
    try:
        with closing(SqliteStore(path)) as store:
            store.put("a/b", 1)
            modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == {"state.db": 0o600, "state.db-wal": 0o600}


def test_the_mode_of_a_file_that_is_there_is_kept(tmp_path):
    path = tmp_path / "state.db"
    path.touch()
    path.chmod(0o640)
    SqliteStore(path).close()
    assert path.stat().st_mode & 0o777 == 0o640
