"""What every store does, each kind under the same tests."""

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.state import MemoryStore, Record, SqliteStore, StateError, Store
from proxy.state.store import ClosedError


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path) -> Iterator[Store]:
    made = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "state.db")
    yield made
    made.close()


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -1.5, 1e300, 2**80, "", "héllo \0 🦜", [], {}, {"a": [1, {"b": None}]}],
    ids=repr,
)
def test_what_is_put_is_read_back(store, value):
    put = store.put("quotas/x", value, version=3)
    assert put == store.get("quotas/x") == Record("quotas/x", put.text, 3)
    assert store.get("quotas/x").value == value


def test_a_key_without_a_record_gives_none(store):
    assert store.get("quotas/x") is None


def test_a_later_value_replaces_an_earlier_one(store):
    store.put("a/b", "old", version=7)
    store.put("a/b", "new")
    assert [(item.value, item.version) for item in store.items("")] == [("new", 1)]


def test_what_is_deleted_is_not_there(store):
    store.put("a/b", 1)
    store.put_many((), delete=("a/b",))
    assert store.get("a/b") is None
    store.put_many((), delete=("a/b",))
    assert store.get("a/b") is None


def test_a_value_that_is_changed_after_it_was_put_or_read_stays_as_it_was(store):
    value = {"list": [1]}
    store.put("a/b", value)
    value["list"].append(2)
    store.get("a/b").value["list"].append(3)
    assert store.get("a/b").value == {"list": [1]}


def test_items_are_those_with_the_prefix_in_order_of_their_keys(store):
    for key in ("ab/1", "a/é", "a/b", "a/B", "a/ba", "a/🦜", "b/1"):
        store.put(key, key)
    assert [item.key for item in store.items("a/")] == ["a/B", "a/b", "a/ba", "a/é", "a/🦜"]
    assert [item.key for item in store.items("a/b")] == ["a/b", "a/ba"]
    assert [item.key for item in store.items("a/_")] == []
    assert [item.key for item in store.items("a/%")] == []
    assert len(store.items("")) == 7


def test_a_batch_deletes_first_and_of_two_records_keeps_the_later(store):
    store.put("a/gone", 1)
    store.put("a/again", 1)
    records = [Record.of("a/x", 1), Record.of("a/again", 2), Record.of("a/x", 2)]
    store.put_many(records, delete=("a/gone", "a/again", "a/never"))
    assert {item.key: item.value for item in store.items("a/")} == {"a/x": 2, "a/again": 2}


def test_an_empty_batch_does_nothing(store):
    store.put_many(())


def test_a_batch_that_breaks_off_changes_nothing(store):
    store.put("a/1", "old")

    def records():
        yield Record.of("a/1", "new")
        raise ValueError("the source failed")

    with pytest.raises(ValueError, match="the source failed"):
        store.put_many(records(), delete=("a/1",))
    assert store.get("a/1").value == "old"


@pytest.mark.parametrize(
    ("key", "value", "version", "message"),
    [
        ("", 1, 1, "'' is no key"),
        ("quotas", 1, 1, "'quotas' is no key: write NAMESPACE/NAME, printable"),
        ("/x", 1, 1, "is no key"),
        ("quotas/", 1, 1, "is no key"),
        ("quotas/a\0b", 1, 1, "is no key"),
        ("quotas/\ud800", 1, 1, "is no key"),
        ("quotas/\U0010ffff", 1, 1, "is no key"),
        ("a/b", math.nan, 1, "the value of 'a/b' cannot be written as JSON"),
        ("a/b", {"x": math.inf}, 1, "cannot be written as JSON"),
        ("a/b", {"x": b"bytes"}, 1, "cannot be written as JSON"),
        ("a/b", 1, 0, "the version of 'a/b' must be 1 or more, not 0"),
    ],
)
def test_what_cannot_be_kept_is_refused_and_changes_nothing(store, key, value, version, message):
    with pytest.raises(ValueError, match=message):
        store.put(key, value, version)
    assert store.items("") == []


def test_a_value_that_is_not_json_is_reported_by_its_key():
    with pytest.raises(StateError, match="the value of 'a/b' in the state is damaged"):
        _ = Record("a/b", "{", 1).value


def test_a_closed_store_says_so_and_may_be_closed_again(store):
    store.close()
    store.close()
    for use in (
        lambda: store.get("a/b"),
        lambda: store.items(""),
        lambda: store.put("a/b", 1),
        lambda: store.put_many((), delete=("a/b",)),
    ):
        with pytest.raises(ClosedError, match="the state is not open"):
            use()


KEYS = st.sampled_from(["a/1", "a/2", "b/1", "a/12"])
BATCHES = st.lists(st.tuples(st.dictionaries(KEYS, st.integers()), st.sets(KEYS)), max_size=8)


@pytest.mark.slow
@given(BATCHES)
def test_batches_leave_what_a_dictionary_would_hold(tmp_path_factory, batches):
    path = tmp_path_factory.mktemp("state") / "state.db"
    expected: dict[str, int] = {}
    store = SqliteStore(path)
    for puts, deletes in batches:
        records = [Record.of(key, value) for key, value in puts.items()]
        store.put_many(records, delete=deletes)
        expected = {key: value for key, value in expected.items() if key not in deletes} | puts
    store.close()
    store = SqliteStore(path)
    for prefix in ("", "a/", "a/1", "b/", "c/"):
        wanted = sorted(item for item in expected.items() if item[0].startswith(prefix))
        assert [(item.key, item.value) for item in store.items(prefix)] == wanted
    store.close()
