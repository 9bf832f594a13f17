"""What the stages of a pipeline write is waited for, whichever member of a tier serves them."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.machine import told_port
from support.proxy_process import until
from support.stages import Stage
from support.tier import TierMachine, owner_of, serving, tier_config

from examples.devkit.broker import EmbeddedBroker

pytestmark = pytest.mark.slow

RATES = {"normal_rate": 100_000, "step": 1000}


def settings(bootstrap: str, tier: str, name: str, source: str, between: str) -> dict[str, Any]:
    bound = {"consumer_byte_rate": "100MiB", "adaptive": {"batch_interval": "2s"}}
    rules = [{"client-id": each, **bound} for each in ("enrich", "store")]
    pipeline = {
        "name": "orders",
        "sources": [{"client-id": "feed", "produces": [source], **RATES}],
        "stages": [
            {"name": "enrich", "consumes": [source], "produces": [between], "band": [0, 10**6]},
            {"name": "store", "consumes": [between], "band": [0, 10**6]},
        ],
    }
    pipeline["stages"] = [{**each, **RATES} for each in pipeline["stages"]]
    return {**tier_config(bootstrap, tier, name, rules=rules), "pipelines": [pipeline]}


def pending(machine: TierMachine) -> int:
    (found,) = json.loads(machine.get("/v1/pipelines")[1])["pipelines"]
    return int(found["completion"]["pending"]["batches"])


@pytest.fixture
def machines(
    kafka: EmbeddedBroker, tmp_path: Path, topic: Callable[..., str], fill: Callable[..., None]
) -> Iterator[tuple[list[TierMachine], str, str]]:
    source, between = topic(), topic()
    fill(source, 20, 10)
    tier = f"tier-{between}"
    made = [
        TierMachine(settings(kafka.bootstrap, tier, name, source, between), tmp_path / name)
        for name in "ab"
    ]
    with serving(made):
        yield made, source, between


def test_what_another_one_saw_while_the_owner_stood_still_is_waited_for(
    machines: tuple[list[TierMachine], str, str],
) -> None:
    both, source, between = machines
    owner = owner_of(both, "enrich")
    (other,) = (each for each in both if each is not owner)
    with Stage(owner, "enrich") as enrich, Stage(owner, "store") as store:
        enrich.write(between, 5)
        enrich.done(source, 0, 10)
        store.done(between, 0, 5)
        assert pending(owner) == 0
        began_s = time.monotonic()
        enrich.write(between, 5)
        owner.freeze()
        try:
            until(lambda: told_port(other, "enrich") in other.broker_ports, "it stands in")
            with Stage(other, "enrich") as elsewhere:
                elsewhere.write(between, 3)
        finally:
            owner.unfreeze()
        enrich.done(source, 10, 20, took_ms=round((time.monotonic() - began_s) * 1000))
        store.done(between, 5, 10)
        assert pending(owner) == 1
        store.done(between, 10, 13)
        assert pending(owner) == 0
