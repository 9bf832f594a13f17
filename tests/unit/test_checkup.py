"""What `quota-proxy doctor` makes of what was seen, as a table: one thing wrong in each case."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import load_config
from proxy.onboarding.checkup import (
    AdminSnapshot,
    CheckVerdict,
    Finding,
    ListenerCheckResult,
    check_query,
    query_or_unlisted,
)
from proxy.quota.rules import RuleTable

NAME = "orders"
CONFIG = """\
cluster: {bootstrap_servers: [broker-1:9092]}
listeners:
  - {name: default, bind: 127.0.0.1:19092, advertised_host: h, broker_ports: 19100-19199}
quotas:
  rules:
    - {client-id: orders, consumer_byte_rate: 10MiB, adaptive: {}}
    - {client-id: <default>, consumer_byte_rate: 50MiB}
queries:
  - {name: orders, commit_group: orders-progress}
"""
SELECTORS = frozenset({"client-id=orders", "client-id=<default>"})

OK, NOTE, WRONG, UNKNOWN = CheckVerdict

PROGRESS: Mapping[str, Any] = {
    "name": NAME,
    "client_id": NAME,
    "state": "running",
    "error": None,
    "trigger": {"kind": "processing_time", "interval_s": 2.0},
    "last_heard": 1790000000.0,
    "batch": {"id": 7},
    "reports": {"refused": {"repeated": 1}},
    "commit": {"group": "orders-progress", "error": None},
    "advice": [],
    "totals": {"stuck_partitions": 0, "lag_records": 1200},
    "partitions": [{"topic": "orders", "delivered_to": 100}],
}
UNHEARD = {**PROGRESS, "last_heard": None, "partitions": []}
STATUS: Mapping[str, Any] = {
    "version": "0.1.0",
    "ready": True,
    "not_ready_reason": None,
    "warning": None,
    "config_loads": [{"result": "ok", "message": "in force"}],
    "throttling": {"paused": [], "scheduled": []},
}
ADMIN = AdminSnapshot(
    url="http://127.0.0.1:9644",
    token_file="spark-token",
    status=STATUS,
    file_rules=SELECTORS,
    connections=({"client_id": NAME}, {"client_id": NAME}, {"client_id": None}),
    queries=(PROGRESS,),
    refused_reports={},
)
LISTENER = ListenerCheckResult(
    "default", "h:19092", brokers={"h:19101": None}, topics={"orders": 0}
)


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., list[Finding]]:
    def findings(
        config: str = CONFIG,
        name: str = NAME,
        admin: AdminSnapshot = ADMIN,
        listener: ListenerCheckResult = LISTENER,
    ) -> list[Finding]:
        file = tmp_path / "proxy.yaml"
        file.write_text(config)
        loaded = load_config(file)
        table = RuleTable(loaded.quota_settings.rules)
        return list(check_query(loaded, table, query_or_unlisted(loaded, name), admin, [listener]))

    return findings


def told(findings: list[Finding], verdict: CheckVerdict) -> list[tuple[str, str]]:
    return [
        (each.check, f"{each.text} | {each.fix}") for each in findings if each.verdict is verdict
    ]


def test_nothing_is_wrong(check: Callable[..., list[Finding]]) -> None:
    found = check()
    assert {each.verdict for each in found} == {OK}
    assert [(each.check, each.text) for each in found if each.check != "rule"] == [
        ("queries", "queries names it; what it completes is committed to orders-progress"),
        ("admin port", "http://127.0.0.1:9644 answers, version 0.1.0"),
        ("token", "a report with the token in spark-token is taken"),
        ("listener default", "h:19092 answers, and so do h:19101"),
        ("topic", "the cluster has 'orders'"),
        ("client", "2 connections with client id 'orders' are open"),
        ("reports", "its listener reports: running, last batch 7"),
        ("trigger", "processing_time every 2 s goes with its rule"),
        ("lag", "1,200 records are not completed"),
    ]
    (rule,) = (each.text for each in found if each.check == "rule")
    assert "proxy.yaml:6" in rule
    assert "gives client id 'orders' 10MiB per second, and fits its batches to its trigger" in rule


def progress(**changes: Any) -> dict[str, Any]:
    return {"admin": replace(ADMIN, queries=({**PROGRESS, **changes},))}


def status(**changes: Any) -> dict[str, Any]:
    return {"admin": replace(ADMIN, status={**STATUS, **changes})}


def advice(kind: str, text: str) -> dict[str, Any]:
    return progress(advice=[{"kind": kind, "text": text}])


NO_DEFAULT = CONFIG.replace("    - {client-id: <default>, consumer_byte_rate: 50MiB}\n", "")
NO_QUERY = CONFIG[: CONFIG.index("queries:")] + "limits: {max_connections: 10}\n"
OTHER_RULE = CONFIG.replace("client-id: orders", "client-id: Orders")
FAR_RULE = CONFIG.replace("client-id: orders", "client-id: reports")
OTHER_RULES = {"file_rules": frozenset({"client-id=Orders", "client-id=<default>"})}
BLANK_RULES = {"file_rules": frozenset({"client-id=orders ", "client-id=<default>"})}
FAR_RULES = {"file_rules": frozenset({"client-id=reports", "client-id=<default>"})}
AWAY = AdminSnapshot(
    "http://127.0.0.1:9644", failure="http://127.0.0.1:9644 does not answer: refused"
)

CASES: dict[str, tuple[dict[str, Any], CheckVerdict, str, list[str]]] = {
    "no rule for it": (
        {
            "config": FAR_RULE.replace(", consumer_byte_rate: 50MiB", ", producer_byte_rate: 1MB"),
            "admin": replace(ADMIN, **FAR_RULES),
        },
        *(WRONG, "rule"),
        ["no rule bounds client id 'orders'", "add {client-id: orders, consumer_byte_rate"],
    ),
    "a rule in other letters": (
        {"config": OTHER_RULE, "admin": replace(ADMIN, **OTHER_RULES)},
        *(WRONG, "rule"),
        ["no rule names client id 'orders', and one names 'Orders'", "say the same name"],
    ),
    "a rule with a blank": (
        {
            "config": CONFIG.replace("client-id: orders", 'client-id: "orders "'),
            "admin": replace(ADMIN, **BLANK_RULES),
        },
        *(WRONG, "rule"),
        ["one names 'orders '"],
    ),
    "only the rule of all others": (
        {"config": FAR_RULE, "admin": replace(ADMIN, **FAR_RULES)},
        *(OK, "rule"),
        ["50MiB per second, as all that no other rule names"],
    ),
    "the cluster's quotas": (
        {
            "config": NO_DEFAULT.replace("client-id: orders", "client-id: reports").replace(
                "quotas:\n", "quotas:\n  source: kafka\n"
            ),
            "admin": replace(ADMIN, file_rules=frozenset({"client-id=reports"})),
        },
        *(NOTE, "rule"),
        ["the cluster's quotas may"],
    ),
    "a rule that is not enforced": (
        {"config": CONFIG.replace("10MiB,", "10MiB, enforce: false,")},
        *(NOTE, "rule"),
        ["is not enforced"],
    ),
    "followed by its adaptive rule alone": (
        {"config": NO_QUERY},
        *(NOTE, "queries"),
        ["is not committed", "add {name: orders, commit_group: orders-progress} to queries"],
    ),
    "not followed": (
        {"config": NO_QUERY.replace(", adaptive: {}", "")},
        *(WRONG, "queries"),
        ["queries does not name 'orders'", "add {name: orders, commit_group"],
    ),
    "no proxy": ({"admin": AWAY}, WRONG, "admin port", ["does not answer", "start the proxy"]),
    "not ready": (
        status(ready=False, not_ready_reason="no broker answers"),
        *(WRONG, "proxy"),
        ["can't be served: no broker answers", "cluster.bootstrap_servers"],
    ),
    "a warning": (status(warning="slow"), NOTE, "proxy", ["slow"]),
    "a reload that failed": (
        status(config_loads=[{"result": "failed", "message": "x.yaml:3: bad"}]),
        *(WRONG, "proxy"),
        ["was not loaded again: x.yaml:3: bad", "mend the file"],
    ),
    "another file than the proxy's": (
        {"admin": replace(ADMIN, file_rules=frozenset({"client-id=x"}))},
        *(WRONG, "proxy"),
        ["has other rules than this file", "--url"],
    ),
    "paused": (status(throttling={"paused": [{}]}), NOTE, "proxy", ["quotas are paused"]),
    "a token that is wrong": (
        {"admin": replace(ADMIN, refused_token="spark-token: the token is wrong")},
        *(WRONG, "token"),
        ["spark-token: the token is wrong", "with the right report"],
    ),
    "no token needed": (
        {"admin": replace(ADMIN, token_file=None)},
        *(OK, "token"),
        ["reports need none"],
    ),
    "a listener that does not answer": (
        {"listener": ListenerCheckResult("default", "h:19092", failure="h:19092: refused")},
        *(WRONG, "listener default"),
        ["clients are told h:19092, and from here h:19092: refused", "advertised_host"],
    ),
    "a broker's port that does not answer": (
        {"listener": replace(LISTENER, brokers={"h:19101": None, "h:19102": "refused"})},
        *(WRONG, "listener default"),
        ["h:19102: refused", "broker_ports"],
    ),
    "a listener that is not asked further": (
        {"listener": ListenerCheckResult("default", "h:19092", unasked="it speaks TLS")},
        *(OK, "listener default"),
        ["were not asked for: it speaks TLS"],
    ),
    "no topic known": (
        {"listener": replace(LISTENER, topics={})},
        *(UNKNOWN, "topic"),
        ["--topic"],
    ),
    "no such topic": (
        {"listener": replace(LISTENER, topics={"order": 3})},
        *(WRONG, "topic"),
        ["has no topic 'order'", "create it"],
    ),
    "a topic that may not be seen": (
        {"listener": replace(LISTENER, topics={"orders": 29})},
        *(WRONG, "topic"),
        ["TOPIC_AUTHORIZATION_FAILED"],
    ),
    "never connected": (
        {"admin": replace(ADMIN, connections=(), queries=(UNHEARD,))},
        *(WRONG, "client"),
        ["no client with client id 'orders'", "kafka.client.id 'orders'"],
    ),
    "connected by another name": (
        {
            "admin": replace(
                ADMIN, connections=({"client_id": "order"},), queries=(UNHEARD,)
            )
        },
        *(WRONG, "client"),
        ["but 'order' is", "say the same: 'orders'"],
    ),
    "connected by its group": (
        {
            "admin": replace(
                ADMIN,
                connections=({"client_id": "consumer-orders-1-executor-2"},),
                queries=(UNHEARD,),
            )
        },
        *(WRONG, "client"),
        ["with groupIdPrefix nobody can tell", "without by_group"],
    ),
    "has read, and is away": (
        {"admin": replace(ADMIN, connections=())},
        *(NOTE, "client"),
        ["has read through the proxy"],
    ),
    "no report": (
        {"admin": replace(ADMIN, queries=(UNHEARD,))},
        *(WRONG, "reports"),
        ["no report of the query 'orders'", "QuotaListener('http://127.0.0.1:9644', token=...)"],
    ),
    "a query that the proxy does not know": (
        {"admin": replace(ADMIN, queries=())},
        *(WRONG, "reports"),
        ["no report of the query 'orders'"],
    ),
    "reports of another name": (
        {"admin": replace(ADMIN, queries=(UNHEARD, {**PROGRESS, "name": "o", "client_id": "o"}))},
        *(WRONG, "reports"),
        ["there are of 'o'", "queryName('orders')"],
    ),
    "reports that are all refused": (
        {"admin": replace(ADMIN, queries=(UNHEARD,), refused_reports={"unknown_query": 4})},
        *(WRONG, "reports"),
        ["refused were 4 (unknown_query)", "quota_listener says why"],
    ),
    "some reports refused": (
        progress(reports={"refused": {"repeated": 9, "client_taken": 2}}),
        *(WRONG, "reports"),
        ["were refused: 2 (client_taken)", "one client id belongs to one query"],
    ),
    "a query that failed": (
        progress(state="failed", error="no such column"),
        *(WRONG, "reports"),
        ["has failed: no such column", "start it again"],
    ),
    "a driver that is gone": (progress(state="silent"), WRONG, "reports", ["for a minute"]),
    "a run that is over": (progress(state="ended"), NOTE, "reports", ["last run has ended"]),
    "a trigger that does not fit": (
        advice("interval", "batch_interval is 1 s, but it is 2 s: write batch_interval: 2s"),
        *(WRONG, "trigger"),
        ["batch_interval is 1 s, but it is 2 s | write batch_interval: 2s"],
    ),
    "names that do not agree": (advice("names", "no rule: add one"), WRONG, "names", ["add one"]),
    "a trigger that is not known": (progress(trigger=None), UNKNOWN, "trigger", ["not known"]),
    "stuck": (
        progress(totals={"stuck_partitions": 2, "lag_records": 5}),
        *(WRONG, "lag"),
        ["2 partitions with more to read do not move", "/v1/progress?query=orders"],
    ),
    "commits that fail": (
        progress(commit={"group": "g", "error": "UNKNOWN_MEMBER_ID"}),
        *(WRONG, "commits"),
        ["not committed to g: UNKNOWN_MEMBER_ID", "for nothing else"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_thing_is_found(check: Callable[..., list[Finding]], case: str) -> None:
    seen, verdict, what, texts = CASES[case]
    findings = check(**seen)
    about = [text for name, text in told(findings, verdict) if name == what]
    assert any(all(part in text for part in texts) for text in about), findings
    wrong = told(findings, WRONG)
    if verdict is WRONG:
        assert what in dict(wrong)
        assert all(text.partition(" | ")[2] for _, text in wrong)
    else:
        assert wrong == []


def test_what_follows_from_a_proxy_that_is_away_is_not_called_wrong(
    check: Callable[..., list[Finding]],
) -> None:
    findings = check(admin=AWAY)
    assert [name for name, _ in told(findings, WRONG)] == ["admin port"]
    assert [name for name, _ in told(findings, UNKNOWN)] == ["client", "reports", "trigger"]


@pytest.mark.parametrize("name", ["orders", "etl-orders"])
def test_a_query_is_found_by_its_name_and_by_its_client_id(
    check: Callable[..., list[Finding]], name: str
) -> None:
    config = CONFIG.replace("name: orders,", "name: orders, client-id: etl-orders,")
    config = config.replace("{client-id: orders", "{client-id: etl-orders")
    admin = replace(
        ADMIN,
        file_rules=frozenset({"client-id=etl-orders", "client-id=<default>"}),
        connections=({"client_id": "etl-orders"},),
        queries=({**PROGRESS, "client_id": "etl-orders"},),
    )
    assert told(check(config, name, admin), WRONG) == []


@pytest.mark.parametrize("name", ["orders", "=", "a, b", "{x}", "a: b", "123", "yes", "*x", '"\\'])
def test_the_rule_and_the_query_to_add_are_yaml(
    check: Callable[..., list[Finding]], name: str
) -> None:
    config = NO_DEFAULT.replace("client-id: orders", "client-id: reports")
    findings = check(
        config[: config.index("queries:")], name, replace(ADMIN, file_rules=frozenset())
    )
    texts = [re.search(r"add (\{.*\}) to", each.fix) for each in findings]
    rule, query, *_ = [yaml.safe_load(text[1]) for text in texts if text is not None]
    assert rule == {"client-id": name, "consumer_byte_rate": "10MiB"}
    assert query == {"name": name, "commit_group": f"{name}-progress"}
