"""A Spark driver in a process of its own: runs the queries of one job after another as told.

Each line on stdin is a JSON object: `start` names a job, `queries` gives each query's name, which
is its client id, and number within its way, `topics` what it reads; without `start` all queries
stop. Answers are JSON objects, one a line, too: `started` with the time, `stopped`, and for each
batch of a query what `_Batches` says. The end of stdin ends the session.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, count, count_if, expr, window
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

from bench.backpressure_jobs import JOBS, PARTITIONS, TRIGGER_S, Job, Kind
from bench.spark_session import spark_session
from proxy.spark import QuotaListener, client_options
from proxy.spark.quota_listener import batches_after

SLOTS = 48
"""Tasks at a time: more than all queries of a job have partitions. Sleeping needs no core."""
CLOSE_TIMEOUT_S = 5.0
LOOK_S = 0.3
"""Between two looks at what the queries have done."""
STEP_S = 0.05
"""Of a sleep, after which it is seen whether the job is slow now."""
NEAR = "2 seconds"
WATERMARK = "2 seconds"
WINDOW = "5 seconds"
KEYS = 1000
STATE_STORE = "spark.sql.streaming.stateStore.providerClass"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"

_say_lock = threading.Lock()


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(prog="bench.backpressure_driver", description=__doc__)
    parser.add_argument("--jars", required=True, help="the Kafka connector's jars, by commas")
    parser.add_argument("--bootstrap", required=True, help="HOST:PORT of the proxy")
    parser.add_argument("--proxy", required=True, help="its admin address, http://HOST:PORT")
    parser.add_argument("--work-dir", type=Path, required=True, help="for the checkpoints")
    options = parser.parse_args()
    spark = _session(options.jars, options.work_dir)
    quota_listener = QuotaListener(options.proxy)
    spark.streams.addListener(quota_listener)
    batches = _Batches()
    _say(ready=SLOTS)
    running: list[StreamingQuery] = []
    try:
        for line in sys.stdin:
            wanted = json.loads(line)
            if "start" in wanted:
                job = JOBS[wanted["start"]]
                running = _start_all(spark, job, wanted, options)
                batches.follow(running)
                _say(started=time.time())
            else:
                batches.follow(())
                for query in running:
                    query.stop()
                _say(stopped=len(running))
    finally:
        batches.follow(())
        quota_listener.close(CLOSE_TIMEOUT_S)
        spark.stop()


class _Batches:
    """Prints what queries have done: name, trigger time, duration, rows, ends by source.

    A thread asks the queries for it. Spark's bus tells a listener of a batch many seconds later
    where cores are few: pyspark reads each field of an event with a call to the JVM.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[StreamingQuery, int] = {}
        threading.Thread(target=self._run, daemon=True).start()

    def follow(self, queries: Sequence[StreamingQuery]) -> None:
        """Look at these, and no others, from now on."""
        with self._lock:
            self._known = dict.fromkeys(queries, -1)

    def _run(self) -> None:
        while True:
            with self._lock:
                for query, known in self._known.items():
                    self._known[query] = _say_batches(query, known)
            time.sleep(LOOK_S)


def _say_batches(query: StreamingQuery, known: int) -> int:
    """Print the batches after this one, or why the query failed; return the last."""
    of_jvm = query._jsq  # noqa: SLF001 - pyspark has no public name for it
    for progress in batches_after(known, of_jvm):
        known = progress.batchId
        _say(
            query=progress.name,
            batch=known,
            started=progress.timestamp,
            duration_ms=progress.durationMs.get("triggerExecution", 0),
            rows=progress.numInputRows,
            ends=[source.endOffset for source in progress.sources],
        )
    if not query.isActive and (failure := query.exception()) is not None:
        _say(failed=str(failure))
    return known


def _session(jars: str, work_dir: Path) -> SparkSession:
    settings = {
        "spark.scheduler.mode": "FAIR",
        "spark.local.dir": str(work_dir / "spark"),
        "spark.sql.shuffle.partitions": str(PARTITIONS),
        # Plans are small and new in each batch: compiling them costs more than it saves.
        "spark.sql.codegen.wholeStage": "false",
        # Else a stateful query has batches when there is nothing to read.
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    }
    return spark_session(jars, f"local[{SLOTS}]", settings)


