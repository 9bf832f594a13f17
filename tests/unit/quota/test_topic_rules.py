"""Rules with a topic: which one is for what, and what its sensor is charged."""

import pytest
from parts.quota_world import QuotaWorld

from proxy.quota.entities import DEFAULT, ClientIdentity, QuotaKind
from proxy.quota.gate import GateWaiter
from proxy.quota.rules import QuotaManagerSettings, QuotaPause, Rule, RuleTable

CONSUMER, PRODUCER = QuotaKind.CONSUMER_BYTE_RATE, QuotaKind.PRODUCER_BYTE_RATE
BOUND = 1000.0
ETL = ClientIdentity("default", "alice", "etl")
LATER_MS = 600_000.0


def rule(number=0, /, *kinds, **keys):
    return Rule(**keys, number=number, bounds=dict.fromkeys(kinds or (CONSUMER,), BOUND))


ORDERED = [
    {"topic": "logs-a", "user": "alice", "client_id": "etl"},
    {"topic": "logs-a", "client_id_prefix": "e"},
    {"topic": "logs-a", "client_id": DEFAULT},
    {"topic": "logs-a"},
    {"topic_prefix": "logs-", "client_id": "etl"},
    {"topic_prefix": "logs-"},
    {"topic_prefix": "l", "user": "alice", "client_id": "etl"},
    {"topic_prefix": "l"},
]
"""All are for ETL and the topic logs-a, the first one to apply on top."""


def test_the_closer_topic_comes_first_and_then_the_closer_client():
    rules = [rule(number, **keys) for number, keys in enumerate(ORDERED)]
    for left in range(len(rules)):
        table = RuleTable(reversed(rules[left:]))
        assert table.match(CONSUMER, ETL, "logs-a").rule is rules[left]
        assert [each.number for each in table.rules] == list(range(left, len(rules)))
    assert RuleTable(rules).match(CONSUMER, ETL, "logs-").rule.number == 4
    assert RuleTable(rules).match(CONSUMER, ETL, "log").rule.number == 6
    assert RuleTable(rules).match(CONSUMER, ETL, "x") is None
    assert RuleTable(rules).match(PRODUCER, ETL, "logs-a") is None


def test_rules_with_a_topic_and_those_of_clients_are_apart():
    by_topic, of_client = rule(0, topic="orders"), rule(1, client_id=DEFAULT)
    table = RuleTable([by_topic, of_client])
    assert table.match(CONSUMER, ETL).rule is of_client
    assert table.match(CONSUMER, ETL, "orders").rule is by_topic
    assert table.rules == (of_client, by_topic)
    assert [each.rule for each in table.explain(ETL)] == [of_client]
    assert table.rules_by_topic(CONSUMER, ETL) == [by_topic]


@pytest.mark.parametrize(
    ("keys", "entity", "is_open"),
    [
        ({"topic": "orders"}, "topic=orders", False),
        ({"topic": "orders", "client_id": "etl"}, "client-id=etl,topic=orders", False),
        ({"topic": "orders", "client_id": DEFAULT}, "client-id=etl,topic=orders", True),
        ({"topic_prefix": "ord"}, "topic=orders", True),
        ({"topic_prefix": "ord", "scope": "shared"}, "topic-prefix=ord", False),
        ({"topic": "orders", "user": DEFAULT}, "user=alice,topic=orders", True),
        ({"topic": "orders", "listener": "default"}, "listener=default,topic=orders", False),
    ],
)
def test_whose_bytes_are_added_up(keys, entity, is_open):
    of_topic = rule(**keys)
    assert of_topic.entity(ETL, "orders") == entity
    assert of_topic.is_open is is_open
    assert Rule.of(of_topic.document()) == of_topic


def test_bytes_of_a_topic_count_beside_those_of_the_client():
    world = QuotaWorld(rule(client_id="etl"), rule(1, client_id="etl", topic="orders"), burst_ms=0)
    client = world.client_quotas("etl")
    assert client.walks(CONSUMER)
    assert not client.walks(PRODUCER)
    assert client.topic_meter(CONSUMER, "clicks", 0.0) is None
    meter = client.topic_meter(CONSUMER, "orders", 0.0)
    assert client.charge(CONSUMER, 3000, 0.0).delay_ms == 3000
    charge = client.charge_at(meter, 2000, 0.0)
    assert (charge.delay_ms, charge.meter.entity) == (2000, "client-id=etl,topic=orders")
    assert {row.entity for row in world.rows(0.0)} == {"client-id=etl", charge.meter.entity}
    assert client.owed_at(meter, 500.0).delay_ms == 1500
    assert client.owed_at(meter, 2000.0) is None


