"""The values' schema: strict, complete, and in step with the proxy's configuration."""

import json
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from chart import CHART, ChartError, Helm

from proxy.config import models, rule_models
from proxy.pipeline import graph
from proxy.quota import fields
from proxy.relay import services

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def _listener(**changes: object) -> str:
    listener = {"name": "default", "bind": "0.0.0.0:19092", "broker_ports": "19100-19109"} | changes
    return json.dumps([{key: value for key, value in listener.items() if value is not None}])


def _sasl(**changes: object) -> str:
    sasl = {"mechanism": "PLAIN", "username": "a", "password_file": "/p"} | changes
    return json.dumps({key: value for key, value in sasl.items() if value is not None})


def _adaptive(keys: Mapping[str, object] = MappingProxyType({}), **changes: object) -> str:
    """Return one rule, with changes of its keys and of its adaptive bound; None removes."""
    adaptive = {"batch_interval": "2s"} | changes
    rule = {"client-id": "a", "consumer_byte_rate": "1MiB"} | dict(keys)
    rule["adaptive"] = {key: value for key, value in adaptive.items() if value is not None}
    return json.dumps([{key: value for key, value in rule.items() if value is not None}])


def _pipeline(
    stage: Mapping[str, object] = MappingProxyType({}),
    source: Mapping[str, object] = MappingProxyType({}),
    **changes: object,
) -> str:
    """Return one pipeline, with changes of its stage, its source, and its own keys."""
    rates = {"normal_rate": 2000, "step": 200}
    pipeline = {
        "name": "orders",
        "sources": [{"client-id": "feed", "produces": ["A"]} | rates | dict(source)],
        "stages": [{"name": "b", "consumes": ["A"], "band": [0, 10]} | rates | dict(stage)],
    }
    return json.dumps([pipeline | changes])


def _at(*path: str) -> dict[str, Any]:
    """Return the part of the schema for a key, `*` being the items of a list."""
    part = SCHEMA
    for key in path:
        part = part["items"] if key == "*" else part["properties"][key]
        if "$ref" in part:
            part = SCHEMA["definitions"][part["$ref"].rpartition("/")[2]]
    return part


