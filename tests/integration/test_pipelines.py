"""Pipelines through a real proxy and broker: what is finished is known, and slow stages hold back
those that feed them. The stages are clients whose every request and report a test makes by hand.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import SparkSession
from support.clients import CLIENTS, Access, Client
from support.operating import hang_up, reloads, write
from support.proxy_process import WAIT_S, ProxyProcess, config, until
from support.stages import Stage, id_of
from support.streams import END_S, POLL_S, Stream, copying

from examples.devkit.broker import EmbeddedBroker
from proxy.spark import QuotaListener

pytestmark = pytest.mark.slow

NAME = "orders"
FEED = "feed"
RATE = 100
"""Records/s that the second stage processes; the highest that its band allows."""

NORMAL_RATE = 1000
IN_SOURCE = 100
"""Records that wait for the first stage at the start."""

BACKLOG = 500
"""Records that come when it is held: what a driver was told once it is told for ever."""

PERIOD_S = 1
TICK_S = 0.5
HIGH_BOUND_BYTES = 1_000_000_000
STAGES = ("first", "second", "third")

MakeTopic = Callable[..., str]
Run = Callable[..., ProxyProcess]
MakeStage = Callable[..., Stage]
Document = dict[str, Any]


def stage(name: str, consumes: str, *produces: str, **more: Any) -> Document:
    """Make a stage that never asks for anything, unless `more` says so."""
    return {
        "name": name,
        "consumes": [consumes],
        "produces": list(produces),
        "band": [0, 1_000_000],
        "sampling_interval": "500ms",
        "period": f"{PERIOD_S}s",
        "normal_rate": NORMAL_RATE,
        "step": NORMAL_RATE / 2,
        **more,
    }


def pipeline(topics: list[str], *, second: Document | None = None, **more: Any) -> Document:
    """Make a pipeline: the source, then one stage for each topic, the last without output."""
    stages = [
        stage(name, topic, *topics[number + 1 : number + 2])
        for number, (name, topic) in enumerate(zip(STAGES, topics, strict=False))
    ]
    if second:
        stages[1] |= second
    source = {"client-id": FEED, "produces": topics[:1], "normal_rate": 5000, "step": 5000}
    return {"name": NAME, "sources": [source], "stages": stages, **more}


def whole(bootstrap: str, *pipelines: Document, min_rate: int = 1, **parts: Any) -> Document:
    """Make a configuration in which the stages may be held."""
    adaptive = {"batch_interval": "1s", "min_rate": min_rate, "max_rate": 1_000_000}
    rules = [
        {"client-id": name, "consumer_byte_rate": HIGH_BOUND_BYTES, "adaptive": adaptive}
        for name in STAGES
    ]
    rules.append({"client-id": FEED, "producer_byte_rate": HIGH_BOUND_BYTES})
    return config(bootstrap, rules=rules, **parts) | {"pipelines": list(pipelines)}


@pytest.fixture
def run(kafka: EmbeddedBroker, tmp_path: Path) -> Iterator[Run]:
    """`run(pipeline, ..., **parts of the configuration)` starts a proxy, which must end in order
    and without faults in its log.
    """
    numbers = count()
    with ExitStack() as stack:

        def start(*pipelines: Document, changes: str = "", **parts: Any) -> ProxyProcess:
            folder = tmp_path / f"proxy-{next(numbers)}"
            settings = whole(kafka.bootstrap, *pipelines, **parts)
            process = ProxyProcess(settings, folder, changes=changes)
            stack.callback(process.kill)
            process.start()
            stack.callback(process.stop)
            return process

        yield start


@pytest.fixture
def join(run: Run) -> Iterator[MakeStage]:
    """`join(running, name)` makes a client of a stage."""
    assert run  # it outlives the clients
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(Stage(*arguments))


@pytest.fixture
def source(topic: MakeTopic, fill: Callable[..., None]) -> str:
    """A topic that a source has filled."""
    name = topic()
    fill(name, IN_SOURCE, 20)
    return name


def shown(running: ProxyProcess) -> Document:
    """Give what the admin server says of the pipeline."""
    status, text = running.get("/v1/pipelines")
    assert status == 200
    (document,) = json.loads(text)["pipelines"]
    assert document["name"] == NAME
    return dict(document)


def completion(running: ProxyProcess) -> Document:
    return dict(shown(running)["completion"])


def waits_at(running: ProxyProcess) -> list[str]:
    """Give the stages that pending roots wait at, of the first root first."""
    return [root["waits_at"] for root in completion(running)["pending"]["first"]]


def completed(running: ProxyProcess) -> float:
    return running.metrics().value("ledger_completion_seconds_count", pipeline=NAME)


def pending(running: ProxyProcess) -> float:
    return running.metrics().value("ledger_pending", pipeline=NAME)


def failed(running: ProxyProcess, reason: str) -> float:
    return running.metrics().value("ledger_failed_total", pipeline=NAME, reason=reason)


def rate_of(running: ProxyProcess, node: str) -> float | None:
    """Give what the metrics say that a node is held to; None: not held."""
    metrics = running.metrics()
    labels = {"pipeline": NAME, "stage": node}
    is_held = metrics.value("stage_state", **labels)
    rate = metrics.value("stage_rate", **labels)
    assert is_held in (0, 1)
    return rate if is_held else None


def until_ledger(running: ProxyProcess, **wanted: float) -> None:
    """Wait for metrics of the ledger, and require that they are the API's figures as well."""

    def figures() -> dict[str, float]:
        return {"completed": completed(running), "pending": pending(running)}

    until(lambda: wanted.items() <= figures().items(), f"{wanted}, not {figures()}")
    document = completion(running)
    assert {"completed": document["completed"], "pending": document["pending"]["batches"]} == (
        figures()
    )


