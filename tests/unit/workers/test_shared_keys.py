"""What the supervisor and its workers make quota keys of is the same."""

from pathlib import Path

import yaml

from proxy.config import load_config
from proxy.quota.rules import RuleTable
from proxy.workers.shared_keys import KeyRules, client_sets, pack_rules, unpack_rules

RULES = [
    {"client-id": "<default>", "consumer_byte_rate": 1000},
    {"user": "anna", "consumer_byte_rate": 2000},
    {"client-id": "etl", "consumer_byte_rate": 3000, "adaptive": {"batch_interval": "1s"}},
]
DOCUMENT = {
    "cluster": {"bootstrap_servers": ["kafka:9092"]},
    "listeners": [
        {"name": "main", "bind": "127.0.0.1:9092", "advertised_host": "p", "broker_ports": 0}
    ],
    "quotas": {"rules": RULES},
    "queries": [{"name": "q", "client-id": "etl"}],
}


def test_what_a_worker_has_in_force_at_the_start_changes_nothing(tmp_path: Path):
    file = tmp_path / "proxy.yaml"
    file.write_text(yaml.safe_dump(DOCUMENT))
    config = load_config(file)
    ours = KeyRules.of(config)
    in_force = RuleTable(config.quota_settings.rules).rules
    assert KeyRules(unpack_rules(pack_rules(in_force)), client_sets(config)) == ours
    assert KeyRules.unpack(ours.pack()) == ours
