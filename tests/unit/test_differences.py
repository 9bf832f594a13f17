"""What a reload changed is told key by key, and is never too long."""

from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.config import Config, load_config
from proxy.config.differences import (
    MAX_SHOWN_KEYS,
    MAX_VALUE_CHARS,
    find_differences,
    find_in_force_changes,
)

TEXT = """\
cluster: {bootstrap_servers: [broker-1:9092]}
listeners:
  - {name: a, bind: 127.0.0.1:19092, advertised_host: h, broker_ports: 19100-19199}
"""
ETL = "quotas: {rules: [{client-id: etl, consumer_byte_rate: 1MiB}, {user: x, scope: shared, \
producer_byte_rate: 1}]}\n"


NIGHT = "client-id=etl; mon-sun 00:00 to 06:00 UTC"
PIPELINE = """\
pipelines:
  - name: orders
    sources: [{client-id: feed, produces: [A], normal_rate: 1000, step: 100}]
    stages: [{name: enrich, consumes: [A], band: [0, 10], period: 5s, normal_rate: 9, step: 2}]
"""
KEYS_OF_RULE = 5
"""Of a rule with one key and one bound: these, and what has a default."""


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], Config]:
    def from_text(text: str) -> Config:
        path = tmp_path / "proxy.yaml"
        path.write_text(TEXT + text)
        return load_config(path)

    return from_text


CASES = {
    "nothing": (ETL, ETL, {}, {}),
    "a bound": (
        ETL,
        ETL.replace("1MiB", "2MiB"),
        {"quotas.rules[client-id=etl].consumer_byte_rate": "1MiB per second"},
        {"quotas.rules[client-id=etl].consumer_byte_rate": "2MiB per second"},
    ),
    "a rule that went, others stay though they move": (
        ETL,
        "quotas: {rules: [{user: x, scope: shared, producer_byte_rate: 1}]}\n",
        {
            "quotas.rules[client-id=etl].client-id": "etl",
            "quotas.rules[client-id=etl].scope": "each",
            "quotas.rules[client-id=etl].enforce": True,
            "quotas.rules[client-id=etl].expected": False,
            "quotas.rules[client-id=etl].consumer_byte_rate": "1MiB per second",
        },
        {},
    ),
    "a rule that has a schedule beside one that has none": (
        ETL,
        ETL.replace("[{", "[{client-id: etl, producer_byte_rate: 1, when: {to: '06:00'}}, {"),
        {},
        {
            f"quotas.rules[{NIGHT}].client-id": "etl",
            f"quotas.rules[{NIGHT}].scope": "each",
            f"quotas.rules[{NIGHT}].enforce": True,
            f"quotas.rules[{NIGHT}].expected": False,
            f"quotas.rules[{NIGHT}].producer_byte_rate": "1 per second",
            f"quotas.rules[{NIGHT}].when.days": "mon-sun",
            f"quotas.rules[{NIGHT}].when.from": "00:00",
            f"quotas.rules[{NIGHT}].when.to": "06:00",
            f"quotas.rules[{NIGHT}].when.timezone": "UTC",
        },
    ),
    "a default": (
        "",
        "throttle: {mode: mute}\nlimits: {idle_timeout: 5m}\n",
        {"throttle.mode": "delay", "limits.idle_timeout": 600.0},
        {"throttle.mode": "mute", "limits.idle_timeout": 300.0},
    ),
    "a query": (
        "queries: [{name: orders, commit_group: a}]\n",
        "queries: [{name: orders, commit_group: b}]\n",
        {"queries[orders].commit_group": "a"},
        {"queries[orders].commit_group": "b"},
    ),
    "durations, in seconds": (
        "queries: [{name: orders}]\nquotas: {rules: [{client-id: a, consumer_byte_rate: 1, "
        "adaptive: {hold: 1m}}]}\n",
        "queries: [{name: orders, stuck_after: 6m}]\nquotas: {rules: [{client-id: a, "
        "consumer_byte_rate: 1, adaptive: {hold: 500ms}}]}\n",
        {"queries[orders].stuck_after": 300.0, "quotas.rules[client-id=a].adaptive.hold": 60.0},
        {"queries[orders].stuck_after": 360.0, "quotas.rules[client-id=a].adaptive.hold": 0.5},
    ),
    "a stage, a source, and a pipeline's own": (
        PIPELINE,
        PIPELINE.replace("100}", "50}").replace("5s", "6s") + "    max_pending: {bytes: 1kB}\n",
        {
            "pipelines[orders].sources[0].step": 100.0,
            "pipelines[orders].stages[enrich].period": 5.0,
        },
        {
            "pipelines[orders].max_pending.bytes": 1000,
            "pipelines[orders].sources[0].step": 50.0,
            "pipelines[orders].stages[enrich].period": 6.0,
        },
    ),
    "a section": (
        "",
        "admin: {bind: '[::1]:9645'}\nprogress: {answer_lookups: false}\n",
        {"admin.bind": "127.0.0.1:9644", "progress.answer_lookups": True},
        {"admin.bind": "[::1]:9645", "progress.answer_lookups": False},
    ),
    "what a list is": (
        "admin: {hosts: [a.example]}\n",
        "admin: {hosts: [a.example, b.example]}\n",
        {"admin.hosts": "a.example"},
        {"admin.hosts": "a.example, b.example"},
    ),
}


@pytest.mark.parametrize(("text", "other", "was", "is_now"), CASES.values(), ids=CASES.keys())
def test_keys_that_differ(
    load: Callable[[str], Config],
    text: str,
    other: str,
    was: dict[str, object],
    is_now: dict[str, object],
) -> None:
    assert find_differences(load(text), load(other)) == (was, is_now)
    assert find_differences(load(other), load(text)) == (is_now, was)


def test_a_file_that_is_new_as_a_whole_is_cut(load: Callable[[str], Config]) -> None:
    rules = ", ".join(
        f"{{client-id: {'x' * 2 * MAX_VALUE_CHARS}{number}, consumer_byte_rate: 1}}"
        for number in range(2000)
    )
    was, is_now = find_differences(load(""), load(f"quotas: {{rules: [{rules}]}}\n"))
    assert was == {"more": f"{2000 * KEYS_OF_RULE - MAX_SHOWN_KEYS} further keys"}
    assert len(is_now) == MAX_SHOWN_KEYS + 1
    assert max(len(str(value)) for value in is_now.values()) == MAX_VALUE_CHARS + 3


def test_what_a_schedule_changed_is_told_unless_it_is_new_or_gone():
    before = {"rule 0": True, "rule 1": False, "rule 2": True, "gone": True}
    after = {"rule 0": False, "rule 1": True, "rule 2": True, "new": True}
    assert find_in_force_changes(before, after) == (
        {"rule 0": "in force", "rule 1": "not in force"},
        {"rule 0": "not in force", "rule 1": "in force"},
    )
    assert find_in_force_changes(after, after) == ({}, {})
