"""What `check` says of names that several machines of a tier may have."""

from pathlib import Path

import pytest
import yaml

from proxy.config import load_config
from proxy.config.check_report import find_hosts_without_machine
from proxy.config.reload import NEEDS_RESTART

TIER = {"name": "t", "machine": "proxy-1"}


def hints(tmp_path: Path, host: str, tier: object = TIER) -> list[str]:
    file = tmp_path / "proxy.yaml"
    listener = {
        **{"name": "default", "bind": "127.0.0.1:0"},
        **{"advertised_host": host, "broker_ports": "19100-19199"},
    }
    settings = {
        "cluster": {"bootstrap_servers": ["127.0.0.1:9092"]},
        "listeners": [listener],
        "state": {"kind": "kafka", "topic": "state"},
        "admin": {"bind": "127.0.0.1:0"},
    }
    file.write_text(yaml.safe_dump({**settings, **({"tier": tier} if tier else {})}))
    return [*find_hosts_without_machine(load_config(file))]


@pytest.mark.parametrize(
    "host", ["{machine}.kafka.example", "proxy-1.kafka.example", "Proxy-1", "127.0.0.1"]
)
def test_a_name_of_one_machine_needs_no_hint(tmp_path: Path, host: str) -> None:
    assert hints(tmp_path, host) == []


@pytest.mark.parametrize("host", ["kafka.example", "proxy-10.kafka.example", "192.0.2.1"])
def test_a_name_that_may_be_that_of_all(tmp_path: Path, host: str) -> None:
    (hint,) = hints(tmp_path, host)
    assert f"advertised_host {host} does not say which machine" in hint
    assert hint.endswith("fix, if other machines have it too: write {machine} in it")


def test_without_a_tier_any_name_will_do(tmp_path: Path) -> None:
    assert hints(tmp_path, "kafka.example", None) == []


def test_a_change_of_the_tier_waits_for_a_restart() -> None:
    assert "tier" in NEEDS_RESTART
