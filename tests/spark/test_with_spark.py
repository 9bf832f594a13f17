"""The listener in a real Spark driver, on queries that read a real broker."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pyspark
import pytest
from aiohttp import web
from listening.receiver import HOST, WAIT_S, Behaviour, Gate, Receiver, Report, fail, hang_up, take
from listening.session import QUERY_TIMEOUT_S, WatchedListener, finish, write
from parts.attached import attaching
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQueryListener

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.jars import connector_jars
from proxy.admin.document_models import RowContext
from proxy.admin.query_documents import progress_documents
from proxy.progress.query import ProgressSettings, QuerySettings
from proxy.progress.query_registry import QueryRegistry
from proxy.progress.report import ReportRefused, parse_report
from proxy.spark import client_options, quota_listener
from proxy.wire.layout import run_generator

pytestmark = pytest.mark.slow

PARTITIONS = 3
COUNT = 30
BATCH_ROWS = 12
BATCHES = 3
RECORD_BYTES = 20

Read = Callable[..., DataFrame]
Listen = Callable[..., WatchedListener]


@pytest.fixture
def read(kafka: EmbeddedBroker, spark: SparkSession) -> Read:
    """`read(topic, name)` begins a query of batches of at most `BATCH_ROWS` records."""

    def begin(topic: str, name: str) -> DataFrame:
        return (
            spark.readStream.format("kafka")
            .options(**client_options(name, kafka.bootstrap))
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", BATCH_ROWS)
            .load()
            .selectExpr("cast(value as string) value")
        )

    return begin


@pytest.fixture
def full(topic: Callable[..., str], fill: Callable[..., None]) -> str:
    """Give a topic with `COUNT` records in `PARTITIONS` partitions, as many in each."""
    name = topic(PARTITIONS)
    fill(name, COUNT, RECORD_BYTES, partitions=PARTITIONS)
    return name


@pytest.fixture
def attach(spark: SparkSession, receiver: Receiver) -> Iterator[Listen]:
    """`attach(**arguments)` gives the session a listener; it is taken away after the test."""
    with attaching(spark) as add:
        yield lambda **arguments: add(WatchedListener(receiver.url, **arguments))


def offsets(topic: str, each: int) -> dict[str, dict[str, int]]:
    return {topic: {str(partition): each for partition in range(PARTITIONS)}}


def ranges(batches: list[Report]) -> list[tuple[Any, Any]]:
    return [(part["start"], part["end"]) for b in batches for part in b["batch"]["sources"]]


def wait_for_end(receiver: Receiver, name: str, runs: int = 1) -> None:
    receiver.wait_for(lambda: len(receiver.of(name, "terminated")) == runs, f"the end of {name}")


def test_query_and_its_restart(
    attach: Listen,
    read: Read,
    full: str,
    fill: Callable[..., None],
    receiver: Receiver,
    tmp_path: Path,
) -> None:
    attach()
    query = write(read(full, "orders"), "orders", tmp_path).trigger(availableNow=True).start()
    finish(query)
    wait_for_end(receiver, "orders")
    # On a slow machine Spark may find the query idle before it ends.
    events = [report["event"] for report in receiver.taken if report["event"] != "idle"]
    assert events == ["started", *["progress"] * BATCHES, "terminated"]
    assert {report["query_id"] for report in receiver.taken} == {str(query.id)}
    assert {report["run_id"] for report in receiver.taken} == {str(query.runId)}
    assert [report["error"] for report in receiver.taken] == [None] * len(receiver.taken)
    count = len(receiver.taken)
    batches = receiver.of("orders", "progress")
    assert ranges(batches) == [
        (None, offsets(full, 4)),  # at the start of a query Spark tells no start
        (offsets(full, 4), offsets(full, 8)),
        (offsets(full, 8), offsets(full, 10)),
    ]
    for number, report in enumerate(batches):
        batch = report["batch"]
        (source,) = batch["sources"]
        assert batch["batch_id"] == number
        assert batch["rows"] == source["rows"] == min(BATCH_ROWS, COUNT - number * BATCH_ROWS)
        assert source["latest"] == offsets(full, 10)
        assert source["description"] == f"KafkaV2[Subscribe[{full}]]"
        assert batch["durations_ms"]["triggerExecution"] > 0
        assert batch["timestamp"].endswith("Z")

    fill(full, PARTITIONS, RECORD_BYTES, partitions=PARTITIONS)
    again = write(read(full, "orders"), "orders", tmp_path).trigger(availableNow=True).start()
    finish(again)
    wait_for_end(receiver, "orders", runs=2)
    assert receiver.numbers() == list(range(1, len(receiver.taken) + 1))
    second = receiver.taken[count:]
    assert {report["query_id"] for report in second} == {str(query.id)}
    assert {report["run_id"] for report in second} == {str(again.runId)}
    assert again.runId != query.runId
    assert ranges(receiver.of("orders", "progress")[BATCHES:]) == [
        (offsets(full, 10), offsets(full, 11))
    ]


def test_two_queries_and_one_without_kafka(
    attach: Listen,
    read: Read,
    full: str,
    spark: SparkSession,
    receiver: Receiver,
    tmp_path: Path,
) -> None:
    attach(clients={"left": "etl-left"})
    names = ["left", "right"]
    queries = [
        write(read(full, name), name, tmp_path / name).trigger(availableNow=True).start()
        for name in names
    ]
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
    other = write(rate, "rate", tmp_path / "rate").trigger(once=True).start()
    for query in (*queries, other):
        finish(query)
    for name in names:
        wait_for_end(receiver, name)
        batches = receiver.of(name, "progress")
        assert [report["batch"]["batch_id"] for report in batches] == list(range(BATCHES))
        assert sum(report["batch"]["rows"] for report in batches) == COUNT
    assert receiver.numbers() == list(range(1, len(receiver.taken) + 1))
    assert {report["client_id"] for report in receiver.of("left")} == {"etl-left"}
    assert {report["client_id"] for report in receiver.of("right")} == {None}
    assert {report["event"] for report in receiver.of("rate")} == {"started"}


def test_idle_query(
    attach: Listen,
    read: Read,
    full: str,
    receiver: Receiver,
    tmp_path: Path,
) -> None:
    attach()
    trigger = {"processingTime": "100 milliseconds"}
    query = write(read(full, "idler"), "idler", tmp_path).trigger(**trigger).start()
    receiver.wait_for(lambda: receiver.of("idler", "idle"), "an idle event")
    query.stop()
    wait_for_end(receiver, "idler")
    assert receiver.taken[-1]["error"] is None
    assert receiver.numbers() == list(range(1, len(receiver.taken) + 1))


def test_failing_query(
    attach: Listen,
    read: Read,
    full: str,
    receiver: Receiver,
    tmp_path: Path,
) -> None:
    attach()
    frame = read(full, "broken").selectExpr("raise_error('no such order')")
    query = write(frame, "broken", tmp_path).start()
    with pytest.raises(StreamingQueryException):
        query.awaitTermination(QUERY_TIMEOUT_S)
    wait_for_end(receiver, "broken")
    last = receiver.taken[-1]
    assert "no such order" in last["error"]
    assert "\tat " not in last["error"]
    assert receiver.of("broken", "progress") == []


class StuckListener(StreamingQueryListener):
    """Keeps Spark's listener bus at the first batch, and all listeners behind it, until told."""

    def __init__(self) -> None:
        self.is_stuck, self.may_go_on = Event(), Event()

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802
        pass

    def onQueryProgress(self, event: Any) -> None:  # noqa: ARG002, N802
        self.is_stuck.set()
        self.may_go_on.wait()

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        pass


