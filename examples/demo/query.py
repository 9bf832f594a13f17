"""A Structured Streaming query that reads a topic through the proxy: an example to copy from.

Nothing in it knows of the proxy. It has a client id, by which the proxy finds its quota, and the
proxy's address where the broker's would be. It prints how far it is, and at last what it wrote, as
one JSON object a line.
"""

import json
import sys

from pyspark.sql.functions import col, count, countDistinct, length
from pyspark.sql.streaming import StreamingQuery

from examples.demo.queries import say, session

RECORDS_PER_BATCH = 6000
FETCH_BYTES = 256 * 1024
REPORT_INTERVAL_S = 1


def main(bootstrap: str, client_id: str, topic: str, jars: str, work_dir: str) -> None:
    """Read all that is in the topic now, in some batches, and write a row for each record."""
    with session("quota-proxy demo", "local[3]", jars) as spark:  # a task for each partition
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
        query = (
            records.select("partition", "offset", length(col("value")).alias("size"))
            .writeStream.format("parquet")
            .option("path", f"{work_dir}/rows")
            .option("checkpointLocation", f"{work_dir}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        _watch(query)
        written = spark.read.parquet(f"{work_dir}/rows").agg(
            count("*").alias("rows"), countDistinct("partition", "offset").alias("distinct")
        )
        (totals,) = written.collect()
        say(rows_out=totals["rows"], distinct_rows_out=totals["distinct"])


def _watch(query: StreamingQuery) -> None:
    """Say after each batch how many rows there are so far; raise when the query fails."""
    rows, last_batch, ended = 0, -1, False
    while not ended:
        ended = bool(query.awaitTermination(REPORT_INTERVAL_S))
        for progress in query.recentProgress:
            if progress["batchId"] > last_batch and progress["numInputRows"] > 0:
                last_batch = progress["batchId"]
                rows += progress["numInputRows"]
                say(batches=last_batch + 1, rows=rows)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
