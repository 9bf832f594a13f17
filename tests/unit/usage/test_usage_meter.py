"""The sum over all records is what the counters say, and each record says whose it is."""

import json
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parts.usage_world import APIS, UsageWorld, record

from metrics.exposition import OTHER
from proxy.quota.entities import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE
from proxy.quota.rules import Budget, Rule, Share
from proxy.usage.usage_meter import hashed_name
from proxy.usage.usage_record import (
    BUCKET_GROWTH,
    SCHEMA_VERSION,
    UsageRecord,
    client_message_key,
    rate_bucket_of,
)
from proxy.wire.apis import FETCH, METADATA, PRODUCE

SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "usage.schema.json").read_text())
MIB = 2**20
KEY = b"0123456789abcdef"

STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("move"),
            st.sampled_from(["a", "b", "c", None]),
            st.sampled_from([None, "anna"]),
            st.sampled_from(APIS),
            st.integers(0, 10**9),
        ),
        st.tuples(st.just("walk"), st.sampled_from("ab"), st.integers(0, 10**9), st.integers(1, 9)),
        st.tuples(st.sampled_from(["read", "rate", "record", "forget"])),
    ),
    max_size=40,
)


@given(STEPS, st.integers(1, 6))
def test_records_add_up_to_the_counters(steps, max_clients):
    world = UsageWorld(max_clients=max_clients)
    moved, asked = 0, 0
    for what, *how in steps:
        if what == "move":
            client_id, user, api, size = how
            world.connect(client_id, user)
            world.move(size, client_id, user, api)
            world.leave(client_id, user)
            moved += size
            asked += 1
        elif what == "walk":
            client_id, size, weight = how
            world.connect(client_id)
            world.walk({"t": size, "u": 5}, size + 30, weight, client_id)
            world.leave(client_id)
        elif what == "forget":
            world.read()  # every ten seconds; a client is forgotten after an hour
            for _ in world.clients.forgetting(1e15):
                pass
        elif what == "record":
            world.make_records()
        else:
            {"read": world.read, "rate": world.rate}[what]()
    world.make_records()
    assert sum(each.bytes for each in world.records) == moved
    assert sum(each.requests for each in world.records) == asked
    if "forget" not in {step[0] for step in steps}:
        of_clients: dict[tuple[str, ...], int] = {}
        for each in world.records:
            key = each.listener, each.user or "", each.client_id
            of_clients[key] = of_clients.get(key, 0) + each.bytes
        counted: dict[tuple[str, ...], int] = {}
        for labels, child in world.bytes_total.counted():
            counted[labels[:-1]] = counted.get(labels[:-1], 0) + round(child.value)
        assert {k: n for k, n in of_clients.items() if n} == {k: n for k, n in counted.items() if n}
    for each in world.records:
        jsonschema.validate(json.loads(each.model_dump_json()), SCHEMA)


def test_the_schema_in_the_docs_is_that_of_the_code():
    assert UsageRecord.model_json_schema() == SCHEMA
    assert UsageRecord.model_fields["schema_version"].default == SCHEMA_VERSION


def test_a_record_is_compact_json_by_client():
    text = record(user="anna", client_id="ключ").model_dump_json()
    assert json.loads(text)["rates"] == {"7": 2}
    assert ": " not in text
    assert UsageRecord.model_validate_json(text) == record(user="anna", client_id="ключ")
    assert (
        client_message_key(record(user=None, client_id="ключ")).decode()
        == '["default",null,"ключ"]'
    )


@given(st.floats(0.001, 1e13))
def test_a_bucket_has_the_rate_in_it(rate):
    bucket = rate_bucket_of(rate)
    assert rate <= BUCKET_GROWTH**bucket * (1 + 1e-9)
    assert rate > BUCKET_GROWTH ** (bucket - 1) * (1 - 1e-9)