@pytest.mark.parametrize(
    ("model", "path"),
    [
        (models.Config, ()),
        (models.ClusterSection, ("cluster",)),
        (models.ClusterTls, ("cluster", "tls")),
        (models.ClusterSasl, ("cluster", "sasl")),
        (models.ListenerSection, ("listeners", "*")),
        (models.ListenerTls, ("listeners", "*", "tls")),
        (rule_models.QuotasSection, ("quotas",)),
        (rule_models.BudgetSection, ("quotas", "budgets", "*")),
        (rule_models.RuleSection, ("quotas", "rules", "*")),
        (rule_models.AdaptiveSection, ("quotas", "rules", "*", "adaptive")),
        (models.QuerySection, ("queries", "*")),
        (graph.PipelineSettings, ("pipelines", "*")),
        (graph.PendingLimit, ("pipelines", "*", "max_pending")),
        (graph.SourceProducerSettings, ("pipelines", "*", "sources", "*")),
        (graph.StageSettings, ("pipelines", "*", "stages", "*")),
        (models.ProgressSection, ("progress",)),
        (models.ThrottleSection, ("throttle",)),
        (services.Limits, ("limits",)),
        (models.StateSection, ("state",)),
        (models.TierSection, ("tier",)),
        (models.AdminSection, ("admin",)),
        (models.ServerTls, ("admin", "tls")),
        (models.TokenSection, ("admin", "tokens", "*")),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_the_schema_knows_the_keys_of_the_configuration(model: type, path: tuple[str, ...]) -> None:
    keys = set(fields.keys_of_section(model))
    assert set(_at("config", *path)["properties"]) == keys


def _objects(part: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(part, dict):
        if "properties" in part and part.get("type") == "object":
            yield path, part
        for key, value in part.items():
            yield from _objects(value, f"{path}/{key}")


def test_unknown_keys_are_refused_everywhere() -> None:
    assert [path for path, part in _objects(SCHEMA) if part["additionalProperties"]] == []


def test_every_value_has_a_default_and_every_default_a_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(SCHEMA["properties"]) - {"global"} == set(values)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("replicas", '"2"'),
        ("replicas", "1000000"),
        ("replica", "2"),
        ("service.type", '"NodePort"'),
        ("service.ports", "[]"),
        ("image.tag", "1.0"),
        ("image.digest", '"1.0"'),
        ("image.digest", '"sha256:ABC"'),
        ("config.listners", "[]"),
        ("config.listeners", "[]"),
        ("config.listeners", _listener(name="Default Listener")),
        ("config.listeners", _listener(bind="19092")),
        ("config.listeners", _listener(bind="0.0.0.0:0")),
        ("config.listeners", _listener(broker_ports=0)),
        ("config.listeners", _listener(broker_ports=None)),
        ("config.cluster.bootstrap_servers", '["kafka"]'),
        ("config.cluster.bootstrap_servers", '["http://kafka:9092"]'),
        ("config.cluster.sasl", _sasl(mechanism="GSSAPI")),
        ("config.cluster.sasl", _sasl(username=7)),
        ("config.cluster.sasl", _sasl(password="secret")),
        ("config.cluster.sasl", _sasl(password_file="password")),
        ("config.cluster.sasl", _sasl(password_file=None)),
        ("config.quotas.rules", '[{"client-id": "a"}]'),
        ("config.quotas.rules", '[{"consumer_byte_rate": "1MiB"}]'),
        ("config.quotas.rules", '[{"client-id": "a", "consumer_byte_rate": "1mb"}]'),
        ("config.quotas.rules", '[{"clientid": "a", "consumer_byte_rate": "1MiB"}]'),
        ("config.quotas.rules", _adaptive(batch_interval=2)),
        ("config.quotas.rules", _adaptive(estimator="PID")),
        ("config.quotas.rules", _adaptive(max_rate=0)),
        ("config.quotas.rules", _adaptive(proportional=-1)),
        ("config.quotas.rules", _adaptive(hold="30")),
        ("config.quotas.rules", _adaptive({"scope": "shared"})),
        ("config.quotas.rules", _adaptive({"consumer_byte_rate": None})),
        ("config.quotas.rules", _adaptive({"client-id": None, "user": "a"})),
        ("config.queries", '[{"client-id": "a"}]'),
        ("config.queries", '[{"name": "a", "client-id": "<default>"}]'),
        ("config.queries", '[{"name": "a", "commit-group": "b"}]'),
        ("config.queries", '[{"name": "a", "stuck_after": 300}]'),
        ("config.pipelines", '[{"name": "a"}]'),
        ("config.pipelines", _pipeline(stages=[])),
        ("config.pipelines", _pipeline(hold_producers="yes")),
        ("config.pipelines", _pipeline(max_lag=0)),
        ("config.pipelines", _pipeline(max_pending={})),
        ("config.pipelines", _pipeline(max_pending={"bytes": "64mb"})),
        ("config.pipelines", _pipeline(timeout="10")),
        ("config.pipelines", _pipeline({"client-id": "a"})),
        ("config.pipelines", _pipeline({"client-ids": ["<default>"]})),
        ("config.pipelines", _pipeline({"consumes": []})),
        ("config.pipelines", _pipeline({"consumes": ["a b"]})),
        ("config.pipelines", _pipeline({"produces": ["B", "B"]})),
        ("config.pipelines", _pipeline({"band": [10]})),
        ("config.pipelines", _pipeline({"period": 10})),
        ("config.pipelines", _pipeline({"ratio": 1})),
        ("config.pipelines", _pipeline({"normal_rate": 0.5})),
        ("config.pipelines", _pipeline(source={"step": 0})),
        ("config.pipelines", _pipeline(source={"client_id": "feed"})),
        ("config.pipelines", _pipeline(source={"produces": []})),
        ("config.quotas.window", '"1"'),
        ("config.quotas.burst", "10"),
        ("config.throttle.mode", '"refuse"'),
        ("config.limits.drain_timeout", "10"),
        ("config.state.kind", '"redis"'),
        ("config.state.path", '"quota-proxy.db"'),
        ("config.state.topic", '"a/b"'),
        ("config.admin.tokens", '[{"name": "a", "token_file": "/a", "rights": []}]'),
        ("config.admin.tokens", '[{"name": "a", "token_file": "a", "rights": ["read"]}]'),
        ("config.admin.open_paths", '["/v1/status"]'),
        ("adminTokens.spark", '{"rights": ["write"]}'),
        ("adminTokens.spark", '{"right": ["read"]}'),
        ("adminTokens.spark", '{"rights": ["report"], "queries": []}'),
        ("adminTokens.spark", '{"rights": ["report"], "queries": ["team-*-etl"]}'),
        ("adminTokens.spark", '{"rights": ["report"], "queries": ["*"]}'),
        ("adminTokens.local", '{"rights": ["read"]}'),
        ("persistence.size", '"big"'),
        ("secretMounts.tls", '"name"'),
    ],
)
def test_mistakes_are_refused(helm: Helm, key: str, value: str) -> None:
    """Each is the only mistake: the message names its place, or an unknown key in it."""
    place = re.split(r"[.\[]", key)[0]
    with pytest.raises(ChartError, match=rf"(?s)don't meet the specifications.*- at '(/{place}|')"):
        helm.template(sets={key: value})


def test_what_is_made_wrong_here_is_right(helm: Helm) -> None:
    right = {"config.listeners": _listener(), "config.quotas.rules": _adaptive()}
    right |= {"config.cluster.sasl": _sasl()}
    right |= {"config.queries": '[{"name": "a"}]', "config.pipelines": _pipeline()}
    assert helm.template(sets=right).objects