# Completion


LATE_NAMES = """
import asyncio
from proxy.cluster.kafka_client import KafkaClient
topic_names = KafkaClient.topic_names

async def late_names(client, ids):
    await asyncio.sleep(1)
    return await topic_names(client, ids)

KafkaClient.topic_names = late_names
"""


@pytest.mark.parametrize(
    "by_id", [None, "", LATE_NAMES], ids=["by name", "by id", "by id, names come late"]
)
def test_a_source_batch_is_finished_when_the_last_stage_is(
    run: Run,
    join: MakeStage,
    source: str,
    topic: MakeTopic,
    kafka: EmbeddedBroker,
    by_id: str | None,
) -> None:
    """Over three stages, one of which has a batch for the output of several.

    `by_id`: what the proxy executes first; None: topics are named.
    """
    began_s = time.monotonic()
    topics = [source, topic(2), topic()]
    ids = {name: None if by_id is None else id_of(kafka.bootstrap, name) for name in topics}
    running = run(pipeline(topics), changes=by_id or "")
    first, second, third = (join(running, name) for name in STAGES)
    for number in range(2):  # two roots
        start, end = first.write(topics[1], 3, partition=number, topic_id=ids[topics[1]])
        assert (start, end) == (0, 3)
        first.done(topics[0], 10 * number, 10 * number + 10)
    until_ledger(running, pending=2, completed=0)
    assert waits_at(running) == ["second", "second"]

    second.read(topics[1])
    _, end = second.write(topics[2], 5, topic_id=ids[topics[2]])
    second.done(topics[1], {0: 0, 1: 0}, {0: 3, 1: 3})
    until(lambda: waits_at(running) == ["third", "third"], "both wait at the third")
    third.done(topics[2], 0, end - 1)
    assert pending(running) == 2
    third.done(topics[2], end - 1, end)
    until_ledger(running, pending=0, completed=2)
    metrics = running.metrics()
    took_s = metrics.value("ledger_completion_seconds_sum", pipeline=NAME)
    assert 2 * 1.0 <= took_s <= 2 * (1.0 + time.monotonic() - began_s), (
        "from the begin of the source batches, of 1 s each"
    )
    assert metrics.value("ledger_failed_total", pipeline=NAME) == 0


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_what_real_clients_write_is_seen(
    run: Run, join: MakeStage, source: str, topic: MakeTopic, client: Client
) -> None:
    topics = [source, topic(3)]
    running = run(pipeline(topics))
    first, second = (join(running, name) for name in STAGES[:2])
    records = [(number % 3, b"%d" % number) for number in range(300)]
    client.produce(Access(running.bootstrap, "first"), topics[1], records, compression="gzip")
    first.done(topics[0], None, IN_SOURCE, rows=IN_SOURCE)
    until_ledger(running, pending=1)
    second.done(topics[1], {0: 0, 1: 0, 2: 0}, {0: 100, 1: 99, 2: 100})
    second.done(topics[1], {0: 100, 1: 99, 2: 100}, {0: 100, 1: 100, 2: 100})
    until_ledger(running, pending=0, completed=1)
    assert completion(running)["counts"]["foreign_records"] == 0


