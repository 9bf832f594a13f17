"""The state file that another process has, as its successor sees it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from proxy.state import SqliteStore, StateError, read_live_state

OWNER = """
import sys
from pathlib import Path
from proxy.state import Record, SqliteStore

store = SqliteStore(Path(sys.argv[1]))
store.put_many(Record.of(f"a/{number:04}", "x" * 100) for number in range(200))
print("written", flush=True)
sys.stdin.readline()
store.put("a/0200", "last")
store.close()
"""


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "state.db"


@contextmanager
def owned(path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Let another process have the file."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", OWNER, str(path)], **pipes) as process:
        assert process.stdout.readline() == b"written\n"
        yield process
        process.communicate(b"\n")
    assert process.returncode == 0


def test_all_that_the_owner_has_written_is_seen_and_its_lock_stays(path):
    with owned(path) as owner:
        files = {each: each.read_bytes() for each in path.parent.iterdir()}
        assert len(files) == 2
        store = read_live_state(path, owner.pid)
        assert len(store.items("a/")) == 200
        with pytest.raises(StateError, match="in use"):
            SqliteStore(path)
        assert {each: each.read_bytes() for each in path.parent.iterdir()} == files
    with closing(SqliteStore(path)) as store:
        assert len(store.items("a/")) == 201


def test_a_file_that_another_process_has(path):
    with owned(path) as owner:
        message = rf"is in use by process {owner.pid}, and not by process {os.getpid()}\n    fix: "
        with pytest.raises(StateError, match=message):
            read_live_state(path, os.getpid())


def test_a_file_that_is_not_there_or_empty(path):
    assert read_live_state(path, 1).items("") == []
    assert not path.exists()
    path.touch()
    assert read_live_state(path, 1).items("") == []
    assert path.read_bytes() == b""


@pytest.mark.parametrize("damage", [b"\0" * 100, b"no SQLite"])
def test_a_damaged_file_is_refused_under_its_own_name(path, damage):
    with closing(SqliteStore(path)) as store:
        store.put("a/b", 1)
    content = damage + path.read_bytes()[len(damage) :]
    path.write_bytes(content)
    with pytest.raises(StateError, match="is not a state file") as caught:
        read_live_state(path, 1)
    assert str(path) in caught.value.what
    assert path.read_bytes() == content


def test_a_place_that_cannot_be_looked_at(path):
    path.mkdir()
    with pytest.raises(StateError, match=r"cannot be looked at: .*\n    fix: let quota-proxy"):
        read_live_state(path, 1)
