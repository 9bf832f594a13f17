"""What outlives the process: written when it changes, read only when it fits."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from progress_world import Client, ProgressWorld, configured, uuid

from proxy.progress.progress_records import FORMAT, read_progress_records
from proxy.progress.query import ProgressSettings, QuerySettings
from proxy.state import MemoryStore, Record, SqliteStore

TOPIC_ID = b"i" * 16


@pytest.fixture
def store():
    return MemoryStore()


def save(world, store):
    records, deletes = world.registry.unwritten.take()
    store.put_many(records, delete=deletes)
    return records, deletes


def restart(world, store, settings=None):
    """Save, and start another process that loads; return what it refused."""
    save(world, store)
    if settings is not None:
        world.settings = settings
    world.reopen()
    return world.registry.load(read_progress_records(store.items("progress/")))


def completed(world, *, to=10, topic="t", **more):
    driver = world.driver(**more)
    driver.send("started")
    driver.batch(None, to, topic=topic)
    return driver


def test_the_record_of_a_partition(world, store):
    Client(world, node_id=4, topic_id=TOPIC_ID).read(5, end=20)
    driver = completed(world)
    save(world, store)
    (record,) = store.items("")
    assert (record.key, record.version) == ("progress/orders/t/0", 1)
    assert record.value == {
        "label": "orders",
        "client_id": "orders",
        "query_id": driver.query_id,
        "run_id": driver.run_id,
        "name": "orders",
        "topic": "t",
        "topic_id": TOPIC_ID.hex(),
        "partition": 0,
        "leader": 4,
        "completed": 10,
        "delivered": 20,
        "backwards": False,
        "at_s": world.now_s,
    }


def test_only_what_changed_is_written(world, store):
    driver = completed(world, to=dict.fromkeys(range(5), 10))
    assert len(save(world, store)[0]) == 5
    assert save(world, store) == ([], [])
    Client(world).read(10, end=20)
    assert save(world, store) == ([], [])
    driver.batch({2: 10}, {2: 15})
    records, _ = save(world, store)
    assert [record.key for record in records] == ["progress/orders/t/2"]


def test_what_could_not_be_written_is_due_again(world, store):
    driver = completed(world, to={0: 10, 1: 10})
    world.registry.unwritten.take()
    driver.batch({0: 10}, {0: 20})
    world.query().revoke(world.part(partition=1), "gone", 0.0)
    world.registry.unwritten.give_back()
    assert len(save(world, store)[0]) == 1
    world.registry.unwritten.give_back()
    records, deletes = world.registry.unwritten.take()
    assert ([r.value["completed"] for r in records], deletes) == ([20], ["progress/orders/t/1"])


def test_progress_outlives_a_restart(world, tmp_path):
    store = SqliteStore(tmp_path / "state.db")
    Client(world, node_id=4, topic_id=TOPIC_ID).read(0, end=30)
    driver = completed(world, to={0: 20, 1: 7})
    assert restart(world, store) == []
    part, query = world.part(), world.query()
    assert (part.committed_to, part.position, part.leader) == (20, 30, 4)
    assert (part.log.topic_id, part.run_id) == (TOPIC_ID, driver.run_id)
    assert (query.query_id, query.run_batches) == (driver.query_id, 0)
    assert save(world, store) == ([], [])
    store.close()


def test_reports_go_on_after_a_restart_and_those_missed_are_lost(world, store):
    driver = completed(world, to=20)
    restart(world, store)
    driver.lose(3)
    accepted = driver.batch(50, 60, batch_id=4)
    assert (accepted.new_run, accepted.lost_reports) == (False, 0)
    assert (world.part().committed_to, world.skipped()) == (60, [])
    assert world.kinds() == ["lost_reports"]


def test_what_was_completed_is_not_completed_again_after_a_restart(world, store):
    driver = completed(world, to=20)
    restart(world, store)
    assert driver.refused(0, 20) == "repeated"


def test_a_new_run_after_a_restart_takes_what_was_in_flight_as_failed(world, store):
    Client(world).read(0, end=30)
    driver = completed(world, to=20)
    restart(world, store)
    driver.restart("run-2", sender="s2")
    assert list(world.part().failed) == [(20, 30)]


def test_a_topic_made_anew_while_the_proxy_was_away_starts_over(world, store):
    Client(world, topic_id=TOPIC_ID).read(0, end=30)
    completed(world, to=20)
    restart(world, store)
    Client(world, topic_id=b"n" * 16).read(0, hw=9, end=5)
    assert (world.part().committed_to, world.part().position) == (None, 5)
    _, deletes = save(world, store)
    assert deletes == ["progress/orders/t/0"]
    assert store.items("") == []


def test_a_group_that_is_to_be_moved_back_is_after_a_restart_too(world, store):
    driver = completed(world, to=50)
    world.registry.committed("orders-progress", {("t", 0): 50}, world.now_ms)
    driver.restart("run-2")
    driver.batch(0, 20)
    restart(world, store)
    world.registry.group_has("orders-progress", {("t", 0): 50})
    assert world.registry.due_commits() == {"orders-progress": {("t", 0): 20}}


def test_the_configuration_decides_which_client_a_label_is(world, store):
    completed(world, to=20)
    renamed = ProgressSettings(queries=(QuerySettings(name="orders", client_id="etl-2"),))
    assert restart(world, store, renamed) == []
    assert world.query("orders") is None
    assert world.part(client_id="etl-2").committed_to == 20


def test_a_query_that_is_not_configured_is_found_by_its_client_id(world, store):
    world.known.add("c")
    completed(world, name="n a/m?e", client_id="c", query_id=uuid("other"))
    save(world, store)
    assert store.items("")[0].key == "progress/c/t/0"
    assert restart(world, store) == []
    assert (world.query("c").name, world.part(client_id="c").committed_to) == ("n a/m?e", 10)


def test_a_key_is_quoted(world, store):
    world.known.add("c a/m?e")
    completed(world, name="n", client_id="c a/m?e", query_id=uuid("other"))
    save(world, store)
    assert [record.key for record in store.items("")] == ["progress/c%20a%2Fm%3Fe/t/0"]


def test_another_client_id_moves_the_records(world, store):
    world.known |= {"c", "c2"}
    completed(world, name="n", client_id="c", query_id=uuid("other"))
    save(world, store)
    world.registry.move(world.query("c"), "c2")
    save(world, store)
    (record,) = store.items("")
    assert (record.key, record.value["client_id"]) == ("progress/c2/t/0", "c2")


def test_a_record_under_the_label_as_earlier_programs_wrote_it_is_moved(world, store):
    world.known.add("c")
    value = {**GOOD, "label": "n", "name": "n", "client_id": "c", "at_s": 1.0}
    old = Record.of("progress/n/t/0", value)
    new = Record.of("progress/c/t/0", {**value, "completed": 9, "delivered": 9, "at_s": 2.0})
    for records in ([old], [old, new]):
        store.put_many(records)
        assert restart(world, store) == []
        assert world.part(client_id="c").committed_to == records[-1].value["completed"]
        save(world, store)
        assert [record.key for record in store.items("")] == ["progress/c/t/0"]


def test_a_new_label_is_in_the_records(world, store):
    world.known.add("c")
    completed(world, name="n", client_id="c", query_id=uuid("other"))
    save(world, store)
    world.registry.update(configured("orders", "n"))
    save(world, store)
    (record,) = store.items("")
    assert (record.key, record.value["label"]) == ("progress/c/t/0", "n (c)")


def test_a_label_that_is_taken_when_it_is_loaded_is_in_the_records(world, store):
    world.known.add("c")
    completed(world, name="n", client_id="c", query_id=uuid("other"))
    first = ProgressSettings(queries=(QuerySettings(name="n2", client_id="c"),))
    restart(world, store, first)
    assert world.query("c").name == "n2"
    save(world, store)
    (record,) = store.items("")
    assert (record.key, record.value["label"]) == ("progress/c/t/0", "n2")


def test_a_query_that_is_forgotten_leaves_no_record(world, store):
    world.known.add("c")
    completed(world, name="n", client_id="c", query_id=uuid("other"))
    save(world, store)
    world.wait(10 * 86_400_000.0)
    save(world, store)
    assert store.items("") == []


def test_records_of_a_query_that_was_taken_over_from_are_left_out(world, store):
    completed(world, to={0: 10, 1: 10})
    save(world, store)
    left = store.get("progress/orders/t/1")
    world.wait(1)
    completed(world, to=5, query_id=uuid("other"), run_id=uuid("r2"), sender=uuid("s2"))
    save(world, store)
    store.put_many([left])  # as if the process had died before it was deleted
    (refused,) = restart(world, store)
    assert "'progress/orders/t/1'" in refused
    assert f"of query {uuid('query')}" in refused
    assert world.part().committed_to == 5
    assert ("t", 1) not in world.query().partitions


def test_between_a_take_over_and_its_first_batch_the_records_are_the_other_querys(world, store):
    completed(world, to=10)
    other = world.driver(query_id=uuid("other"), run_id=uuid("r2"), sender=uuid("s2"))
    other.send("started")
    world.query().changed(("t", 0))
    restart(world, store)
    assert world.query().query_id == uuid("query")


GOOD = {
    "label": "orders",
    "client_id": "orders",
    "query_id": uuid("q"),
    "run_id": uuid("r"),
    "name": None,
    "topic": "t",
    "topic_id": None,
    "partition": 0,
    "leader": None,
    "completed": 5,
    "delivered": 5,
    "backwards": False,
    "at_s": 1.5,
}
KEY = FORMAT.key("orders", "t", 0)


@pytest.mark.parametrize(
    ("key", "change", "version", "named"),
    [
        pytest.param(KEY, {}, 2, "form 2", id="unknown version"),
        pytest.param(KEY, {"topic": "u"}, 1, "not its key", id="another topic"),
        pytest.param(KEY, {"label": "o", "client_id": "o"}, 1, "not its key", id="another query"),
        pytest.param(KEY, {"partition": 1}, 1, "not its key", id="another partition"),
        pytest.param("progress/orders/t/00", {}, 1, "not its key", id="another spelling"),
        pytest.param("progress/x", {}, 1, "not its key", id="no key of ours"),
        pytest.param(KEY, {"completed": -1}, 1, "completed", id="negative"),
        pytest.param(KEY, {"completed": 2**63}, 1, "completed", id="too large"),
        pytest.param(KEY, {"completed": True}, 1, "completed", id="bool"),
        pytest.param(KEY, {"completed": 5.5}, 1, "completed", id="fraction"),
        pytest.param(KEY, {"delivered": 4}, 1, "below completed", id="delivered too low"),
        pytest.param(KEY, {"topic_id": "xyz"}, 1, "topic_id", id="topic id"),
        pytest.param(KEY, {"query_id": None}, 1, "query_id", id="no query"),
        pytest.param(KEY, {"leader": -5}, 1, "leader", id="leader"),
        pytest.param(KEY, {"at_s": -1}, 1, "at_s", id="time"),
        pytest.param(KEY, {"at_s": "noon"}, 1, "at_s", id="time as text"),
        pytest.param(KEY, {"partition": 2**31}, 1, "partition", id="partition too large"),
    ],
)
def test_records_that_do_not_fit_are_refused_and_the_others_kept(
    world, key, change, version, named
):
    other = Record.of(FORMAT.key("orders", "t", 7), {**GOOD, "partition": 7})
    records = [Record.of(key, {**GOOD, **change}, version), other]
    (refused,) = world.registry.load(read_progress_records(records))
    assert key in refused
    assert named in refused
    assert set(world.query().partitions) == {("t", 7)}


@pytest.mark.parametrize("text", ["", "null", "[]", "{", '{"label":NaN}'])
def test_damaged_records_are_refused(world, text):
    (refused,) = world.registry.load(read_progress_records([Record(KEY, text, 1)]))
    assert KEY in refused
    assert world.query().partitions == {}


def test_two_queries_of_one_client_cannot_both_be_loaded(world):
    def record(label, at_s):
        value = {**GOOD, "label": label, "client_id": "c", "at_s": at_s, "query_id": uuid(label)}
        return Record.of(FORMAT.key(label, "t", 0), {**value, "name": label})

    records = [record("old", 1.0), record("new", 2.0)]
    (refused,) = world.registry.load(read_progress_records(records))
    assert "progress/old/t/0" in refused
    assert world.query("c").name == "new"


def test_there_is_no_room_for_more_queries_than_the_bound():
    world = ProgressWorld(ProgressSettings(max_queries=1))

    def record(label, at_s):
        value = {**GOOD, "label": label, "client_id": label, "at_s": at_s, "query_id": uuid(label)}
        return Record.of(FORMAT.key(label, "t", 0), {**value, "name": label})

    records = [record("old", 1.0), record("new", 2.0)]
    (refused,) = world.registry.load(read_progress_records(records))
    assert "progress/old/t/0" in refused
    assert [query.name for query in world.registry.queries] == ["new"]
    assert world.registry.unwritten.take() == ([], [])


@given(
    st.dictionaries(
        st.sampled_from([*GOOD]),
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    )
)
def test_whatever_stands_in_a_record_it_is_taken_or_refused(change):
    world = ProgressWorld()
    value = json.loads(json.dumps({**GOOD, **change}).replace("Infinity", "1e999"))
    record = Record(KEY, json.dumps(value), 1)
    refused = world.registry.load(read_progress_records([record]))
    assert len(refused) == (0 if list(world.registry.partitions()) else 1)