def test_what_ends_at_once_and_what_is_not_seen(
    run: Run, join: MakeStage, source: str, topic: MakeTopic
) -> None:
    """A filter that lets nothing pass; output that nobody is told of; output elsewhere."""
    topics, elsewhere = [source, topic(), topic()], topic()
    running = run(pipeline(topics))
    first, second, third = (join(running, name) for name in STAGES)
    first.done(topics[0], 0, 10)  # filters all
    until_ledger(running, pending=0, completed=1)
    first.write(elsewhere, 1)
    first.done(topics[0], 10, 20)
    until_ledger(running, pending=0, completed=2)
    first.write(topics[1], 1, acks=0)
    first.end(topics[1])  # on another connection, but the broker has it in a moment
    first.done(topics[0], 20, 30)
    until_ledger(running, pending=0, completed=3)

    until(lambda: second.end(topics[1]) == 1, "what was not acknowledged is there")
    first.write(topics[1], 4)
    first.done(topics[0], 30, 40)
    second.done(topics[1], 0, 5)  # filters all, and reads what it was not told of
    until_ledger(running, pending=0, completed=4)
    assert completion(running)["counts"]["foreign_records"] == 1
    third.report("idle")
    assert failed(running, "timed_out") == 0


def test_a_stage_that_reports_first_and_reports_that_come_twice(
    run: Run, join: MakeStage, source: str, topic: MakeTopic
) -> None:
    topics = [source, topic()]
    running = run(pipeline(topics))
    first, second = (join(running, name) for name in STAGES[:2])
    first.write(topics[1], 5)
    second.done(topics[1], 0, 5)
    assert completion(running)["early_batches"] == 1
    first.done(topics[0], 0, 10)
    until_ledger(running, pending=0, completed=1)
    assert completion(running)["early_batches"] == 0

    first.write(topics[1], 5)
    first.done(topics[0], 10, 20)
    second.done(topics[1], 5, 10)
    assert second.batch(topics[1], 5, 10).status == 409
    with Stage(running, "second") as again:  # after a restart from an older checkpoint
        again.report("started")
        again.done(topics[1], 5, 10)
    until_ledger(running, pending=0, completed=2)
    assert completion(running)["counts"]["repeated_records"] == 5


def test_roots_that_take_too_long_fail(
    run: Run, join: MakeStage, source: str, topic: MakeTopic
) -> None:
    topics = [source, topic()]
    running = run(pipeline(topics, timeout="1s"))
    first, second = (join(running, name) for name in STAGES[:2])
    first.write(topics[1], 5)
    first.done(topics[0], 0, 10, took_ms=1)
    until(lambda: failed(running, "timed_out") == 1, "it is given up")
    until_ledger(running, pending=0, completed=0)
    second.done(topics[1], 0, 5)
    assert completion(running)["counts"]["late_acks"] in (0, 1)
    assert running.logged("source batch not finished")[0]["batch"] == 0


