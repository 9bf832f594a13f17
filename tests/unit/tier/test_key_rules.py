"""What quota keys are made of is the same in all processes, and gets through the state as it is."""

import json
import zlib
from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from proxy.config import load_config
from proxy.queries.record_owner import is_unowned_record_key
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.rules import AdaptiveSettings, QuotaPause, Rule, RuleTable
from proxy.state import MemoryStore, Record, StateError
from proxy.tier.key_rules import (
    KEYS_KEY,
    MAX_KEYS_BYTES,
    KeyDefinition,
    TierKeyRules,
    digest_in_force,
    linked_clients,
    rules_text,
)
from proxy.tier.quota_keys import LinkedClients
from proxy.tier.tier_store import COMMON_SLOT

KINDS = [QuotaKind.CONSUMER_BYTE_RATE, QuotaKind.PRODUCER_BYTE_RATE]
names = st.sampled_from(["a", "ab", "b,c", "ü", "d e"])
users = st.none() | names


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    client_id, prefix = draw(st.sampled_from([(None, None), ("x", None), (None, "x")]))
    user = draw(users)
    if (user, client_id, prefix) == (None, None, None):
        client_id = "y"
    return Rule(
        user=user,
        client_id=client_id,
        client_id_prefix=prefix,
        listener=draw(users),
        scope="each",
        bounds=draw(st.dictionaries(st.sampled_from(KINDS), st.floats(1, 1e12), min_size=1)),
        expected=draw(st.booleans()),
        enforce=draw(st.booleans()),
    )


sets = st.builds(LinkedClients, names, st.frozensets(names))
key_rules = st.builds(
    KeyDefinition,
    st.lists(rules(), max_size=4).map(rules_text),
    st.lists(sets, max_size=3).map(tuple),
)
clients = st.builds(ClientIdentity, names, users, users)


@given(key_rules, st.lists(clients, max_size=5))
def test_keys_are_the_same_after_the_state(
    ours: KeyDefinition, asked: list[ClientIdentity]
) -> None:
    store = MemoryStore()
    store.put_many([ours.record()])
    found = KeyDefinition.read(store)
    assert found == ours
    mine, theirs = ours.keys(), found.keys()
    for each in asked:
        assert theirs.key_of(each) == mine.key_of(each)


@given(key_rules)
def test_the_same_rules_make_the_same_record(ours: KeyDefinition) -> None:
    """Otherwise it would be written again and again."""
    sorted_sets = [
        replace(each, client_ids=frozenset(sorted(each.client_ids))) for each in ours.together
    ]
    again = KeyDefinition(ours.rules, tuple(sorted_sets))
    assert again.record() == ours.record()


def test_a_rule_that_adapts_stays_one() -> None:
    bounds = {KINDS[0]: 10.0}
    adapts = Rule(client_id="a", bounds=bounds, adaptive=AdaptiveSettings(min_rate=5.0))
    assert [*map(Rule.of, json.loads(rules_text([adapts])))] == [adapts]


def test_what_the_release_before_wrote_is_read() -> None:
    said = {"client_id": "a", "scope": "each", "number": 3, "bounds": {KINDS[0]: 5.0}}
    text = json.dumps([[{**said, "adaptive": each} for each in (False, True)], [["q", ["a"], []]]])
    store = MemoryStore()
    store.put_many([Record.of(KEYS_KEY, b64encode(zlib.compress(text.encode())).decode(), 1)])
    found = KeyDefinition.read(store)
    assert found is not None
    bounds = {KINDS[0]: 5.0}
    plain = Rule(client_id="a", bounds=bounds)
    assert [*map(Rule.of, json.loads(found.rules))] == [
        plain,
        replace(plain, adaptive=AdaptiveSettings()),
    ]
    assert found.together == (LinkedClients("q", frozenset("a")),)


def test_nobody_has_written_it_yet() -> None:
    assert KeyDefinition.read(MemoryStore()) is None


def packed(text: bytes) -> Record:
    """Return a record of this text in the place of rules."""
    return Record.of(KEYS_KEY, b64encode(zlib.compress(text)).decode(), 1)


