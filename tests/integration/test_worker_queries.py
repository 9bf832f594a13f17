"""Real Spark queries, and pipelines of them, behind workers that are killed: nothing is lost."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from support.clients import Access, Librdkafka
from support.machine import (
    kill_worker,
    machine_config,
    owner_of,
    until_replaced,
    until_settled,
)
from support.proxy_process import ProxyProcess, until
from support.streams import END_S, Stream, copying

from examples.devkit.broker import EmbeddedBroker
from proxy.spark import QuotaListener

pytestmark = pytest.mark.slow

WORKERS = 3
STAGES = ("first", "second")
FEED = "feed"
NAME = "orders"
RATE = 400
PER_BATCH = RATE // 2
HIGH_BOUND_BYTES = 50_000_000
RECORD_BYTES = 100
PART = 300
"""Records that are written between two kills."""
CRASHES = 6
BACKLOG = 3000

Listen = Callable[..., QuotaListener]
MakeStream = Callable[..., Stream]
RunMachine = Callable[..., ProxyProcess]


def adaptive(client_id: str, rate: int, max_rate: int) -> dict[str, Any]:
    bound = {"batch_interval": "500ms", "min_rate": rate, "max_rate": max_rate}
    return {"client-id": client_id, "consumer_byte_rate": HIGH_BOUND_BYTES, "adaptive": bound}


@pytest.fixture
def machine(kafka: EmbeddedBroker, tmp_path: Path) -> Iterator[RunMachine]:
    """`machine(**parts)` runs workers with a state that outlives them.

    Ask for it before `stream`, so that it outlives the queries.
    """
    made: list[ProxyProcess] = []

    def run(**parts: Any) -> ProxyProcess:
        more = {key: parts.pop(key) for key in ("pipelines",) if key in parts}
        state = {"kind": "sqlite", "path": str(tmp_path / "state.db")}
        settings = machine_config(kafka.bootstrap, WORKERS, state=state, **parts) | more
        made.append(ProxyProcess(settings, tmp_path / "proxy"))
        made[-1].start()
        until_settled(made[-1], WORKERS)
        return made[-1]

    try:
        yield run
        for process in made:
            process.stop()
    finally:
        for process in made:
            process.kill()


def owners_of(machine: ProxyProcess, client_ids: Iterable[str]) -> set[int]:
    return {owner_of(machine, client_id, WORKERS) for client_id in client_ids}


@pytest.mark.usefixtures("no_data_loss")
def test_a_pipeline_and_its_ledger_outlive_workers(
    machine: RunMachine,
    listen: Listen,
    stream: MakeStream,
    topic: Callable[..., str],
    spark: SparkSession,
    tmp_path: Path,
) -> None:
    topics = [topic(), topic()]
    stages = [
        {
            "name": name,
            "consumes": [topics[number]],
            "produces": topics[number + 1 : number + 2],
            "band": [0, 1_000_000],
            "sampling_interval": "500ms",
            "period": "1s",
            "normal_rate": 1000,
            "step": 500,
        }
        for number, name in enumerate(STAGES)
    ]
    source = {"client-id": FEED, "produces": topics[:1], "normal_rate": 5000, "step": 5000}
    pipelines = [{"name": NAME, "sources": [source], "stages": stages}]
    rules = [adaptive(name, 100, 1_000_000) for name in STAGES]
    rules.append({"client-id": FEED, "producer_byte_rate": HIGH_BOUND_BYTES})
    running = machine(rules=rules, pipelines=pipelines)
    listener = listen(running)
    last = stream(running, "second", topics[1])
    first = copying(spark, running, topics, tmp_path, "500 milliseconds")
    try:
        last.start("500 milliseconds")
        (owner,) = until(
            lambda: len(found := owners_of(running, (*STAGES, FEED))) == 1 and found,
            "one owner has all of a pipeline",
        )
        fed = 0
        for number in (owner, (owner + 1) % WORKERS, owner, (owner + 2) % WORKERS):
            values = [(0, b"%08d" % each) for each in range(fed, fed + PART)]
            write = threading.Thread(
                target=Librdkafka().produce,
                args=(Access(running.bootstrap, FEED), topics[0], values),
                kwargs={"is_disturbed": True},
            )
            write.start()
            time.sleep(0.3)
            until_replaced(running, number, kill_worker(running, number))
            write.join(END_S)
            fed += PART
        # Who was killed last may have had the slot: what is counted below is since then.
        values = [(0, b"%08d" % each) for each in range(fed, fed + PART)]
        access = Access(running.bootstrap, FEED)
        Librdkafka().produce(access, topics[0], values, is_disturbed=True)
        fed += PART
        last.until(
            lambda: sum(each.rows for each in list(last.batches.values())) >= fed, "all is read"
        )

        def ledger() -> dict[str, Any]:
            (document,) = json.loads(running.get("/v1/pipelines")[1])["pipelines"]
            return dict(document["completion"])

        until(lambda: ledger()["pending"]["batches"] == 0, "the ledger is complete", END_S)
        assert running.metrics().value("ledger_failed_total", pipeline=NAME) == 0
        until(
            lambda: running.metrics().value("ledger_completion_seconds_count", pipeline=NAME) > 0,
            "completions are counted",
        )
    finally:
        first.stop()
    assert first.exception() is None
    values_read = [value for each in last.batches.values() for value in each.values]
    assert sorted(map(int, values_read)) == list(range(fed))
    last.check_all_read({0: fed})
    assert listener is not None


@pytest.mark.usefixtures("no_data_loss")
def test_a_bounded_query_goes_on_at_another_worker(
    machine: RunMachine,
    listen: Listen,
    stream: MakeStream,
    topic: Callable[..., str],
) -> None:
    """Its owner crashes again and again: the driver asks the next one, which knows its bound."""
    rules = [adaptive("bounded", RATE, RATE)]
    running = machine(rules=rules)
    listen(running)
    query = stream(running, "bounded", topic(2))
    query.start("500 milliseconds")
    for _ in range(2):
        ends = query.ends()
        query.feed(10, RECORD_BYTES)
        query.until_read({n: ends.get(n, 0) + 10 for n in (0, 1)})
    query.until(lambda: query.known()["adaptive"]["rate"], "it has a rate")
    owner = owner_of(running, "bounded", WORKERS)
    fed = {partition: end + BACKLOG for partition, end in query.ends().items()}
    query.feed(BACKLOG, RECORD_BYTES)
    for _ in range(CRASHES):
        until_replaced(running, owner, kill_worker(running, owner))
    until(lambda: owner_of(running, "bounded", WORKERS) != owner, "another one owns it")
    known = query.until(lambda: (query.known_now() or {}).get("adaptive"), "it is known there")
    assert known["rate"] == RATE
    moved = max(query.batches)
    query.until_read(fed)
    query.check_all_read(fed)
    later = [each.rows for number, each in query.batches.items() if number > moved + 1]
    assert later
    assert max(later) <= 2 * PER_BATCH, query.sizes()
