"""What the Spark children of the demos share: the session, work that takes time, what they say.

They print each batch, and at last what they wrote, as one JSON object a line.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import Column, SparkSession
from pyspark.sql.functions import count, countDistinct, udf
from pyspark.sql.streaming import StreamingQuery

from metrics.clock import MS_PER_SECOND
from proxy.demo.jobs import Job
from proxy.spark import QuotaListener, client_options

POLL_S = 0.5
"""Between two looks at what the queries have done: short against a trigger interval."""
DRAIN_TIMEOUT_S = 120
CLOSE_TIMEOUT_S = 5.0
ROWS_PER_LOOK = 20
"""Rows between two looks whether processing is slow now."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all of them have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--bootstrap", required=True, help="HOST:PORT of the proxy")
    made.add_argument("--proxy", required=True, help="its admin address, http://HOST:PORT")
    made.add_argument("--trigger", required=True, help="such as '2 seconds'")
    made.add_argument("--jars", required=True, help="the Kafka connector's jars, by commas")
    made.add_argument("--work-dir", type=Path, required=True, help="empty, for the checkpoints")
    made.add_argument(
        "--slow-file", type=Path, required=True, help="processing is slow while it exists"
    )
    made.add_argument(
        "--stop-file",
        type=Path,
        required=True,
        help="says after how many rows to stop, once it exists",
    )
    return made


@contextmanager
def session(title: str, options: argparse.Namespace) -> Iterator[SparkSession]:
    """Give a Spark session that tells the proxy of its queries."""
    spark = (
        SparkSession.builder.master("local[8]")  # tasks that sleep need threads, not cores
        .appName(title)
        .config("spark.jars", options.jars)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )
    listener = QuotaListener(options.proxy)
    spark.streams.addListener(listener)
    try:
        yield spark
    finally:
        spark.streams.removeListener(listener)
        listener.close(CLOSE_TIMEOUT_S)
        spark.stop()


def work(slow_file: Path, job: Job) -> Callable[[Column], Column]:
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


def watch(queries: Sequence[StreamingQuery], stop_file: Path) -> None:
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


def say_written(spark: SparkSession, job: Job, bootstrap: str) -> None:
    """Print how many rows a query wrote, and how many different ones."""
    rows = spark.read.format("kafka").options(**client_options("count", bootstrap))
    written = rows.option("subscribe", job.produces).load()
    (totals,) = written.agg(
        count("*").alias("rows"), countDistinct("value").alias("distinct")
    ).collect()
    say(query=job.name, rows_out=totals["rows"], distinct_rows_out=totals["distinct"])


def say(**figures: int | str) -> None:
    """Print the figures as a JSON object."""
    sys.stdout.write(f"{json.dumps(figures)}\n")
    sys.stdout.flush()
