"""What `check` says of pipelines that are valid and will not do what they say."""

import pytest
import yaml

from proxy.config import load_config
from proxy.config.check_report import find_pipeline_hints
from proxy.quota.rules import RuleTable

ADAPTIVE = {"consumer_byte_rate": "1MiB", "adaptive": {"batch_interval": "1s"}}
FIXED = {"consumer_byte_rate": "1MiB"}
PRODUCER = {"producer_byte_rate": "1MiB"}

RULED = [{"client-id": "one", **ADAPTIVE}, {"client-id": "feed", **PRODUCER}]
ONE = (
    "pipeline 'p': stage 'one' cannot be held, no rule gives client-id 'one' a "
    "consumer_byte_rate and adaptive"
)
FEED = "pipeline 'p': source 'feed' cannot be held, no rule gives client-id 'feed' a "
FEED += "producer_byte_rate"


def stage(name, consumes, *produces, **more):
    rates = {"band": [50, 100], "normal_rate": 100, "step": 10}
    times = {"sampling_interval": "1s", "period": "2s"}
    return {"name": name, "consumes": [consumes], "produces": list(produces)} | rates | times | more


def found(tmp_path, rules, *, queries=(), one=None, **more):
    """feed -> a -> one -> b -> two."""
    pipeline = {
        "name": "p",
        "sources": [{"client-id": "feed", "produces": ["a"], "normal_rate": 100, "step": 10}],
        "stages": [stage("one", "a", "b", **one or {}), stage("two", "b")],
        **more,
    }
    document = {
        "cluster": {"bootstrap_servers": ["localhost:9092"]},
        "listeners": [
            {"name": "default", "bind": "127.0.0.1:0", "advertised_host": "h", "broker_ports": 0}
        ],
        "quotas": {"rules": rules},
        "queries": list(queries),
        "pipelines": [pipeline],
    }
    file = tmp_path / "proxy.yaml"
    file.write_text(yaml.safe_dump(document))
    config = load_config(file)
    return list(find_pipeline_hints(config, RuleTable(config.quota_settings.rules)))


@pytest.mark.parametrize(
    ("rules", "more", "lines"),
    [
        pytest.param(RULED, {"hold_producers": True}, [], id="all can be held"),
        pytest.param([], {}, [ONE], id="no rule; the source is not held, the last stage never"),
        pytest.param([{"client-id": "one", **FIXED}], {}, [ONE], id="not adaptive"),
        pytest.param([], {"hold_producers": True}, [ONE, FEED], id="producers are to be held"),
        pytest.param([{"client-id": "<default>", **ADAPTIVE}], {}, [], id="by the default"),
        pytest.param(
            [{"user": "alice", "client-id": "one", **ADAPTIVE}], {}, [], id="if it logs in"
        ),
        pytest.param(
            [{"listener": "default", "client-id": "<default>", **ADAPTIVE}], {}, [],
            id="by its listener",
        ),
        pytest.param(
            RULED, {"queries": [{"name": "one", "client-id": "id-1"}]},
            [ONE.replace("client-id 'one'", "client-id 'id-1'")], id="a query of another client id",
        ),
        pytest.param(
            RULED, {"one": {"client-ids": ["one", "uno"]}},
            [ONE.replace("client-id 'one'", "client-id 'uno'")], id="one of two clients",
        ),
    ],
)  # fmt: skip
def test_who_cannot_be_held(tmp_path, rules, more, lines):
    assert found(tmp_path, rules, **more) == lines


def test_a_last_stage_may_wait_when_there_is_a_limit(tmp_path):
    only = {"stages": [stage("one", "a")]}
    assert found(tmp_path, [], **only) == []
    assert found(tmp_path, [], **only, max_pending={"batches": 2}) == [ONE]


@pytest.mark.parametrize(
    ("more", "is_endless"),
    [
        pytest.param({}, True, id="a band from 0"),
        pytest.param({"max_lag": 100}, False, id="with max_lag"),
        pytest.param({"two": [50, 100]}, False, id="a band from above 0"),
        pytest.param({"one": {"band": [0, 100]}, "two": [50, 100]}, False, id="of the first stage"),
        pytest.param(
            {"one": {"band": [0, 100]}, "two": [50, 100], "hold_producers": True}, True,
            id="of the first stage, and producers are held",
        ),
    ],
)  # fmt: skip
def test_a_hold_that_nothing_ends(tmp_path, more, is_endless):
    stages = [stage("one", "a", "b", **more.pop("one", {}))]
    stages.append(stage("two", "b", band=more.pop("two", [0, 100])))
    lines = found(tmp_path, RULED, stages=stages, **more)
    assert [("never asks for more again" in line) for line in lines] == [True] * is_endless
