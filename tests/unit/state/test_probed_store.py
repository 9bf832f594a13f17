"""Whether a store takes what is written is known, whoever writes."""

from collections.abc import Iterable

import pytest

from proxy.state import MemoryStore, ProbedStore, Record, StateError
from proxy.state.probed_store import WATCH_KEY


class Disk(MemoryStore):
    """A store whose disk may fill up."""

    is_full = False
    writes = 0

    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> int:
        self._open()
        self.writes += 1
        if self.is_full:
            raise StateError("the disk is full", "make room")
        return super().put_many(records, delete=delete)


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def store(disk):
    return ProbedStore(disk)


def test_it_is_the_store_itself(store, disk):
    store.put("a/b", [1])
    assert disk.get("a/b").value == store.get("a/b").value == [1]
    assert [record.key for record in store.items("a/")] == ["a/b"]
    store.put_many((), delete=("a/b",))
    assert disk.get("a/b") is None


def test_a_refused_write_is_seen_and_raised(store, disk):
    disk.is_full = True
    with pytest.raises(StateError, match="the disk is full"):
        store.put("a/b", 1)
    assert not store.writable
    disk.is_full = False
    store.put("a/b", 1)
    assert store.writable


def test_a_full_disk_is_found_and_found_mended_when_nobody_writes(store, disk):
    store.check()
    assert (store.writable, disk.get(WATCH_KEY) is not None) == (True, True)
    disk.is_full = True
    store.check()
    assert not store.writable
    disk.is_full = False
    store.check()
    assert store.writable


def test_nothing_more_is_written_while_others_write(store, disk):
    store.put("a/b", 1)
    store.check()
    assert disk.writes == 1
    store.check()
    assert disk.writes == 2


def test_a_closed_store_is_left_alone(store, disk):
    store.close()
    store.check()
    assert (disk.writes, store.writable) == (0, False)


@pytest.mark.parametrize(
    "use",
    [lambda store: store.put("a/b", 1), lambda store: store.items("a/")],
    ids=["put", "items"],
)
def test_a_closed_store_is_an_error_that_is_expected(store, use):
    """Whoever reads or writes goes on: this proxy serves while a successor has the state."""
    store.close()
    with pytest.raises(StateError, match="another proxy took it over"):
        use(store)
    store.use(Disk())
    store.put("a/b", 1)
    assert store.writable
