"""Two queries on one topic, with and without an adaptive bound: an example to copy from.

The code of both is the same. The proxy tells them apart by their client ids, and learns how they
fare from the listener.
"""

import argparse
from collections.abc import Sequence

from pyspark.sql import SparkSession
from pyspark.sql.functions import concat_ws
from pyspark.sql.streaming import StreamingQuery

from proxy.demo.streams import parser, say, say_written, session, watch, work
from proxy.spark import client_options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both queries until they have read what the stop file says."""
    options = _parser().parse_args(arguments)
    with session("quota-proxy demo of backpressure", options) as spark:
        queries = [_start(spark, name, options) for name in options.name]
        say(ready=len(queries))
        watch(queries, options.stop_file)
        for query in queries:
            query.stop()
        for name in options.name:
            say_written(spark, name, f"{name}-processed", options.bootstrap)


def _start(spark: SparkSession, name: str, options: argparse.Namespace) -> StreamingQuery:
    records = (
        spark.readStream.format("kafka")
        # The proxy in place of the broker, and a client id of the query's own.
        .options(**client_options(name, options.bootstrap))
        .option("subscribe", options.topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    process = work(options.slow_file, options.row_ms, options.slow_row_ms)
    return (
        records.select(process(concat_ws("-", "partition", "offset")).alias("value"))
        .writeStream.queryName(name)
        .format("kafka")
        .options(**client_options(name, options.bootstrap))
        .option("topic", f"{name}-processed")
        .option("checkpointLocation", f"{options.work_dir}/{name}")
        .trigger(processingTime=options.trigger)
        .start()
    )


def _parser() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--name", required=True, action="append", help="of a query; twice")
    made.add_argument("--topic", required=True)
    made.add_argument("--row-ms", type=float, required=True, help="work per record")
    made.add_argument("--slow-row-ms", type=float, required=True, help="the same while slow")
    return made


if __name__ == "__main__":
    main()