# Flow


class Feeder:
    """Writes to the topic of the second stage at a rate, and lets its driver look; in a thread."""

    PAUSE_S = 0.05

    def __init__(self, writer: Stage, reader: Stage, topic: str) -> None:
        self.per_s = 0.0
        self._stop = threading.Event()
        self._arguments = writer, reader, topic
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Feeder":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        writer, reader, topic = self._arguments
        owed, before_s = 0.0, time.monotonic()
        while not self._stop.wait(self.PAUSE_S):
            now_s = time.monotonic()
            owed += self.per_s * (now_s - before_s)
            before_s = now_s
            if owed >= 1:
                writer.write(topic, int(owed))
                owed -= int(owed)
            reader.end(topic)


def began(stage: Stage, topic: str) -> None:
    """Let the proxy learn the run of a query, and that this is its driver's connection."""
    assert stage.end(topic) == IN_SOURCE
    stage.done(topic, 0, IN_SOURCE, took_ms=10)


def settled(running: ProxyProcess, node: str) -> float:
    """Wait for the end of changes; return the rate that a node is held to."""

    def is_steady() -> float | None:
        before = rate_of(running, node)
        time.sleep(2 * PERIOD_S + TICK_S)
        return before if before == rate_of(running, node) else None

    return float(until(is_steady, "its rate stays as it is"))


def test_a_stage_is_held_and_released(
    run: Run, join: MakeStage, source: str, topic: MakeTopic, fill: Callable[..., None]
) -> None:
    topics = [source, topic()]
    running = run(pipeline(topics, second={"band": [RATE / 2, RATE]}))
    first, second = (join(running, name) for name in STAGES[:2])
    began(first, topics[0])
    first.write(topics[1], RATE)
    second.end(topics[1])
    second.done(topics[1], 0, RATE)
    assert rate_of(running, "first") is None
    with join(running, "first") as writer, Feeder(writer, second, topics[1]) as feeder:
        feeder.per_s = 10 * RATE
        assert until(lambda: rate_of(running, "first"), "it is held") <= RATE
        feeder.per_s = 0.75 * RATE  # within the band: it stays
        rate = settled(running, "first")
        document = next(each for each in shown(running)["stages"] if each["name"] == "first")
        assert document["state"] == "reduced"
        assert document["rate"] == rate
        assert document["held_by"] == ["second"]
        assert rate_of(running, "second") is None
        fill(topics[0], BACKLOG, 20)
        assert first.end(topics[0]) == IN_SOURCE + round(rate)
        feeder.per_s = 0.0
        rates = {rate}
        until(lambda: rates.add(now := rate_of(running, "first")) or now is None, "it is released")
    assert len(rates) > 2, "step by step"
    assert first.end(topics[0]) == IN_SOURCE + BACKLOG


def test_a_producer_is_held_to_the_bound(run: Run, join: MakeStage, topic: MakeTopic) -> None:
    topics = [topic()]
    settings = pipeline(topics, hold_producers=True)
    settings["stages"][0] |= {"band": [0, 2 * RATE]}
    running = run(settings)
    first = join(running, "first")
    stop = threading.Event()

    def send() -> None:
        """Send four times RATE, or less if it has to wait."""
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": running.bootstrap,
                "client.id": FEED,
                "linger.ms": 5,
                "batch.num.messages": 10,
                "max.in.flight": 1,
                "queue.buffering.max.messages": 20,
            }
        )
        while not stop.wait(10 / (4 * RATE)):
            with suppress(BufferError):  # what finds no room is lost
                for _ in range(10):
                    producer.produce(topics[0], b"." * 1000)
            producer.poll(0)
        producer.purge()
        producer.flush(WAIT_S)

    def measured(seconds: float) -> float:
        start_s, start = time.monotonic(), first.end(topics[0])
        while time.monotonic() < start_s + seconds:
            first.end(topics[0])
            time.sleep(0.1)
        return (first.end(topics[0]) - start) / (time.monotonic() - start_s)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        until(lambda: first.end(topics[0]) > 0, "it sends")
        first.done(topics[0], 0, 1, rows=round(1.5 * RATE))
        until(lambda: first.end(topics[0]) and rate_of(running, FEED), "it is held")
        until(lambda: measured(1) < 2 * RATE, "it slows down")
        found, rate = measured(4), rate_of(running, FEED)
        assert rate is not None
        assert found < 1.5 * rate, "no more than that, and what it saved in a second"
        first.report("terminated")
        until(lambda: rate_of(running, FEED) is None, "nobody holds it any more")
        until(lambda: measured(1) > 3 * RATE, "it is released")
    finally:
        stop.set()
        thread.join()