@pytest.mark.parametrize("look_s", [quota_listener.LOOK_S, 0.0], ids=["in time", "late"])
def test_batches_are_reported_while_the_listener_bus_is_stuck(
    *,
    attach: Listen,
    read: Read,
    full: str,
    spark: SparkSession,
    receiver: Receiver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    look_s: float,
) -> None:
    """Also where each of Spark's answers takes longer than the listener waits for it."""
    monkeypatch.setattr(quota_listener, "LOOK_S", look_s)
    stuck = StuckListener()
    spark.streams.addListener(stuck)
    try:
        attach()
        trigger = {"processingTime": "100 milliseconds"}
        query = write(read(full, "orders"), "orders", tmp_path).trigger(**trigger).start()
        query.processAllAvailable()
        assert stuck.is_stuck.wait(WAIT_S)
        receiver.wait_for(lambda: len(receiver.of("orders", "progress")) == BATCHES, "all batches")
        if look_s:
            receiver.wait_for(
                lambda: any(
                    beat["is_waiting"] and beat["last_batch_id"] == BATCHES - 1
                    for beat in receiver.heartbeats
                ),
                "that it waits",
            )
        assert not stuck.may_go_on.is_set()
        stuck.may_go_on.set()
        query.stop()
        wait_for_end(receiver, "orders")
    finally:
        stuck.may_go_on.set()
        spark.streams.removeListener(stuck)
    batches = receiver.of("orders", "progress")
    assert [report["batch"]["batch_id"] for report in batches] == list(range(BATCHES))
    assert receiver.numbers() == list(range(1, len(receiver.taken) + 1))


