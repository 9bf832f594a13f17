"""What is to be written, against a model of the store; keys and forms of records."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from proxy.state import MemoryStore, Record, RecordFormat, UnwrittenRecords


class Count(BaseModel):
    count: int


COUNTS = RecordFormat("counts", 2, Count)


class Part:
    """Counts by name, some of which have no record."""

    def __init__(self):
        self.counts: dict[str, int] = {}
        self.unwritten = UnwrittenRecords()
        self.store = MemoryStore()

    key = staticmethod(COUNTS.key)

    def record(self, name):
        count = self.counts.get(name, 0)
        return COUNTS.record((name,), {"count": count}) if count else None

    def put(self, name, count):
        self.counts[name] = count
        self.unwritten.mark_changed(self, name)

    def remove(self, name):
        self.counts.pop(name, None)
        self.unwritten.mark_removed(self, name)

    def write(self, max_items=None):
        self.unwritten.max_items = max_items
        records, deletes = self.unwritten.take()
        assert not {record.key for record in records} & set(deletes)
        self.store.put_many(records, delete=deletes)
        return records, deletes

    def kept(self):
        return {record.key: COUNTS.read(record).count for record in self.store.items("counts/")}


@pytest.fixture
def part():
    return Part()


def test_each_change_is_written_once(part):
    part.put("a", 1)
    part.put("a", 2)
    assert part.unwritten
    assert part.write() == ([COUNTS.record(("a",), {"count": 2})], [])
    assert not part.unwritten
    assert part.write() == ([], [])


def test_what_has_no_record_is_deleted(part):
    part.put("a", 0)
    part.remove("b")
    part.unwritten.mark_deleted("counts/c")
    assert part.write() == ([], ["counts/b", "counts/c", "counts/a"])


def test_what_is_made_anew_is_written_and_not_deleted(part):
    part.remove("a")
    part.put("a", 1)
    assert part.write() == ([COUNTS.record(("a",), {"count": 1})], [])


def test_what_could_not_be_written_comes_again_as_it_is_then(part):
    part.put("a", 1)
    part.remove("b")
    part.unwritten.take()
    part.put("a", 2)
    part.unwritten.give_back()
    assert part.write() == ([COUNTS.record(("a",), {"count": 2})], ["counts/b"])


def test_a_bounded_write_deletes_last(part):
    for number in range(5):
        part.put(str(number), 1)
    part.unwritten.mark_deleted("counts/old")
    part.unwritten.mark_deleted("counts/0")
    assert [len(part.write(2)[0]) for _ in range(2)] == [2, 2]
    assert part.unwritten
    records, deletes = part.write(2)
    assert ([record.key for record in records], deletes) == (["counts/4"], ["counts/old"])
    assert len(part.kept()) == 5


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "remove", "write", "fail"]),
            st.sampled_from("abc"),
            st.integers(0, 2),
        )
    ),
    st.one_of(st.none(), st.integers(1, 2)),
)
def test_in_the_end_the_store_has_what_there_is(steps, max_items):
    part = Part()
    for what, name, count in steps:
        if what == "put":
            part.put(name, count)
        elif what == "remove":
            part.remove(name)
        elif what == "write":
            part.write(max_items)
        else:
            part.unwritten.max_items = max_items
            part.unwritten.take()
            part.unwritten.give_back()
    while part.unwritten:
        part.write(max_items)
    assert part.kept() == {COUNTS.key(name): count for name, count in part.counts.items() if count}


def test_parts_of_a_key_are_quoted():
    assert COUNTS.key("a/b é", "t", 3) == "counts/a%2Fb%20%C3%A9/t/3"
    assert COUNTS.prefix == "counts/"


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (Record.of("counts/a", {"count": 1}, 1), "it has form 1, this version .* knows 2"),
        (Record.of("counts/a", {"count": "x"}, 2), "count: Input should be a valid integer"),
        (Record("counts/a", "{", 2), "Invalid JSON"),
    ],
)
def test_a_record_of_another_form_is_refused(record, problem):
    with pytest.raises(ValueError, match=problem):
        COUNTS.read(record)


def test_what_leaves_is_written_until_it_is_forgotten():
    unwritten, stays, goes = UnwrittenRecords(), Part(), Part()
    goes.counts, stays.counts = {"a": 1, "c": 2}, {"b": 1}
    for part, name in ((goes, "a"), (stays, "b")):
        unwritten.mark_changed(part, name)
    unwritten.leaving.add(goes)
    assert [record.key for record in unwritten.take()[0]] == ["counts/a", "counts/b"]
    unwritten.give_back()
    assert not unwritten.forget_leaving()
    assert [record.key for record in unwritten.take()[0]] == ["counts/b"]
    unwritten.leaving.add(goes)
    assert unwritten.forget_leaving(), "nothing was left to write"
    unwritten.mark_changed(goes, "c")
    unwritten.mark_deleted("counts/d")
    assert unwritten.take() == ([COUNTS.record(("c",), {"count": 2})], ["counts/d"])


def test_nothing_is_deleted_that_may_be_others_by_now():
    unwritten, goes = UnwrittenRecords(), Part()
    unwritten.mark_removed(goes, "a")
    assert unwritten.forget_leaving()
    unwritten.leaving.add(goes)
    assert unwritten.forget_leaving()
    assert unwritten.take() == ([], [])