SMALL, WAVE = 10, 1_500
"""Records of the source: of a batch that is small, and of many batches."""

MAX_LAG, MAX_PENDING = 600, 3
STANDS_S = 2.5
"""Two triggers, and what a batch takes."""


class Line:
    """Two Spark queries, one of which writes what the other reads; and what a bound is on."""

    def __init__(self, running: ProxyProcess, kafka: str, topics: list[str], last: Stream) -> None:
        self.last, self.fed = last, 0
        self.lag, self.pending = [0], [0]
        self._running, self._topic = running, TopicPartition(topics[1], 0)
        self._consumer = Consumer({"bootstrap.servers": kafka, "group.id": "nobody"})

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def look(self) -> bool:
        """Look at what the bounds are on."""
        _, end = self._consumer.get_watermark_offsets(self._topic, timeout=WAIT_S)
        done = sum(each["completed_to"] or 0 for each in self.last.known()["partitions"])
        self.lag.append(end - done)
        self.pending.append(int(pending(self._running)))
        return True

    def has_read_all(self) -> bool:
        """Say whether the last query has read all that the source was fed."""
        self.look()
        return sum(each.rows for each in list(self.last.batches.values())) == self.fed

    def stands(self, seconds: float) -> None:
        """Keep looking for so long."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and self.look():
            time.sleep(POLL_S)


@pytest.mark.usefixtures("no_data_loss")
def test_bounds_are_kept_while_a_spark_query_stands(
    kafka: EmbeddedBroker,
    run: Run,
    listen: Callable[..., QuotaListener],
    stream: Callable[..., Stream],
    topic: MakeTopic,
    *,
    fill: Callable[..., None],
    spark: SparkSession,
    tmp_path: Path,
) -> None:
    topics = [topic(), topic()]
    bounds = {"max_lag": MAX_LAG, "max_pending": {"batches": MAX_PENDING}}
    running = run(pipeline(topics, **bounds), min_rate=WAVE)  # so that nothing else bounds batches
    listen(running)
    last = stream(running, "second", topics[1])
    first = copying(spark, running, topics, tmp_path, "1 second")
    try:
        last.start("1 second")
        with Line(running, kafka.bootstrap, topics, last) as line:

            def feed(count: int) -> None:
                fill(topics[0], count, 20)
                line.fed += count

            feed(SMALL)  # the first batch of a run is not bounded
            last.until(line.has_read_all, "the first records are through")
            last.gate.clear()

            def is_full() -> bool:
                feed(SMALL)
                line.look()
                return line.pending[-1] == MAX_PENDING

            last.until(is_full, "as much is in flight as may be")
            feed(SMALL)
            line.stands(STANDS_S)
            assert line.pending[-1] == MAX_PENDING
            last.gate.set()
            last.until(line.has_read_all, "what waited is through")

            last.stop()
            feed(WAVE)
            until(
                lambda: line.look() and line.lag[-1] == MAX_LAG, "all of the room is taken", END_S
            )
            line.stands(STANDS_S)
            (waiting,) = [each for each in shown(running)["stages"] if each["name"] == "first"]
            assert waiting["waits"]["for"] == "second"
            assert waiting["waits"]["records"] == 0
            last.start("1 second")
            last.until(line.has_read_all, "what waited is through")
            assert max(line.lag) == MAX_LAG
            assert max(line.pending) == MAX_PENDING
    finally:
        first.stop()
    assert first.exception() is None
    values = [value for each in last.batches.values() for value in each.values]
    assert len(values) == line.fed
    last.check_all_read({0: line.fed})


def test_sources_wait_while_as_much_is_in_flight_as_may_be(
    run: Run, join: MakeStage, source: str, topic: MakeTopic, fill: Callable[..., None]
) -> None:
    topics = [source, topic()]
    running = run(pipeline(topics, max_pending={"batches": 2}))
    first, second = (join(running, name) for name in STAGES[:2])
    first.end(topics[0])
    for done in (10, IN_SOURCE):
        first.write(topics[1], 5)
        first.done(topics[0], done - 10, done, took_ms=10)
    until(lambda: pending(running) == 2, "as much is in flight as may be")
    fill(topics[0], BACKLOG, 20)
    assert completion(running)["pending"]["full"]
    assert first.end(topics[0]) == IN_SOURCE, "nothing new"
    assert rate_of(running, "first") == 0
    second.done(topics[1], 0, 5)
    end = IN_SOURCE + BACKLOG
    until(lambda: first.end(topics[0]) == end, "one is finished, the next may come")
    until(lambda: not completion(running)["pending"]["full"], "no more than it may be")


# The end of the process


@pytest.mark.parametrize("kind", ["sqlite", "kafka"])
def test_what_is_held_and_pending_survives_a_crash(
    run: Run,
    join: MakeStage,
    source: str,
    *,
    topic: MakeTopic,
    fill: Callable[..., None],
    tmp_path: Path,
    kind: str,
) -> None:
    topics = [source, topic()]
    where = (
        {"path": str(tmp_path / "state.db")} if kind == "sqlite" else {"topic": f"{topics[0]}-s"}
    )
    settings = pipeline(topics, second={"band": [0, RATE]})
    running = run(settings, state={"kind": kind, **where})
    first, second = (join(running, name) for name in STAGES[:2])
    began(first, topics[0])
    first.write(topics[1], RATE)
    second.end(topics[1])
    second.done(topics[1], 0, RATE)
    with join(running, "first") as writer, Feeder(writer, second, topics[1]) as feeder:
        feeder.per_s = 10 * RATE
        until(lambda: rate_of(running, "first"), "it is held")
    fill(topics[0], BACKLOG, 20)
    end = second.end(topics[1])
    first.done(topics[0], IN_SOURCE, IN_SOURCE + 10, took_ms=10)
    rate = settled(running, "first")
    until_ledger(running, pending=1)
    before = completion(running)["pending"]["first"][0]

    running.kill()
    running.start()
    until(lambda: rate_of(running, "first") == rate, "it is held again", PERIOD_S)
    (after,) = completion(running)["pending"]["first"]
    assert before.keys() == after.keys()
    assert {key: after[key] for key in ("root", "stage", "batch", "waits_at")} == {
        key: before[key] for key in ("root", "stage", "batch", "waits_at")
    }
    for each in (first, second):
        each.connect()
    planned = IN_SOURCE + 10 + round(rate)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(first.end, topics[0])  # it waits for the report
        first.report("idle")
        assert asked.result(WAIT_S) == planned
    first.done(topics[0], IN_SOURCE + 10, planned, took_ms=10)
    assert rate_of(running, "first") == rate
    assert first.end(topics[0]) == planned + round(rate)
    second.done(topics[1], RATE, end)
    until(lambda: completed(running) == 2, "so is what was pending before")


def test_what_a_batch_wrote_before_a_crash_is_waited_for(
    run: Run, join: MakeStage, source: str, topic: MakeTopic, tmp_path: Path
) -> None:
    topics = [source, topic()]
    state = {"kind": "sqlite", "path": str(tmp_path / "state.db")}
    running = run(pipeline(topics), state=state)
    first, second = (join(running, name) for name in STAGES[:2])
    first.write(topics[1], 1)
    first.done(topics[0], 0, 10)
    second.end(topics[1])
    second.done(topics[1], 0, 1)
    until_ledger(running, pending=0, completed=1)
    time.sleep(4 * TICK_S)  # it is kept at the next tick
    first.write(topics[1], 2)

    running.kill()
    running.start()
    for each in (first, second):
        each.connect()
    first.write(topics[1], 3)
    first.done(topics[0], 10, 20, took_ms=60_000)  # it began long before
    until_ledger(running, pending=1, completed=0)
    second.done(topics[1], 1, 5)
    assert pending(running) == 1
    second.done(topics[1], 5, 6)
    until_ledger(running, pending=0, completed=1)
    assert completion(running)["failed"] == {}


# Reloads


def reload(
    running: ProxyProcess, kafka: EmbeddedBroker, *pipelines: Document, result: str = "ok"
) -> None:
    """Put other pipelines into the proxy's file, and wait until they were read."""
    before = reloads(running)[result]
    write(running, whole(kafka.bootstrap, *pipelines))
    hang_up(running)
    until(lambda: reloads(running)[result] > before, f"the reload is {result}")


