"""Each gauge that a proxy shows has a rule for several members, and no other name has one."""

import asyncio
import sys
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry, generate_latest

from metrics import Instruments, MemberInstruments, MemberScrape
from metrics.merge_rules import GAUGE_RULES, MAX, MIN, gauge_rule
from metrics.merged import COUNTED
from proxy.app import App
from proxy.config import load_config

sys.path.append(str(Path(__file__).parents[1]))

from test_contributing import metric_rows

GAUGE = "gauge"
CONFIG = {
    "cluster": {"bootstrap_servers": ["127.0.0.1:1"]},  # nobody answers there
    "listeners": [
        {
            "name": "default",
            "bind": "127.0.0.1:0",
            "advertised_host": "127.0.0.1",
            "broker_ports": 0,
        }
    ],
    "queries": [{"name": "orders"}],
    "state": {"kind": "memory"},
    "admin": {"bind": "127.0.0.1:0"},
}


def types_of(registry: CollectorRegistry) -> dict[str, str]:
    """Return the type of each family as a scrape has it."""
    families = MemberScrape.read(generate_latest(registry), 1).families
    return {name: family.type for name, family in families.items()}


async def types_of_app(folder: Path) -> dict[str, str]:
    """Return the types of all families that a proxy registers; it does so before it starts."""
    path = folder / "proxy.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return types_of(App(load_config(path), path).metrics)


def test_every_gauge_has_a_rule_and_there_are_no_others(tmp_path: Path) -> None:
    of_app = asyncio.run(types_of_app(tmp_path))
    supervisor = CollectorRegistry()
    MemberInstruments(supervisor)
    # Sensors and partitions are shown only once there are clients.
    with_clients = {row.name: row.type for row in metric_rows()}
    shown = {**of_app, **types_of(supervisor), **with_clients}
    assert set(shown.values()) <= {*COUNTED, GAUGE}
    gauges = {name for name, kind in shown.items() if kind == GAUGE}
    assert set(GAUGE_RULES) == gauges
    assert "process_resident_memory_bytes" in of_app


def test_an_unknown_gauge_is_shown_at_its_highest() -> None:
    assert gauge_rule("another_gauge") is MAX
    assert gauge_rule("another_created") is MIN


def test_the_supervisors_metrics_are_none_of_the_workers() -> None:
    worker, supervisor = CollectorRegistry(), CollectorRegistry()
    Instruments(worker, max_label_sets=1)
    MemberInstruments(supervisor)
    assert not set(types_of(worker)) & set(types_of(supervisor))
