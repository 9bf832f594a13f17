"""A query that writes files; run as a program, a driver of its own that a test can kill."""

import sys
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming import DataStreamWriter

from examples.devkit.jars import connector_jars
from proxy.spark import QuotaListener, client_options

TRIGGER = "500 milliseconds"


def writer(
    spark: SparkSession, bootstrap: str, name: str, topic: str, folder: Path
) -> DataStreamWriter:
    """Make a query that writes each record's partition and offset to `folder`, once."""
    records = (
        spark.readStream.format("kafka")
        .options(**client_options(name, bootstrap))
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    return (
        records.select("partition", "offset")
        .writeStream.queryName(name)
        .format("json")
        .option("path", str(folder / "rows"))
        .option("checkpointLocation", str(folder / "checkpoint"))
    )


def main(bootstrap: str, url: str, name: str, topic: str, folder: str) -> None:
    """Run until killed."""
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", ",".join(map(str, connector_jars())))
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )
    spark.streams.addListener(QuotaListener(url))
    query = writer(spark, bootstrap, name, topic, Path(folder))
    query.trigger(processingTime=TRIGGER).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