def test_reloads_while_roots_are_pending(
    kafka: EmbeddedBroker, run: Run, join: MakeStage, source: str, topic: MakeTopic
) -> None:
    topics = [source, topic(), topic()]
    settings = pipeline(topics)
    running = run(settings)
    first, second, third = (join(running, name) for name in STAGES)
    for number in range(2):
        first.write(topics[1], 5)
        first.done(topics[0], 10 * number, 10 * number + 10)
    second.write(topics[2], 5)
    second.done(topics[1], 0, 5)
    until_ledger(running, pending=2)
    assert waits_at(running) == ["third", "second"]
    bad = {**settings, "stages": [*settings["stages"], stage("fourth", "nobody-makes-it")]}
    reload(running, kafka, bad, result="failed")
    assert len(shown(running)["stages"]) == 3
    until_ledger(running, pending=2)

    second.write(topics[2], 1)  # unreported, to a topic that its stage will not produce
    reload(running, kafka, pipeline(topics[:2]))
    until(lambda: failed(running, "pipeline_changed") == 1, "the last stage is gone")
    until_ledger(running, pending=1)
    assert {each["name"] for each in shown(running)["stages"]} == {"first", "second"}
    assert "third" not in running.metrics().labels("stage_state", "stage")
    third.done(topics[2], 0, 5)  # of no stage any more
    second.done(topics[1], 5, 10)
    until_ledger(running, pending=0, completed=1)


