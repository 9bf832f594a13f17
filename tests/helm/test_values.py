"""The values' schema: strict, complete, and in step with the proxy's configuration."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from chart import CHART, ChartError, Helm

from proxy.config import models

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def _listener(**changes: object) -> str:
    listener = {"name": "default", "bind": "0.0.0.0:19092", "broker_ports": "19100-19109"} | changes
    return json.dumps([{key: value for key, value in listener.items() if value is not None}])


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
        (models.Cluster, ("cluster",)),
        (models.ClusterTls, ("cluster", "tls")),
        (models.Listener, ("listeners", "*")),
        (models.ListenerTls, ("listeners", "*", "tls")),
        (models.Quotas, ("quotas",)),
        (models.QuotaRule, ("quotas", "rules", "*")),
        (models.Throttle, ("throttle",)),
        (models.Limits, ("limits",)),
        (models.State, ("state",)),
        (models.Admin, ("admin",)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_the_schema_knows_the_keys_of_the_configuration(
    model: type[models.Section], path: tuple[str, ...]
) -> None:
    keys = {field.alias or name for name, field in model.model_fields.items()}
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
        ("replica", "2"),
        ("service.type", '"NodePort"'),
        ("service.ports", "[]"),
        ("image.tag", "1.0"),
        ("config.listners", "[]"),
        ("config.listeners", "[]"),
        ("config.listeners", _listener(name="Default Listener")),
        ("config.listeners", _listener(bind="19092")),
        ("config.listeners", _listener(bind="0.0.0.0:0")),
        ("config.listeners", _listener(broker_ports=0)),
        ("config.listeners", _listener(broker_ports=None)),
        ("config.cluster.bootstrap_servers", '["kafka"]'),
        ("config.cluster.bootstrap_servers", '["http://kafka:9092"]'),
        ("config.quotas.rules", '[{"client-id": "a"}]'),
        ("config.quotas.rules", '[{"consumer_byte_rate": "1MiB"}]'),
        ("config.quotas.rules", '[{"client-id": "a", "consumer_byte_rate": "1mb"}]'),
        ("config.quotas.rules", '[{"clientid": "a", "consumer_byte_rate": "1MiB"}]'),
        ("config.quotas.window", '"1"'),
        ("config.throttle.mode", '"refuse"'),
        ("config.limits.drain_timeout", "10"),
        ("config.state.kind", '"redis"'),
        ("config.state.path", '"quota-proxy.db"'),
        ("persistence.size", '"big"'),
        ("secretMounts.tls", '"name"'),
    ],
)
def test_mistakes_are_refused(helm: Helm, key: str, value: str) -> None:
    """Each is the only mistake: the message names its place, or an unknown key in it."""
    place = re.split(r"[.\[]", key)[0]
    with pytest.raises(ChartError, match=rf"(?s)don't meet the specifications.*- at '(/{place}|')"):
        helm.template(sets={key: value})


def test_the_listener_that_is_made_wrong_here_is_right(helm: Helm) -> None:
    assert helm.template(sets={"config.listeners": _listener()}).objects