TRIGGERS = {
    "2 s": ({"processingTime": "2 seconds"}, {"kind": "processing_time", "interval_ms": 2000}),
    "none": ({}, {"kind": "processing_time", "interval_ms": 0}),
    "available now": ({"availableNow": True}, {"kind": "available_now", "interval_ms": None}),
    "once": ({"once": True}, {"kind": "once", "interval_ms": None}),
    "continuous": ({"continuous": "3 seconds"}, {"kind": "continuous", "interval_ms": 3000}),
}


@pytest.mark.parametrize(("trigger", "expected"), TRIGGERS.values(), ids=TRIGGERS)
def test_the_start_tells_the_trigger(
    *,
    attach: Listen,
    read: Read,
    full: str,
    receiver: Receiver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trigger: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    monkeypatch.setattr(quota_listener, "LOOK_S", WAIT_S)
    attach()
    writer = write(read(full, "orders"), "orders", tmp_path)
    query = (writer.trigger(**trigger) if trigger else writer).start()
    started = receiver.wait_for(lambda: receiver.of("orders", "started"), "the start")
    assert started[0]["trigger"] == expected
    query.stop()


@pytest.mark.parametrize("is_busy", [True, False], ids=["in a batch", "between batches"])
def test_a_proxy_that_comes_back_hears_which_queries_run(
    *,
    attach: Listen,
    read: Read,
    full: str,
    receiver: Receiver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_busy: bool,
) -> None:
    monkeypatch.setattr(quota_listener, "FIRST_LOOKS_S", 1000.0)
    monkeypatch.setattr(quota_listener, "LOOK_EVERY_S", 1000.0)
    in_second_batch, may_end = Event(), Event()

    def process(_frame: DataFrame, batch_id: int) -> None:
        if batch_id == 1:
            in_second_batch.set()
            may_end.wait(WAIT_S)

    attach()
    frame = read(full, "orders").writeStream.queryName("orders").foreachBatch(process)
    interval_ms = 0 if is_busy else 600_000
    frame = frame.trigger(processingTime=f"{interval_ms} milliseconds")
    query = frame.option("checkpointLocation", str(tmp_path)).start()
    receiver.wait_for(lambda: receiver.of("orders", "progress"), "the first batch")
    if is_busy:
        assert in_second_batch.wait(WAIT_S)
    receiver.stop()
    receiver.start()
    receiver.wait_for(lambda: receiver.heartbeats, "a heartbeat")
    heartbeat = receiver.heartbeats[0]
    assert heartbeat["run_id"] == str(query.runId)
    assert (heartbeat["last_batch_id"], heartbeat["is_waiting"]) == (0, not is_busy)
    assert heartbeat["trigger"] == {"kind": "processing_time", "interval_ms": interval_ms}
    may_end.set()
    query.stop()


RESTARTS = 4
ORDERS = QuerySettings(name="orders", client_id="orders", commit_group="g")


def test_a_query_that_is_restarted_at_once(
    attach: Listen,
    read: Read,
    full: str,
    fill: Callable[..., None],
    receiver: Receiver,
    tmp_path: Path,
) -> None:
    """What Spark tells of a run after the start of the next one is progress all the same."""
    refusals: list[str] = []
    settings = ProgressSettings(queries=(ORDERS,))
    book = QueryRegistry(settings, lambda _: None, lambda _: True)

    async def keep_book(request: web.Request, report: Report) -> web.StreamResponse:
        try:
            run_generator(book.accepting(parse_report(await request.read()), 0.0, 0.0))
        except ReportRefused as error:
            refusals.append(f"{report['event']}: {error}")
        return await take(request, report)

    receiver.behaviour = keep_book
    attach()
    for _ in range(RESTARTS):
        query = write(read(full, "orders"), "orders", tmp_path / "checkpoint").start()
        query.processAllAvailable()
        query.stop()
        fill(full, BATCH_ROWS, RECORD_BYTES, partitions=PARTITIONS)
    query = write(read(full, "orders"), "orders", tmp_path / "checkpoint").start()
    query.processAllAvailable()
    query.stop()
    wait_for_end(receiver, "orders", runs=RESTARTS + 1)
    assert refusals == []
    each = (COUNT + RESTARTS * BATCH_ROWS) // PARTITIONS
    assert checkpoint_of(tmp_path / "checkpoint") == offsets(full, each)
    assert book.due_commits()["g"] == {(full, number): each for number in range(PARTITIONS)}
    (document,) = filter(None, progress_documents(book.queries, RowContext(0.0)))
    assert (document["state"], document["run_id"]) == ("ended", str(query.runId))


def checkpoint_of(folder: Path) -> Any:
    """Return the end of the last batch that Spark has completed, from its own files."""
    last = max(int(path.name) for path in (folder / "commits").iterdir() if path.name.isdigit())
    return json.loads((folder / "offsets" / str(last)).read_text().splitlines()[-1])


@pytest.mark.parametrize("away", ["faults", "hangs", "hangs up", "refuses connections"])
def test_no_query_minds_a_proxy_that_is_away(
    attach: Listen,
    read: Read,
    full: str,
    receiver: Receiver,
    tmp_path: Path,
    away: str,
) -> None:
    gate = Gate()
    behaviours: dict[str, Behaviour] = {"faults": fail, "hangs": gate, "hangs up": hang_up}
    receiver.behaviour = behaviours.get(away, take)
    if away == "refuses connections":
        receiver.stop()
    listener = attach(timeout_s=WAIT_S, max_retries=1000)
    output = tmp_path / "output"
    query = write(read(full, "orders"), "orders", tmp_path / "checkpoint", output)
    finish(query.trigger(availableNow=True).start())
    written = [json.loads(line)["value"] for file in output.glob("*.json") for line in file.open()]
    assert sorted(int(value[:8]) for value in written) == list(range(COUNT))
    for _ in range(BATCHES + 2):  # callbacks wait for nothing, or this would be in vain
        listener.returned.get(timeout=WAIT_S)
    assert receiver.taken == []
    gate.open()
    receiver.behaviour = take
    if away == "refuses connections":
        receiver.start()
    wait_for_end(receiver, "orders")
    assert receiver.numbers() == list(range(1, BATCHES + 3))
    assert listener.dropped == 0


SCRIPT = """
import importlib.util, sys
from pyspark.sql import SparkSession
from quota_listener import QuotaListener, client_options
assert importlib.util.find_spec("proxy") is None
url, topic, checkpoint = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
spark.streams.addListener(QuotaListener(url))
orders = spark.readStream.format("kafka").options(**client_options("orders"))
frame = orders.option("subscribe", topic).option("startingOffsets", "earliest").load()
writer = frame.writeStream.queryName("orders").option("checkpointLocation", checkpoint)
query = writer.format("noop").trigger(availableNow=True).start()
query.awaitTermination()
"""


def test_py_files(kafka: EmbeddedBroker, full: str, receiver: Receiver, tmp_path: Path) -> None:
    """The file alone is enough: `-S` hides all that is installed, this project too."""
    script, python = tmp_path / "job.py", tmp_path / "python"
    script.write_text(SCRIPT)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    spark_home = Path(pyspark.__file__).parent
    command = [str(spark_home / "bin" / "spark-submit"), "--master", "local[1]"]
    command += ["--jars", ",".join(map(str, connector_jars()))]
    command += ["--conf", f"spark.driver.host={HOST}", "--conf", "spark.ui.enabled=false"]
    assert quota_listener.__file__ is not None
    command += ["--py-files", quota_listener.__file__]
    command += [str(script), receiver.url, full, str(tmp_path / "checkpoint")]
    environment = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "SPARK_HOME": str(spark_home),
        "PYSPARK_PYTHON": str(python),
        "PYSPARK_DRIVER_PYTHON": str(python),
        "KAFKA_QUOTA_PROXY_BOOTSTRAP_SERVERS": kafka.bootstrap,
    }
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr.decode()
    assert [report["event"] for report in receiver.taken] == ["started", "progress", "terminated"]
    assert ranges(receiver.of("orders", "progress")) == [(None, offsets(full, 10))]