def test_a_pipeline_goes_and_comes_back_while_a_root_is_pending(
    kafka: EmbeddedBroker, run: Run, join: MakeStage, source: str, topic: MakeTopic
) -> None:
    topics = [source, topic()]
    settings = pipeline(topics)
    running = run(settings)
    first, second = (join(running, name) for name in STAGES[:2])
    first.write(topics[1], 5)
    first.done(topics[0], 20, 30)
    until_ledger(running, pending=1)
    reload(running, kafka)
    until(lambda: not json.loads(running.get("/v1/pipelines")[1])["pipelines"], "it is gone")
    assert failed(running, "pipeline_changed") == 1
    assert NAME not in running.metrics().labels("ledger_pending", "pipeline")
    (gone,) = running.logged("pipeline is gone")
    assert gone["pending"] == 1
    first.write(topics[1], 5)
    first.done(topics[0], 30, 40)

    reload(running, kafka, settings)
    until(lambda: rate_of(running, "second") is None, "it is back")
    assert pending(running) == 0
    first.write(topics[1], 5)
    first.done(topics[0], 40, 50)
    until(lambda: pending(running) == 1, "it is pending")
    second.done(topics[1], 0, 15)
    until(lambda: completed(running) == 1, "the pipeline that came back works as before")
    assert pending(running) == 0
