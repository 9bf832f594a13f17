"""Records of queries: what they say, and that damaged ones are left alone."""

import json
from uuid import UUID

import pytest
from backpressure_parts import CLIENT, ENTITY, LABEL, BackpressureWorld
from driver_script import running
from hypothesis import given
from hypothesis import strategies as st

from proxy.backpressure.backpressure_record import (
    BOUND_RECORDS,
    by_partition,
    read_backpressure_record,
)
from proxy.state import Record

KEY = "pressure/etl-orders/client-id%3Detl-orders"


def world_with_record() -> tuple[BackpressureWorld, Record]:
    world = running().looks(5000).play().world
    world.keep()
    (record,) = world.kept("pressure/")
    return world, record


def changed(**changes: object) -> str:
    return json.dumps(json.loads(world_with_record()[1].text) | changes)


def test_a_record_says_what_is_known():
    _, record = world_with_record()
    assert (record.key, record.version) == (KEY, BOUND_RECORDS.version)
    value = json.loads(record.text)
    assert value["told"] == {"t": {"0": [1200, 5000, 0]}}
    assert (value["label"], value["entity"], value["user"]) == (LABEL, ENTITY, None)
    assert value["rate"] == pytest.approx(100)
    assert value["bytes_per_record"] == [50_000, 500, 0]
    assert value["run_id"] == str(UUID(int=2))
    assert value["starts"] == {}
    kept = read_backpressure_record(record)
    assert by_partition(kept.told) == {("t", 0): (1200, 5000, 0)}


DAMAGED = {
    "no JSON": ("{", "Invalid JSON"),
    "no object": ("[]", "should be an object"),
    "nothing": ("{}", "listener: Field required"),
    "a client id that is none": (changed(client_id=None), "client_id: Input should be"),
    "another client": (changed(client_id="other"), "which is not its key"),
    "another entity": (changed(entity="user=x"), "which is not its key"),
    "a run that is none": (changed(run_id="7"), "run_id: "),
    "a rate of 0": (changed(rate=0), "rate: "),
    "a rate as text": (changed(rate="100"), "rate: "),
    "a rate beyond measure": (changed(rate=1e300), "rate: "),
    "a reach below 0": (changed(reach=-1.0), "reach: "),
    "an estimator of two numbers": (changed(estimator=[1.0, 2.0]), "estimator"),
    "an estimator that is none": (changed(estimator=[1.0, float("nan"), 0.0]), "estimator"),
    "a cost of less than 0": (changed(cost=[-1.0, 1, 1, 1, 0, 1, 0.1]), "cost.0"),
    "a cost of six numbers": (changed(cost=[1.0, 1, 1, 1, 0, 1]), "cost"),
    "costs that are more than tied": (changed(cost=[1.0, 1, 1, 1, 1.5, 1, 0.1]), "cost.4"),
    "a cost without noise": (changed(cost=[1.0, 1, 1, 1, 0, 1, 0.0]), "cost.6"),
    "an endless wait": (changed(waiting_ms=float("inf")), "waiting_ms"),
    "bytes of no records": (changed(bytes_per_record=[5.0, 0.0, 0.0]), "5 does not go with 0"),
    "next to no bytes": (changed(bytes_per_record=[1e-300, 1.0, 0.0]), "does not go with"),
    "told without the real end": (changed(told={"t": {"0": [1]}}), "told.t.0"),
    "told below 0": (changed(told={"t": {"0": [-1, 0, 0]}}), "told.t.0"),
    "told half an offset": (changed(told={"t": {"0": [1.5, 2, 0]}}), "told.t.0"),
    "told of partition -1": (changed(told={"t": {"-1": [1, 1, 0]}}), "told.t.-1"),
    "told of a topic that can't be": (changed(told={"t t": {"0": [1, 1, 0]}}), "told.t t"),
    "an offset beyond Kafka's": (changed(starts={"t": {"0": 2**63}}), "starts.t.0"),
}


@pytest.mark.parametrize(("text", "problem"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_records_are_refused_and_stay(text, problem):
    world, record = world_with_record()
    world.state[KEY] = Record(KEY, text, BOUND_RECORDS.version)
    (refused,) = world.crash()
    assert refused.startswith(f"pressure record {KEY!r} is left out: ")
    assert problem in refused
    assert world.state[record.key].text == text
    assert world.backpressure.of_client(CLIENT) == []
    assert world.query_backpressure.rate is None


def test_newer_records_are_refused():
    world, record = world_with_record()
    world.state[KEY] = Record(KEY, record.text, BOUND_RECORDS.version + 1)
    (refused,) = world.crash()
    assert f"has form {BOUND_RECORDS.version + 1}" in refused


def test_a_record_of_before_there_were_costs_is_read():
    world, record = world_with_record()
    value = json.loads(record.text)
    assert value.pop("cost") is None
    world.state[KEY] = Record(KEY, json.dumps(value), BOUND_RECORDS.version)
    assert world.crash() == []
    assert world.query_backpressure.rate == pytest.approx(100)


def test_what_a_later_version_adds_is_passed_over():
    world, _ = world_with_record()
    world.state[KEY] = Record(KEY, changed(more=1), BOUND_RECORDS.version)
    assert world.crash() == []


def test_there_is_a_bound_on_how_many_are_taken_up(monkeypatch):
    world, _ = world_with_record()
    monkeypatch.setattr("proxy.backpressure.backpressure.MAX_QUERIES", 0)
    (refused,) = world.crash()
    assert refused.endswith("there are too many queries")


@given(client_id=st.text(), entity=st.text())
def test_any_names_make_a_key(client_id, entity):
    key = BOUND_RECORDS.key(client_id, entity)
    assert Record.of(key, None).key == key
    assert key.count("/") == 2
