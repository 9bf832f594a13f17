"""What `check` says of the workers' shares of the clients."""

from pathlib import Path

import pytest
import yaml

from proxy.config import load_config
from proxy.quota.entities import ClientIdentity
from proxy.quota.rules import RuleTable
from proxy.tier.key_rules import MEND, explain_key, find_undivided_rules, make_quota_keys

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
    keys = make_quota_keys(config, table)
    client = ClientIdentity("main", "anna", "spark-q")
    return [*find_undivided_rules(config, table, keys)], [*explain_key(config, table, keys, client)]


USERS = {"user": "<default>"}


@pytest.mark.parametrize(
    ("rules", "queries", "is_said"),
    [
        pytest.param([USERS], QUERY, True, id="users and a query"),
        pytest.param([USERS], None, False, id="users"),
        pytest.param([{"client-id": "<default>", "scope": "shared"}], None, True, id="all"),
        pytest.param([{"client-id": "<default>"}], QUERY, False, id="clients"),
        pytest.param([{**USERS, "client-id": "<default>"}], QUERY, False, id="users' clients"),
    ],
)
def test_connections_of_clients_at_several_members_are_said_to_count_at_each(
    tmp_path, rules, queries, is_said
):
    counted = {"max_connections": 5, "connection_rate": 2}
    hints, _ = said(tmp_path, [{**rule, **BOUND, **counted} for rule in rules], queries)
    assert len(hints) == is_said
    for hint in hints:
        assert "each of which allows max_connections and connection_rate by itself" in hint
        assert hint.endswith(MEND)
    assert said(tmp_path, [{**rule, **BOUND} for rule in rules], queries)[0] == []


def test_a_client_is_told_its_key_its_slot_and_what_is_divided(tmp_path):
    assert said(tmp_path, [{**USERS, **BOUND}])[1] == ["quota key: 'user=anna', slot 188"]
    topic = {"topic": "orders", **BOUND}
    key, *divided = said(tmp_path, [{**USERS, **BOUND}, topic], QUERY)[1]
    assert key.startswith("quota key: 'client-id=spark-q', slot ")
    assert [line.split(" (")[0].strip() for line in divided] == ["rule 0", "rule 1"]
    assert divided[0].endswith("each member that serves its clients has a part of what they share")