def test_both_directions_are_told_apart_and_the_first_record_has_what_is_not_of_a_topic():
    world = UsageWorld()
    world.connect()
    world.connect()
    world.move(600, api=FETCH, requests=3)
    world.walk({"a": 400, "b": 100}, 600)
    world.move(50, api=METADATA)
    world.move(200, api=PRODUCE)
    world.rate(10.0)
    usage = world.clients.usage[world.identity("etl")]
    usage.held_ms["read"] += 1500
    world.clients.would_throttle(world.identity("etl"), PRODUCER_BYTE_RATE)
    records = world.make_records(start_ms=0, end_ms=60_000)
    rows = [(r.direction, r.topic, r.bytes, r.requests, r.connections) for r in records]
    assert rows == [
        ("read", "a", 400, 2, 2),
        ("read", None, 150, 1, 0),
        ("read", "b", 100, 1, 0),
        ("write", None, 200, 1, 0),
    ]
    first, *rest, write = records
    assert (first.rates, first.peak, first.held_seconds) == ({rate_bucket_of(60.0): 1}, 60.0, 1.5)
    assert all((r.rates, r.peak, r.held_seconds) == ({}, 0.0, 0.0) for r in rest)
    assert (write.rates, write.would_be_seconds) == ({rate_bucket_of(20.0): 1}, 1.0)
    assert world.make_records() == []


def test_a_connection_alone_is_a_record_and_silence_is_none():
    world = UsageWorld()
    world.connect()
    assert world.make_records() == []  # nothing has passed yet
    world.move(5)
    assert [(each.bytes, each.connections) for each in world.make_records()] == [(5, 1)]
    world.connect()
    assert [(each.bytes, each.connections) for each in world.make_records()] == [(0, 1)]
    assert world.make_records() == []


def test_clients_without_a_counter_of_their_own_are_together():
    world = UsageWorld(max_clients=1)
    for number in range(3):
        world.connect(f"c{number}")
        world.move(5, f"c{number}")
    rows = [(each.client_id, each.bytes, each.connections) for each in world.make_records()]
    assert rows == [("c0", 5, 1), (OTHER, 10, 2)]


def test_rules_and_budgets_are_those_in_force_for_the_direction():
    adhoc = Budget(name="adhoc", bounds={CONSUMER_BYTE_RATE: 1e6})
    rules = (
        Rule(client_id="etl", bounds={CONSUMER_BYTE_RATE: 1e5}, share=Share(adhoc)),
        Rule(client_id="<default>", bounds={PRODUCER_BYTE_RATE: 1e5}, number=1),
    )
    world = UsageWorld(rules)
    world.connect()
    world.move(5)
    world.move(6, api=PRODUCE)
    rows = {r.direction: (r.rule, r.budget) for r in world.make_records()}
    assert rows == {"read": ("client-id=etl", "adhoc"), "write": ("client-id=<default>", None)}


def test_names_are_hashed_with_the_key():
    world = UsageWorld((Rule(user="anna", bounds={CONSUMER_BYTE_RATE: 1e5}),), KEY)
    world.connect("etl", "anna")
    world.move(5, "etl", "anna")
    world.connect(None)
    world.move(5, None)
    named, nobody = world.make_records()
    assert named.hashed
    assert (named.user, named.client_id) == (hashed_name(KEY, "anna"), hashed_name(KEY, "etl"))
    assert named.rule == hashed_name(KEY, "user=anna")
    assert (nobody.user, nobody.client_id) == (None, "")
    assert hashed_name(KEY, "anna") != hashed_name(KEY[::-1], "anna")
    assert "anna" not in named.model_dump_json()


@pytest.mark.parametrize("seconds", [10.0, 20.0])
def test_a_rate_is_that_of_the_time_since_the_last_one(seconds):
    world = UsageWorld()
    world.connect()
    world.move(20 * MIB)
    world.rate(seconds)
    world.rate(10.0)
    assert world.make_records()[0].peak == 20 * MIB / seconds
