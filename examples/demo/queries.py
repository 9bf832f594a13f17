"""The demo's Structured Streaming queries: examples to copy from.

Nothing in them knows of quotas or pipelines: they have client ids, by which the proxy finds what
its configuration says of them, and the proxy's address where the broker's would be. Those whose
rate is to be followed have the listener too. They print how far they are, and at last what they
wrote, as one JSON object a line.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event

from pyspark.sql import Column, SparkSession
from pyspark.sql.functions import col, concat_ws, count, countDistinct, length, udf
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from examples.demo.jobs import DAY_GO_FILE, DAY_TOPIC, PLANS, TRIGGER_S, Job
from metrics.clock import MS_PER_SECOND
from proxy.spark import QuotaListener, client_options

RECORDS_PER_BATCH = 6000
DAY_RECORDS_PER_BATCH = 300
"""Of a day's query: some seconds' worth of its share."""
FETCH_BYTES = 256 * 1024
REPORT_INTERVAL_S = 1
POLL_S = 0.5
"""Between two looks at what the queries have done: short against a trigger interval."""
DRAIN_TIMEOUT_S = 120
CLOSE_TIMEOUT_S = 5.0
ROWS_PER_LOOK = 20
"""Rows between two looks whether processing is slow now."""


class Batches(StreamingQueryListener):  # type: ignore[misc]  # pyspark's types are not read
    """Keeps what was told of each batch with rows.

    Who asks a query for it gets all batches that it remembers, and Spark takes hundredths of a
    second for each.
    """

    def __init__(self) -> None:
        self._told = SimpleQueue[StreamingQueryProgress]()
        self.has_ended = Event()
        """Whether a query has, and all was told of it."""

    def take(self) -> Iterator[StreamingQueryProgress]:
        """Yield what was told since the last look."""
        while not self._told.empty():
            yield self._told.get()

    def onQueryStarted(self, _: QueryStartedEvent) -> None:  # noqa: N802  # Spark's name
        """Do nothing."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """Keep it."""
        if event.progress.numInputRows > 0:
            self._told.put(event.progress)

    def onQueryTerminated(self, _: QueryTerminatedEvent) -> None:  # noqa: N802
        """Say so."""
        self.has_ended.set()


def read_once(bootstrap: str, client_id: str, topic: str, jars: str, work_dir: str) -> None:
    """Read all that is in the topic now, in some batches, and write a row for each record.

    `bootstrap` is the proxy's `HOST:PORT`; `jars` are the Kafka connector's, by commas.
    """
    with _session("quota-proxy demo", "local[3]", jars) as spark:  # a task for each partition
        records = (
            spark.readStream.format("kafka")
            # The proxy, in place of the broker.
            .option("kafka.bootstrap.servers", bootstrap)
            # Without it Spark makes up a new client id for each run.
            .option("kafka.client.id", client_id)
            # Smaller answers than the default of 1 MiB: held for less time each, so evener.
            .option("kafka.max.partition.fetch.bytes", FETCH_BYTES)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", RECORDS_PER_BATCH)
            .load()
        )
        batches = Batches()
        spark.streams.addListener(batches)
        query = (
            records.select("partition", "offset", length(col("value")).alias("size"))
            .writeStream.format("parquet")
            .option("path", f"{work_dir}/rows")
            .option("checkpointLocation", f"{work_dir}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        _watch_once(query, batches)
        written = spark.read.parquet(f"{work_dir}/rows").agg(
            count("*").alias("rows"), countDistinct("partition", "offset").alias("distinct")
        )
        (totals,) = written.collect()
        _say(rows_out=totals["rows"], distinct_rows_out=totals["distinct"])


def run_plan(plan: str, bootstrap: str, proxy: str, jars: str, work_dir: str) -> None:
    """Run the queries of a plan until they have read what the file `stop` in `work_dir` says.

    `proxy` is its admin address, http://HOST:PORT; the other arguments are as of `read_once`.
    Processing is slow while `work_dir` has the file `slow`.
    """
    topic, jobs = PLANS[plan].topic, PLANS[plan].jobs
    # Tasks that sleep need threads, not cores.
    with _session(f"quota-proxy demo {plan}", "local[8]", jars) as spark:
        listener, batches = QuotaListener(proxy), Batches()
        spark.streams.addListener(listener)
        spark.streams.addListener(batches)
        try:
            start = partial(_start, spark, topic, bootstrap, work_dir)
            queries = [start(job) for job in jobs]
            _watch(queries, batches, Path(work_dir, "stop"))
            for job in PLANS[plan].last_jobs:
                _say_written(spark, job, bootstrap)
        finally:
            spark.streams.removeListener(listener)
            listener.close(CLOSE_TIMEOUT_S)


def run_day(
    bootstrap: str,
    spans: dict[str, list[float]],
    jars: str,
    work_dir: str,
    topics: dict[str, str] | None = None,
) -> None:
    """Run queries from when to when `spans` says, in seconds from when there is the file `go`.

    `topics` are those that are not DAY_TOPIC, by query. It ends with who started it.
    """
    go_file = Path(work_dir, DAY_GO_FILE)
    with _session("quota-proxy demo budgets", "local[8]", jars) as spark:
        _say(ready=len(spans))
        while not go_file.exists():
            time.sleep(POLL_S)
        begun_s, running = time.monotonic(), dict[str, StreamingQuery]()
        while True:
            now_s = time.monotonic() - begun_s
            for name, (start_s, end_s) in spans.items():
                if name in running and now_s >= end_s:
                    running.pop(name).stop()
                elif name not in running and start_s <= now_s < end_s:
                    topic = (topics or {}).get(name, DAY_TOPIC)
                    running[name] = _read_on(spark, bootstrap, name, topic, work_dir)
            time.sleep(POLL_S)


def _read_on(
    spark: SparkSession, bootstrap: str, name: str, topic: str, work_dir: str
) -> StreamingQuery:
    """Start a query that reads as fast as it is let, and does nothing with it."""
    return (
        spark.readStream.format("kafka")
        .options(**client_options(name, bootstrap))
        .option("kafka.max.partition.fetch.bytes", FETCH_BYTES)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", DAY_RECORDS_PER_BATCH)
        .load()
        .writeStream.queryName(name)
        .format("noop")
        .option("checkpointLocation", f"{work_dir}/{name}")
        .start()
    )


@contextmanager
def _session(title: str, master: str, jars: str) -> Iterator[SparkSession]:
    """Give a Spark session, and end it."""
    options = {
        "spark.jars": jars,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "1",
    }
    spark = SparkSession.builder.master(master).appName(title).config(map=options).getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def _say(**figures: int | str) -> None:
    """Print the figures as a JSON object."""
    sys.stdout.write(f"{json.dumps(figures)}\n")
    sys.stdout.flush()


def _start(
    spark: SparkSession, topic: str, bootstrap: str, work_dir: str, job: Job
) -> StreamingQuery:
    records = (
        spark.readStream.format("kafka")
        # The proxy in place of the broker, and a client id of the query's own.
        .options(**client_options(job.name, bootstrap))
        .option("subscribe", job.consumes)
        .option("startingOffsets", "earliest")
        .load()
    )
    # The first query names each record by its place in the source, the second keeps that name.
    name = (
        concat_ws("-", "partition", "offset")
        if job.consumes == topic
        else col("value").cast("string")
    )
    process = _work(Path(work_dir, "slow"), job)
    return (
        # A batch to all partitions, or the producer would fill one of them after the other.
        records.select(process(name).alias("value"), "partition")
        .writeStream.queryName(job.name)
        .format("kafka")
        .options(**client_options(job.name, bootstrap))
        .option("topic", job.produces)
        .option("checkpointLocation", f"{work_dir}/{job.name}")
        .trigger(processingTime=f"{TRIGGER_S:g} seconds")
        .start()
    )


def _work(slow_file: Path, job: Job) -> Callable[[Column], Column]:
    """Return the work on a text: it stays as it is, after a sleep; longer with a slow file."""
    row_s, slow_row_s = job.row_ms / MS_PER_SECOND, job.slow_row_ms / MS_PER_SECOND
    state = {"rows": 0, "pause_s": 0.0}

    def process(text: str) -> str:
        if state["rows"] % ROWS_PER_LOOK == 0:
            state["pause_s"] = slow_row_s if slow_file.exists() else row_s
        state["rows"] += 1
        time.sleep(state["pause_s"])
        return text

    wrapped: Callable[[Column], Column] = udf(process, "string")
    return wrapped


def _watch_once(query: StreamingQuery, batches: Batches) -> None:
    """Say after each batch how many rows there are so far; raise when the query fails."""
    rows, ended = 0, False
    while not ended:
        ended = bool(query.awaitTermination(REPORT_INTERVAL_S))
        if ended:
            batches.has_ended.wait(CLOSE_TIMEOUT_S)
        for progress in batches.take():
            rows += progress["numInputRows"]
            _say(batches=progress["batchId"] + 1, rows=rows)


def _watch(queries: Sequence[StreamingQuery], batches: Batches, stop_file: Path) -> None:
    """Print each batch; stop when each query has read as many rows as the stop file says.

    Until there is that file it waits: who makes the file decides how long, and ends this process
    with itself. Raises TimeoutError when they don't get there, and the error of a query that fails.
    """
    _say(ready=len(queries))
    rows = dict.fromkeys((query.name for query in queries), 0)
    deadline_s: float | None = None
    while True:
        for query in queries:
            failure = query.exception()
            if failure is not None:
                raise failure
        for progress in batches.take():
            rows[progress["name"]] += progress["numInputRows"]
            _say(
                query=progress["name"],
                batch=progress["batchId"],
                started=progress["timestamp"],
                rows=progress["numInputRows"],
                duration_ms=progress["durationMs"]["triggerExecution"],
            )
        if stop_file.exists():
            deadline_s = deadline_s or time.monotonic() + DRAIN_TIMEOUT_S
            wanted = int(stop_file.read_text())
            if all(done >= wanted for done in rows.values()):
                break
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{rows} of {wanted} records were read in {DRAIN_TIMEOUT_S} s")
        time.sleep(POLL_S)
    for query in queries:
        query.stop()


def _say_written(spark: SparkSession, job: Job, bootstrap: str) -> None:
    """Print how many rows a query wrote, and how many different ones."""
    rows = spark.read.format("kafka").options(**client_options("count", bootstrap))
    written = rows.option("subscribe", job.produces).load()
    (totals,) = written.agg(
        count("*").alias("rows"), countDistinct("value").alias("distinct")
    ).collect()
    _say(query=job.name, rows_out=totals["rows"], distinct_rows_out=totals["distinct"])


if __name__ == "__main__":
    RUNS: dict[str, Callable[..., None]] = {"once": read_once, "plan": run_plan, "day": run_day}
    RUNS[sys.argv[1]](**json.loads(sys.argv[2]))
