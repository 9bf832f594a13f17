"""A Spark driver in a process of its own: reads a topic as often as it is told.

Each line on stdin is a JSON object of Kafka options, the bootstrap address among them. The answer
is one line, `read SECONDS`, with the wall time of a batch query over the whole topic. The end of
stdin ends the session.
"""

import argparse
import json
import sys
import time

from pyspark.sql import SparkSession

from bench.spark_session import spark_session


def main() -> None:
    """Serve until stdin ends."""
    parser = argparse.ArgumentParser(prog="bench.spark_reader", description=__doc__)
    parser.add_argument("--jars", required=True, help="the Kafka connector's jars, by commas")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--tasks", type=int, default=2, help="how many run at the same time")
    options = parser.parse_args()
    spark = spark_session(options.jars, f"local[{options.tasks}]", {})
    print("ready", flush=True)
    try:
        for line in sys.stdin:
            print(f"read {_read(spark, options.topic, json.loads(line)):.4f}", flush=True)
    finally:
        spark.stop()


def _read(spark: SparkSession, topic: str, kafka: dict[str, str]) -> float:
    """Read the topic to its end into the sink that drops everything; returns seconds."""
    started_s = time.monotonic()
    (
        spark.read.format("kafka")
        .options(**{f"kafka.{name}": value for name, value in kafka.items()})
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("endingOffsets", "latest")
        .load()
        .write.format("noop")
        .mode("overwrite")
        .save()
    )
    return time.monotonic() - started_s


if __name__ == "__main__":
    main()
