"""Two queries on one topic, with and without an adaptive bound: an example to copy from.

The code of both is the same. The proxy tells them apart by their client ids, and learns how they
fare from the listener.
"""

import argparse
from collections.abc import Sequence

from pyspark.sql import SparkSession
from pyspark.sql.functions import concat_ws
from pyspark.sql.streaming import StreamingQuery

from proxy.demo.backpressure.jobs import JOBS
from proxy.demo.jobs import Job
from proxy.demo.streams import parser, say_written, session, watch, work
from proxy.spark import client_options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both queries until they have read what the stop file says."""
    options = parser(__doc__).parse_args(arguments)
    with session("quota-proxy demo of backpressure", options) as spark:
        watch([_start(spark, job, options) for job in JOBS], options.stop_file)
        for job in JOBS:
            say_written(spark, job, options.bootstrap)


def _start(spark: SparkSession, job: Job, options: argparse.Namespace) -> StreamingQuery:
    records = (
        spark.readStream.format("kafka")
        # The proxy in place of the broker, and a client id of the query's own.
        .options(**client_options(job.name, options.bootstrap))
        .option("subscribe", job.consumes)
        .option("startingOffsets", "earliest")
        .load()
    )
    process = work(options.slow_file, job)
    return (
        records.select(process(concat_ws("-", "partition", "offset")).alias("value"))
        .writeStream.queryName(job.name)
        .format("kafka")
        .options(**client_options(job.name, options.bootstrap))
        .option("topic", job.produces)
        .option("checkpointLocation", f"{options.work_dir}/{job.name}")
        .trigger(processingTime=options.trigger)
        .start()
    )


if __name__ == "__main__":
    main()
