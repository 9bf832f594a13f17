"""What `check` says of the workers' shares of the clients."""

from pathlib import Path

import pytest
import yaml

from proxy.config import load_config
from proxy.quota.entities import ClientIdentity
from proxy.quota.rules import RuleTable
from proxy.tier.check_keys import MEND, MEND_QUERIES, explain_key, find_key_hints, keys_of

BOUND = {"consumer_byte_rate": 1000}
QUERY = [{"name": "q", "client-id": "spark-q"}]


def said(
    folder: Path, rules: list[dict[str, object]], queries: object = None, workers: int = 4
) -> tuple[list[str], list[str]]:
    """Return the hints, and what is said of one client."""
    listener = {
        "name": "main",
        "bind": "127.0.0.1:9092",
        "advertised_host": "proxy",
        "broker_ports": "19100-19107",
    }
    document = {
        "cluster": {"bootstrap_servers": ["kafka:9092"]},
        "listeners": [listener],
        "quotas": {"rules": rules},
        "queries": queries or [],
        "workers": workers,
        "tier": {"name": "tier", "machine": "machine"},
        "state": {"kind": "kafka", "topic": "state"},
    }
    file = folder / "proxy.yaml"
    file.write_text(yaml.safe_dump(document))
    config = load_config(file)
    table = RuleTable(config.quota_settings.rules)
    keys = keys_of(config, table)
    client = ClientIdentity("main", "anna", "spark-q")
    return [*find_key_hints(config, table, keys)], [*explain_key(keys, client)]


@pytest.mark.parametrize(
    ("rules", "queries", "mend"),
    [
        pytest.param([{"user": "<default>"}], QUERY, MEND_QUERIES, id="users and a query"),
        pytest.param([{"user": "anna"}, {"user": "bob"}], QUERY, MEND_QUERIES, id="two users"),
        pytest.param([{"client-id": "<default>", "scope": "shared"}], None, MEND, id="one for all"),
        pytest.param([{"user": "<default>"}], None, None, id="users"),
        pytest.param([{"client-id": "<default>"}], QUERY, None, id="clients"),
        pytest.param(
            [{"user": "<default>", "client-id": "<default>"}], QUERY, None, id="users' clients"
        ),
        pytest.param([], QUERY, None, id="no rule"),
        pytest.param([{"client-id": "one"}], None, None, id="one client"),
    ],
)
def test_one_key_for_all_is_said_with_a_mend(tmp_path, rules, queries, mend):
    hints, _ = said(tmp_path, [{**rule, **BOUND} for rule in rules], queries)
    assert len(hints) == (mend is not None)
    if mend is not None:
        assert hints[0].startswith("workers: 4: one of them serves all clients")
        assert hints[0].endswith(mend)
    assert said(tmp_path, [{**rule, **BOUND} for rule in rules], queries, workers=1)[0] == []


def test_a_topics_bound_for_all_clients_is_said_to_be_kept_by_one_member(tmp_path):
    rules = [{"topic": "orders", **BOUND}, {"client-id": "<default>", **BOUND}]
    for workers in (1, 4):
        (hint,), _ = said(tmp_path, rules, workers=workers)
        assert hint.startswith("rule 0 (")
        assert "a topic's bound for all clients together is kept by one member" in hint
    rules[0]["client-id"] = "<default>"
    assert said(tmp_path, rules)[0] == []


def test_the_mends_mend(tmp_path):
    rules = [{"user": "<default>", "client-id": "<default>", **BOUND}]
    assert said(tmp_path, rules, QUERY)[0] == []
    assert said(tmp_path, [{"client-id": "spark-q", **BOUND}, {"client-id": "x", **BOUND}])[0] == []


def test_a_client_is_told_its_key_its_slot_and_who_shares_them(tmp_path):
    rules = [{"user": "<default>", **BOUND}]
    _, lines = said(tmp_path, rules)
    assert lines == [
        "quota key: 'user=anna', slot 188",
        "     of all clients with user=anna",
    ]
    _, lines = said(tmp_path, rules, QUERY, workers=1)
    assert lines[0].startswith("quota key: 'spark-q', slot ")
    assert lines[1] == "     of all clients of user=<default>; spark-q, which overlap"
