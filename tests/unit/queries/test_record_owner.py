"""Whose each record of the state is."""

from parts.member_world import Owned
from parts.reports import uuid

from proxy.progress.progress_records import FORMAT
from proxy.queries.record_owner import read_owned
from proxy.state import MemoryStore, Record


def record(label, client_id, key_part):
    value = {
        "label": label, "client_id": client_id, "query_id": uuid("q"), "run_id": uuid("r"),
        "name": None, "topic": "t", "topic_id": None, "partition": 0, "leader": None,
        "completed": 5, "delivered": 5, "backwards": False, "at_s": 1.5,
    }  # fmt: skip
    return Record.of(FORMAT.key(key_part, "t", 0), value)


def test_those_of_a_member():
    mine = [
        record("n", "c", "c"),
        record("n", "c", "n"),  # as an earlier program wrote it
        record("configured", "former", "former"),
        Record("progress/c/t/1", "damaged", 1),
        Record.of("pressure/c/e", None),
        Record.of("ledger/p/root/1", None),
    ]
    others = [
        record("n", "d", "d"),
        record("n", "d", "c2"),
        Record.of("pressure/d/e", None),
        Record.of("flow/q/n", None),
        Record.of("quotas/client-id=c", None),
    ]
    store = MemoryStore()
    store.put_many([*mine, *others])
    owns = Owned(frozenset({"c"}), frozenset({"p"}))
    client_of = {"configured": "c"}.get
    progress, records = read_owned(store, owns, client_of)
    found = [*progress, *(each.key for of_kind in records.values() for each in of_kind)]
    assert sorted(found) == sorted(each.key for each in mine)
    assert [type(said) for key, said in progress.items() if key == "progress/c/t/1"] == [str]
