"""A Spark driver in a process of its own, whose queries go on while what they read from is killed.

Each line on stdin is a `Start` as JSON. Each line on stdout is an event as JSON; times are those of
the monotonic clock, which all processes of a machine share. The end of stdin ends the session.

| event | when | with it |
|---|---|---|
| `begun` | a batch was planned and is handed to the sink | `batch`, `ends` by partition |
| `ended` | all of it was read, and the work on it was done | `batch`, `ranges` |
| `over` | the run has ended | `error`, None for none |
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Thread

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from bench.spark_session import spark_session
from proxy.spark import QuotaListener, client_options

SPARK_SETTINGS = {"spark.sql.streaming.noDataProgressEventInterval": "1000"}

TASK_FAILURES = 4
"""Of one task until its query fails: the default of all masters but `local[N]`."""


@dataclass(frozen=True, slots=True)
class Start:
    """One run of a query.

    Attributes:
        name: of the query, its client id, and the topic that it reads.
        bootstrap: where it reads.
        admin: the URL that its batches are reported to.
        checkpoint: path of its folder.
        trigger: such as `2 seconds`.
        work_s: how long the work on a batch takes after it was read.
        options: further ones of the source.

    """

    name: str
    bootstrap: str
    admin: str
    checkpoint: str
    trigger: str
    work_s: float
    options: dict[str, str] = field(default_factory=dict)


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(prog="bench.outage_driver", description=__doc__)
    parser.add_argument("--jars", required=True, help="the Kafka connector's jars, by commas")
    parser.add_argument("--tasks", type=int, default=2, help="how many run at the same time")
    options = parser.parse_args()
    master = f"local[{options.tasks},{TASK_FAILURES}]"
    spark = spark_session(options.jars, master, SPARK_SETTINGS)
    print("ready", flush=True)
    try:
        for line in sys.stdin:
            _start(spark, Start(**json.loads(line)))
    finally:
        spark.stop()


def _start(spark: SparkSession, start: Start) -> None:
    """Begin a run in a session of its own, whose listeners get the events of no other query."""
    session = spark.newSession()
    session.streams.addListener(QuotaListener(start.admin))
    reader = (
        session.readStream.format("kafka")
        .options(**client_options(start.name, start.bootstrap))
        .option("subscribe", start.name)
        .option("startingOffsets", "earliest")
        .options(**start.options)
    )
    writer = (
        reader.load()
        .writeStream.queryName(start.name)
        .option("checkpointLocation", start.checkpoint)
        .foreachBatch(_sink(start))
    )
    query = writer.trigger(processingTime=start.trigger).start()
    Thread(target=_await_end, args=(start.name, query), daemon=True).start()


def _sink(start: Start) -> Callable[[DataFrame, int], None]:
    planned = Path(start.checkpoint) / "offsets"

    def process(batch: DataFrame, number: int) -> None:
        # What Spark has noted of the source, in the last line.
        ends = json.loads((planned / str(number)).read_text().splitlines()[-1])
        _print(start.name, "begun", batch=number, ends=ends[start.name])
        ranges: dict[int, tuple[int, int, int]] = {}
        for partition, offset in batch.select("partition", "offset").collect():
            first, last, count = ranges.get(partition, (offset, offset, 0))
            ranges[partition] = min(first, offset), max(last, offset), count + 1
        time.sleep(start.work_s)
        _print(start.name, "ended", batch=number, ranges=ranges)

    return process


def _await_end(name: str, query: StreamingQuery) -> None:
    error: str | None = None
    try:
        query.awaitTermination()
    except Exception as failure:
        error = str(failure)
    _print(name, "over", error=error)


_one_at_a_time = Lock()


def _print(name: str, event: str, **about: object) -> None:
    line = json.dumps({"query": name, "event": event, "at_s": time.monotonic(), **about})
    with _one_at_a_time:
        print(line, flush=True)


if __name__ == "__main__":
    main()
