"""What becomes of a damaged state file when the configuration lets the proxy start without it."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from proxy.state import SqliteStore, StateError, open_or_start_empty
from proxy.state.sqlite import wal_of

PAGE_BYTES = 4096


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "state.db"
    with closing(SqliteStore(path)) as store:
        for number in range(200):
            store.put(f"a/{number:04}", "x" * 100)
    return path


def _page_overwritten(path, number=2):
    content = bytearray(path.read_bytes())
    content[PAGE_BYTES * number : PAGE_BYTES * (number + 1)] = b"\xa5" * PAGE_BYTES
    path.write_bytes(content)


def _cut(path):
    path.write_bytes(path.read_bytes()[: PAGE_BYTES * 2])


def _head_overwritten(path):
    path.write_bytes(b"\0" * 100 + path.read_bytes()[100:])


def _text_that_is_not_unicode(path):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE record SET value = CAST(x'22ff22' AS TEXT) WHERE key = 'a/0007'")


@pytest.mark.parametrize(
    "spoil", [_page_overwritten, _cut, _head_overwritten, _text_that_is_not_unicode]
)
def test_a_damaged_file_is_kept_aside_and_an_empty_one_begun(path, spoil):
    spoil(path)
    kept = []
    for _ in range(2):  # the second one has a name of its own
        damaged = path.read_bytes()
        with capture_logs() as logs, closing(open_or_start_empty(path)) as store:
            assert store.items("") == []
            store.put("a/b", 1)
        (log,) = logs
        assert log["log_level"] == "error"
        assert {"problem", "fix"} < log.keys()
        assert str(path) in log["problem"]
        kept.append(Path(log["kept"]))
        assert kept[-1].parent == path.parent
        assert kept[-1].read_bytes() == damaged
        with closing(open_or_start_empty(path)) as store:
            assert [record.value for record in store.items("")] == [1]
        path.write_bytes(b"\0" * PAGE_BYTES)
    assert len(set(kept)) == 2


@pytest.mark.parametrize("text", ["{", "[" * 100_000], ids=["cut off", "nested too deeply"])
def test_a_value_that_is_no_json_is_damage(path, text):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE record SET value = ? WHERE key = 'a/0007'", (text,))
    with capture_logs() as logs, closing(open_or_start_empty(path)) as store:
        assert store.items("") == []
    assert "the value of 'a/0007' in the state is damaged" in logs[0]["problem"]


def test_what_a_crash_left_in_the_log_is_not_taken_for_the_new_files(path, tmp_path):
    with closing(SqliteStore(path)) as store:
        store.put("a/0000", "last")
        crashed = tmp_path / "crashed"
        crashed.mkdir()
        for file in (path, wal_of(path)):
            (crashed / file.name).write_bytes(file.read_bytes())
    path = crashed / path.name
    _page_overwritten(path, 4)
    with capture_logs() as logs, closing(open_or_start_empty(path)) as store:
        assert store.items("") == []
    kept = Path(logs[0]["kept"])
    assert b'"last"' in kept.read_bytes() + (
        wal_of(kept).read_bytes() if wal_of(kept).exists() else b""
    )


def test_a_sound_file_is_opened(path):
    with capture_logs() as logs, closing(open_or_start_empty(path)) as store:
        assert len(store.items("")) == 200
    assert not logs


def _of_another_program(path):
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")


def _newer(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize("spoil", [_of_another_program, _newer])
def test_what_is_no_damage_is_refused_and_stays(path, spoil):
    spoil(path)
    before = path.read_bytes()
    with pytest.raises(StateError):
        open_or_start_empty(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_file_in_use_is_refused_and_stays(path):
    with closing(SqliteStore(path)), pytest.raises(StateError, match="is in use"):
        open_or_start_empty(path)


def test_a_damaged_file_that_cannot_be_renamed_is_refused_and_stays(path):
    long = path.with_name("s" * 230)  # with what marks the damaged one it is too long for a name
    path.rename(long)
    _page_overwritten(long)
    before = long.read_bytes()
    with pytest.raises(StateError, match="is damaged, and cannot be renamed"):
        open_or_start_empty(long)
    assert long.read_bytes() == before
