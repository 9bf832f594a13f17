"""Two pipelines of two queries, in one Spark session: an example to copy from.

The code of all is the same. That `first` and `second` are stages of a pipeline is said in the
proxy's configuration alone: it knows them by their client ids, and how they fare by the listener.
"""

import argparse
from collections.abc import Sequence

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, concat_ws
from pyspark.sql.streaming import StreamingQuery

from proxy.demo.jobs import Job
from proxy.demo.pipeline.jobs import JOBS, LAST_JOBS, SOURCE
from proxy.demo.streams import parser, say_written, session, watch, work
from proxy.spark import client_options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all queries until they have read what the stop file says."""
    options = parser(__doc__).parse_args(arguments)
    with session("quota-proxy demo of pipelines", options) as spark:
        watch([_start(spark, job, options) for job in JOBS], options.stop_file)
        for job in LAST_JOBS:
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
    # The first job names each record by its place in the source, the second keeps that name.
    is_first = job.consumes == SOURCE.topic
    name = concat_ws("-", "partition", "offset") if is_first else col("value").cast("string")
    process = work(options.slow_file, job)
    return (
        # A batch to all partitions, or the producer would fill one of them after the other.
        records.select(process(name).alias("value"), "partition")
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