def _start_all(
    spark: SparkSession, job: Job, wanted: dict[str, Any], options: argparse.Namespace
) -> list[StreamingQuery]:
    spark.conf.unset(STATE_STORE)
    if job.kind is Kind.COUNT:
        spark.conf.set(STATE_STORE, ROCKSDB)
    started_s = time.time()
    queries = []
    for name, number in wanted["queries"].items():
        # A pool of its own: the tasks of one query do not wait for those of another.
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", name)
        row_s = job.row_costs_s[number]
        source = _Source(spark, options.bootstrap, name)
        writer = _writer(source, job, wanted["topics"], _process(job, row_s, started_s))
        queries.append(
            writer.queryName(name)
            .option("checkpointLocation", f"{options.work_dir}/checkpoints/{name}")
            .trigger(processingTime=f"{TRIGGER_S:g} seconds")
            .start()
        )
    return queries


class _Source:
    """Reads topics as one client."""

    def __init__(self, spark: SparkSession, bootstrap: str, name: str) -> None:
        self._spark = spark
        self._options = client_options(name, bootstrap)

    def read(self, topic: str) -> DataFrame:
        """Return the records of a topic from its start on."""
        return (
            self._spark.readStream.format("kafka")
            .options(**self._options)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .load()
        )


def _writer(
    source: _Source, job: Job, topics: Sequence[str], process: Callable[[DataFrame, int], None]
) -> DataStreamWriter:
    first, last = source.read(topics[0]), topics[-1]
    if job.kind is Kind.WORK:
        return first.writeStream.foreachBatch(process)
    if job.kind is Kind.COUNT:
        keys = (col("key").cast("string").cast("long") % KEYS).alias("number")
        counted = (
            first.withWatermark("timestamp", WATERMARK)
            .groupBy(window("timestamp", WINDOW), keys)
            .agg(count("*"))
        )
        return counted.writeStream.outputMode("update").format("noop")
    left = _named(first, "left")
    right = _named(source.read(last), "right")
    earliest, latest = f"left_time - INTERVAL {NEAR}", f"left_time + INTERVAL {NEAR}"
    pairs = expr(f"left_key = right_key AND right_time BETWEEN {earliest} AND {latest}")
    return left.join(right, pairs).writeStream.format("noop")


def _named(records: DataFrame, side: str) -> DataFrame:
    return records.select(
        col("key").alias(f"{side}_key"), col("timestamp").alias(f"{side}_time")
    ).withWatermark(f"{side}_time", WATERMARK)


def _process(job: Job, row_s: float, started_s: float) -> Callable[[DataFrame, int], None]:
    """Return the work on a batch: it reads the records, and sleeps for as long as they cost.

    That is the time of the partition with most records, as if each had a core of its own. It is
    spent here and not in Python workers of the tasks, which need more of a core than they sleep.
    """
    slow_from_s, slow_until_s = (started_s + at_s for at_s in job.slow or (0.0, 0.0))
    of_partition = [count_if(col("partition") == number) for number in range(PARTITIONS)]

    def process(batch: DataFrame, number: int) -> None:
        (rows,) = batch.agg(*of_partition).collect()
        left_s = max(rows) * row_s * (job.slow_factor if number < job.slow_batches else 1.0)
        while left_s > 0:
            is_slow = slow_from_s <= time.time() < slow_until_s
            factor = job.slow_factor if is_slow else 1.0
            step_s = min(STEP_S, left_s * factor)
            time.sleep(step_s)
            left_s -= step_s / factor
        is_paused = job.pause_every and number % job.pause_every == job.pause_every - 1
        time.sleep(job.fixed_s + (job.pause_s if is_paused else 0.0))

    return process


def _say(**figures: object) -> None:
    """Print the figures as a JSON object; several threads do."""
    with _say_lock:
        sys.stdout.write(f"{json.dumps(figures)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