@pytest.mark.parametrize(
    "record",
    [
        Record.of(KEYS_KEY, "bm90IHppcHBlZA==", 1),
        Record.of(KEYS_KEY, "?", 1),
        Record.of(KEYS_KEY, KeyDefinition("[]", ()).record().value, 2),
        packed(b"[" * 100_000),
        packed(b" " * MAX_KEYS_BYTES + b"[[],[]]"),
    ],
)
def test_what_cannot_be_read_is_said_with_how_to_mend_it(record: Record) -> None:
    store = MemoryStore()
    store.put_many([record])
    with pytest.raises(StateError, match="the rules that the tier goes by cannot be read") as told:
        KeyDefinition.read(store)
    assert "all machines" in told.value.fix


DOCUMENT = {
    "cluster": {"bootstrap_servers": ["kafka:9092"]},
    "listeners": [
        {"name": "main", "bind": "127.0.0.1:9092", "advertised_host": "p", "broker_ports": 0}
    ],
    "quotas": {
        "rules": [
            {"client-id": "<default>", "consumer_byte_rate": 1000},
            {"user": "anna", "consumer_byte_rate": 2000},
            {"client-id": "etl", "consumer_byte_rate": 3000, "adaptive": {"batch_interval": "1s"}},
        ]
    },
    "queries": [{"name": "q", "client-id": "etl"}],
}


def test_what_a_worker_has_in_force_at_the_start_changes_nothing(tmp_path: Path):
    file = tmp_path / "proxy.yaml"
    file.write_text(yaml.safe_dump(DOCUMENT))
    config = load_config(file)
    in_force = rules_text(RuleTable(config.quota_settings.rules).rules)
    assert KeyDefinition(in_force, linked_clients(config)) == KeyDefinition.of(config)


def test_the_slot_of_a_record_is_that_of_who_has_it(tmp_path: Path):
    file = tmp_path / "proxy.yaml"
    file.write_text(yaml.safe_dump(DOCUMENT))
    rules = TierKeyRules(load_config(file))
    name, quoted = "a b/c%d\u00e9", "a%20b%2Fc%25d%C3%A9"
    of_client, of_pipeline = rules.keys.slot_of_query(name), rules.keys.slot_of_pipeline(name)
    slots = {
        f"progress/{quoted}/t/0": of_client,
        f"pressure/{quoted}/entity": of_client,
        f"flow/{quoted}/node": of_pipeline,
        f"ledger/{quoted}/root/1": of_pipeline,
        "owed/7": 7,
        "watch/7": 7,
        f"quotas/client-id={quoted}": COMMON_SLOT,
        "pauses/all": COMMON_SLOT,
        "audit/000000000000001": COMMON_SLOT,
        "watch/written": COMMON_SLOT,
    }
    assert {key: rules.slot_of_record(key) for key in slots} == slots
    every = {key for key, slot in slots.items() if slot in (of_client, of_pipeline)}
    assert {key for key in slots if not is_unowned_record_key(key)} == every


READ = QuotaKind.CONSUMER_BYTE_RATE
ONE = Rule(client_id="a", bounds={READ: 1000.0}, number=1, place="here:1")
OTHER = Rule(user="u", bounds={READ: 1000.0, QuotaKind.PRODUCER_BYTE_RATE: 5.0}, number=2)


def digest(table: RuleTable) -> str:
    return digest_in_force(table, enforce=True)


def test_where_a_rule_stands_does_not_matter():
    moved = [replace(OTHER, number=1), replace(ONE, number=2, place="there:9")]
    assert digest(RuleTable([ONE, OTHER])) == digest(RuleTable(moved))


def test_all_that_holds_clients_matters():
    pause = QuotaPause({"client-id": "a"}, 1e9)
    tables = [
        RuleTable([]),
        RuleTable([ONE]),
        RuleTable([ONE, OTHER]),
        RuleTable([ONE], pauses=[pause]),
        RuleTable([replace(ONE, client_id="b")]),
        RuleTable([replace(ONE, bounds={READ: 1001.0})]),
        RuleTable([replace(ONE, enforce=False)]),
        RuleTable([replace(ONE, adaptive=AdaptiveSettings(min_rate=5.0))]),
        RuleTable([replace(ONE, number=1), replace(ONE, number=2, bounds={READ: 1.0})]),
        RuleTable([replace(ONE, number=2), replace(ONE, number=1, bounds={READ: 1.0})]),
    ]
    assert len({digest(table) for table in tables}) == len(tables)
    assert digest_in_force(tables[0], enforce=False) != digest(tables[0])
