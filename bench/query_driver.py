"""A Spark query in a process of its own, that reads on while what it reads from is killed.

Each line on stdout is a batch that was read, as JSON: its number, and for each partition the first
offset, the last one, and how many records there were. It ends when the query fails.
"""

import argparse
import json

from pyspark.sql import DataFrame

from bench.spark_session import spark_session
from proxy.spark import QuotaListener, client_options

SPARK_SETTINGS = {"spark.sql.streaming.noDataProgressEventInterval": "1000"}
TASKS, TASK_FAILURES = 8, 4
"""At a time, and of one task until its query fails: the default of all masters but `local[N]`."""
RETRIES = "20"
"""Of a look-up of offsets: a driver by default gives up after three."""


def main() -> None:
    """Read until the process or the query is ended."""
    parser = argparse.ArgumentParser(prog="bench.query_driver", description=__doc__)
    parser.add_argument("--jars", required=True, help="the Kafka connector's jars, by commas")
    parser.add_argument("--name", required=True, help="of the query, its client id and its topic")
    parser.add_argument("--bootstrap", required=True, help="addresses, by commas")
    parser.add_argument("--admin", required=True, help="URL that batches are reported to")
    parser.add_argument("--checkpoint", required=True, help="a folder")
    parser.add_argument("--records-per-trigger", required=True)
    options = parser.parse_args()
    master = f"local[{TASKS},{TASK_FAILURES}]"
    spark = spark_session(options.jars, master, SPARK_SETTINGS)
    spark.streams.addListener(QuotaListener(options.admin))
    reader = (
        spark.readStream.format("kafka")
        .options(**client_options(options.name, options.bootstrap))
        .option("subscribe", options.name)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", options.records_per_trigger)
        .option("fetchOffset.numRetries", RETRIES)
    )
    writer = reader.load().writeStream.queryName(options.name).foreachBatch(_print_ranges)
    writer.option("checkpointLocation", options.checkpoint).start().awaitTermination()


def _print_ranges(batch: DataFrame, number: int) -> None:
    ranges: dict[int, tuple[int, int, int]] = {}
    for partition, offset in batch.select("partition", "offset").collect():
        first, last, count = ranges.get(partition, (offset, offset, 0))
        ranges[partition] = min(first, offset), max(last, offset), count + 1
    print(json.dumps({"batch": number, "ranges": ranges}), flush=True)


if __name__ == "__main__":
    main()