def test_who_has_no_such_rule_is_not_walked():
    world = QuotaWorld(rule(client_id="etl", topic="orders"), rule(1, PRODUCER, topic="logs"))
    other = world.client_quotas("other")
    assert not other.walks(CONSUMER)
    assert other.walks(PRODUCER)
    assert other.is_bounded
    assert other.lends(CONSUMER, GateWaiter(lambda _: None), 0.0)
    assert not other.lends(PRODUCER, GateWaiter(lambda _: None), 0.0)
    assert world.quotas.unbounded() == [other.identity]


def test_a_request_for_a_topic_that_owes_waits_at_its_gate():
    world = QuotaWorld(rule(topic="orders"), burst_ms=0)
    one, other = world.client_quotas("one"), world.client_quotas("other")
    meter = one.topic_meter(CONSUMER, "orders", 0.0)
    assert other.topic_meter(CONSUMER, "orders", 0.0) is meter, "it is one topic for all"
    one.charge_at(meter, 5000, 0.0)
    wakes = []
    waiter = GateWaiter(wakes.append)
    assert other.admit(CONSUMER, waiter, None, 0.0)
    assert not other.admit(CONSUMER, waiter, None, 0.0, topics=[meter])
    assert (waiter.meter.kind, waiter.meter.entity) == (CONSUMER, "topic=orders")
    assert wakes == [5000.0]
    assert other.admit(CONSUMER, waiter, None, 5000.0, topics=[meter])


def test_rules_that_change_have_their_sensors_looked_up_again():
    of_topic = rule(topic="orders")
    world = QuotaWorld(of_topic)
    client = world.client_quotas()
    meter = client.topic_meter(CONSUMER, "orders", 0.0)
    world.quotas.update(QuotaManagerSettings(rules=(rule(topic="orders", client_id="c"),)))
    assert client.topic_meter(CONSUMER, "orders", 0.0) is not meter
    world.quotas.update(QuotaManagerSettings())
    assert not client.walks(CONSUMER)
    assert client.topic_meter(CONSUMER, "orders", 0.0) is None
    world.quotas.update(QuotaManagerSettings(rules=(of_topic,)))
    assert client.topic_meter(CONSUMER, "orders", 0.0) is meter


@pytest.mark.parametrize("how", ["rule", "pause"])
def test_what_is_not_enforced_is_measured_and_held_for_nothing(how):
    of_topic = Rule(topic="orders", bounds={CONSUMER: BOUND}, enforce=how != "rule")
    world = QuotaWorld(burst_ms=0)
    pauses = [QuotaPause({"client-id": "c"}, 1e9)] if how == "pause" else []
    settings = QuotaManagerSettings(rules=(of_topic,), burst_ms=0)
    world.quotas.update(settings, RuleTable([of_topic], pauses=pauses))
    client = world.client_quotas("c")
    meter = client.topic_meter(CONSUMER, "orders", 0.0)
    assert client.charge_at(meter, 1e6, 0.0) is None
    assert client.owed_at(meter, 0.0) is None
    assert client.admit(CONSUMER, GateWaiter(lambda _: None), None, 0.0, topics=[meter])
    (row,) = world.rows(0.0)
    assert (row.enforced, row.would_throttle) == (False, 1)


def test_a_pause_is_of_clients():
    with pytest.raises(ValueError, match='"topic" is not known here'):
        _ = QuotaPause({"topic": "orders"}, 1.0).name


def test_what_a_topic_owes_is_kept_with_its_sensor_and_not_with_its_clients():
    world = QuotaWorld(rule(topic="orders"), burst_ms=0)
    client = world.client_quotas()
    client.charge_at(client.topic_meter(CONSUMER, "orders", 0.0), 5000, 0.0)
    (debt,) = world.quotas.debts(lambda _: True, 0.0)
    assert (debt.entity, debt.owed_ms) == ("topic=orders", 5000)
    world.quotas.owe(client.identity, CONSUMER, LATER_MS, 0.0)
    (debt,) = world.quotas.debts(lambda _: True, 0.0)
    assert debt.owed_ms == 5000, "that was of all topics"
    again = QuotaWorld(rule(topic="orders"), burst_ms=0)
    again.quotas.take_debts([debt], 0.0)
    other = again.client_quotas()
    assert other.owed_at(other.topic_meter(CONSUMER, "orders", 0.0), 0.0).delay_ms == 5000


def test_further_topics_share_a_sensor_and_what_is_known_of_them_is_bounded(monkeypatch):
    monkeypatch.setattr("proxy.quota.client_quotas.MAX_TOPICS", 2)
    world = QuotaWorld(rule(topic_prefix="logs-"), max_client_entities=1)
    client = world.client_quotas()
    entities = {client.topic_meter(CONSUMER, f"logs-{n}", 0.0).entity for n in range(9)}
    assert entities == {"topic=logs-0", "other,topic-prefix=logs-"}
    assert len(client.topic_meters) == 2
