"""The queries of the demos that are about time, in one Spark session: an example to copy from.

The code of all is the same. Which has an adaptive bound, and which are stages of a pipeline, is
said in the proxy's configuration alone: it knows them by their client ids, and how they fare by the
listener. They print each batch, and at last what they wrote, as one JSON object a line.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import Column, SparkSession
from pyspark.sql.functions import col, concat_ws, count, countDistinct, udf
from pyspark.sql.streaming import StreamingQuery

from examples.demo.jobs import PLANS, TRIGGER_S, Job
from metrics.clock import MS_PER_SECOND
from proxy.spark import QuotaListener, client_options

POLL_S = 0.5
"""Between two looks at what the queries have done: short against a trigger interval."""
DRAIN_TIMEOUT_S = 120
CLOSE_TIMEOUT_S = 5.0
ROWS_PER_LOOK = 20
"""Rows between two looks whether processing is slow now."""


@dataclass(frozen=True, slots=True)
class Options:
    """The program's argument, as a JSON object."""

    plan: str
    """Name in `jobs`."""
    bootstrap: str
    """`HOST:PORT` of the proxy."""
    proxy: str
    """Its admin address, http://HOST:PORT."""
    jars: str
    """The Kafka connector's, by commas."""
    work_dir: str
    """Empty, for the checkpoints. Processing is slow while it has the file `slow`; the file `stop`
    says after how many rows to stop, once it is there."""


def main() -> None:
    """Run the queries until they have read what the stop file says."""
    options = Options(**json.loads(sys.argv[1]))
    plan = PLANS[options.plan]
    # Tasks that sleep need threads, not cores.
    with session(f"quota-proxy demo {options.plan}", "local[8]", options.jars) as spark:
        listener = QuotaListener(options.proxy)
        spark.streams.addListener(listener)
        try:
            queries = [_start(spark, job, job.consumes == plan.topic, options) for job in plan.jobs]
            _watch(queries, Path(options.work_dir, "stop"))
            for job in plan.last_jobs:
                _say_written(spark, job, options.bootstrap)
        finally:
            spark.streams.removeListener(listener)
            listener.close(CLOSE_TIMEOUT_S)


@contextmanager
def session(title: str, master: str, jars: str) -> Iterator[SparkSession]:
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


def say(**figures: int | str) -> None:
    """Print the figures as a JSON object."""
    sys.stdout.write(f"{json.dumps(figures)}\n")
    sys.stdout.flush()


def _start(spark: SparkSession, job: Job, is_first: bool, options: Options) -> StreamingQuery:
    records = (
        spark.readStream.format("kafka")
        # The proxy in place of the broker, and a client id of the query's own.
        .options(**client_options(job.name, options.bootstrap))
        .option("subscribe", job.consumes)
        .option("startingOffsets", "earliest")
        .load()
    )
    # The first query names each record by its place in the source, the second keeps that name.
    name = concat_ws("-", "partition", "offset") if is_first else col("value").cast("string")
    process = _work(Path(options.work_dir, "slow"), job)
    return (
        # A batch to all partitions, or the producer would fill one of them after the other.
        records.select(process(name).alias("value"), "partition")
        .writeStream.queryName(job.name)
        .format("kafka")
        .options(**client_options(job.name, options.bootstrap))
        .option("topic", job.produces)
        .option("checkpointLocation", f"{options.work_dir}/{job.name}")
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


def _watch(queries: Sequence[StreamingQuery], stop_file: Path) -> None:
    """Print each batch; stop when each query has read as many rows as the stop file says.

    Until there is that file it waits: who makes the file decides how long, and ends this process
    with itself. Raises TimeoutError when they don't get there, and the error of a query that fails.
    """
    say(ready=len(queries))
    last = dict.fromkeys((query.name for query in queries), -1)
    rows = dict.fromkeys(last, 0)
    deadline_s: float | None = None
    while True:
        for query in queries:
            failure = query.exception()
            if failure is not None:
                raise failure
            for progress in query.recentProgress:
                if progress["batchId"] > last[query.name] and progress["numInputRows"] > 0:
                    last[query.name] = progress["batchId"]
                    rows[query.name] += progress["numInputRows"]
                    say(
                        query=query.name,
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
    say(query=job.name, rows_out=totals["rows"], distinct_rows_out=totals["distinct"])


if __name__ == "__main__":
    main()
