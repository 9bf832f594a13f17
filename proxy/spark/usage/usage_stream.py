"""Copies the usage topic to Parquet by day, as a Structured Streaming query; see docs.

    spark-submit --packages org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0 usage_stream.py \
        --bootstrap-servers proxy:19092 --out s3a://bucket/usage

Whatever is restarted, each record is there once: what a batch had stored before a crash is found
there and left out when it comes again, however late. One query at a time writes to a folder: a file
in it is written anew while the query runs.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

if __name__ == "__main__" and not __package__:  # by spark-submit: the package is the folder around
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "usage"

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from .command_line import KeyValues, UsageInputError, run_program
from .record_frames import hadoop_path, store_records

USAGE_NAME = "quota-proxy-usage"
"""Of the topic, the query and its client."""
MOST_OFFSETS = 1_000_000
"""Of a batch, so that a backlog of months needs no more memory than a day."""
STREAM_TRIGGER = "5 minutes"

WRITERS_FOLDER = "writers"
BEAT_S, DEAD_AFTER_S = 3, 15
"""How often a query writes its file; for how long after that it is taken for alive."""


class WriterLock:
    """The right to write below a folder: `take` it, check that it `is_held`, and `keep` it."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        self._folder = folder
        parent = f"{folder}/{WRITERS_FOLDER}"
        self._parent, self._files = hadoop_path(spark, parent)
        own = f"{parent}/{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        self._own, _ = hadoop_path(spark, own)

    def take(self) -> None:
        """Wait until who has died is known to be dead. Raises UsageInputError if one lives."""
        first = self._touch()
        while True:
            now = self._touch()
            own = now.pop(self._own.getName())
            alive = [name for name, time_ms in now.items() if first.get(name) != time_ms]
            if alive:
                self._files.delete(self._own, False)
                raise UsageInputError(
                    f"{self._folder}: another query writes to it ({alive[0]}), and two would store "
                    "records twice; fix: end that one, or name another folder"
                )
            if all(own - time_ms > DEAD_AFTER_S * 1000 for time_ms in now.values()):
                break
            time.sleep(BEAT_S)
        for name in now:
            self._files.delete(self._parent.suffix(f"/{name}"), False)

    def is_held(self) -> bool:
        """Return whether no other query took this one for dead."""
        return bool(self._files.exists(self._own))

    def keep(self, query: StreamingQuery) -> None:
        """Keep the right, in a thread, until a query ends."""
        Thread(target=self._beat, args=(query,), daemon=True, name="keep usage folder").start()

    def _beat(self, query: StreamingQuery) -> None:
        with suppress(Exception):  # the process ends
            while query.isActive:
                with suppress(Exception):  # the query fails, or for now the file system does
                    if not query.awaitTermination(BEAT_S) and self.is_held():
                        self._touch()
            self._files.delete(self._own, False)

    def _touch(self) -> dict[str, int]:
        """Write the own file; return when each was written, by the clock of the file system."""
        self._files.create(self._own, True).close()
        found = self._files.listStatus(self._parent)
        return {each.getPath().getName(): each.getModificationTime() for each in found}


def usage_query(
    spark: SparkSession,
    options: Mapping[str, str],
    out: str,
    topic: str = USAGE_NAME,
    trigger: Mapping[str, Any] | None = None,
) -> StreamingQuery:
    """Start the query that copies a topic to Parquet files below `out`, with its checkpoint there.

    Args:
        spark: the session; its default file system has `out`.
        options: of Spark's Kafka source, `kafka.bootstrap.servers` at least.
        out: the folder; one query at a time may write to it.
        topic: the topic with usage records.
        trigger: arguments of `DataStreamWriter.trigger`; every five minutes by default.

    Raises UsageInputError while another query writes to the folder.

    """
    given = {
        "kafka.client.id": USAGE_NAME,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": str(MOST_OFFSETS),
        **options,
    }
    writer = WriterLock(spark, out)
    writer.take()
    messages = spark.readStream.format("kafka").options(**given).option("subscribe", topic).load()
    query: StreamingQuery = (
        messages.writeStream.queryName(given["kafka.client.id"])
        .foreachBatch(lambda batch, number: _store(batch, number, out, writer))
        .option("checkpointLocation", f"{out}/checkpoint")
        .trigger(**(trigger or {"processingTime": STREAM_TRIGGER}))
        .start()
    )
    writer.keep(query)
    return query


def _store(batch: DataFrame, number: int, out: str, writer: WriterLock) -> None:
    if not writer.is_held():
        raise RuntimeError(f"{out}: another query writes to it now, as this one seemed to be dead")
    # Off in the session of a query: here there is no state whose partitions it would move.
    batch.sparkSession.conf.set("spark.sql.adaptive.enabled", "true")
    stored = store_records(batch, out)
    if any(stored):
        text = f"{stored.records} records, {stored.doubles} doubles, {stored.rejected} rejected"
        sys.stdout.write(f"batch {number}: {text}\n")
        sys.stdout.flush()


def _listener(url: str, token_file: Path | None) -> Any:
    """Return the listener that reports to the proxy. Raises ImportError without its file."""
    try:
        module = import_module("proxy.spark.quota_listener")  # if installed
    except ImportError:
        module = import_module("quota_listener")  # with --py-files
    token = token_file.read_text(encoding="utf-8").strip() if token_file else None
    return module.QuotaListener(url, token=token)


def _run(given: argparse.Namespace) -> None:
    spark = SparkSession.builder.appName("quota-proxy usage stream").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    if given.admin_url:
        spark.streams.addListener(_listener(given.admin_url, given.token_file))
    options = {
        **given.option,
        "kafka.bootstrap.servers": given.bootstrap_servers,
        "kafka.client.id": given.client_id,
    }
    trigger = {"availableNow": True} if given.once else {"processingTime": given.trigger}
    usage_query(spark, options, given.out.rstrip("/"), given.topic, trigger).awaitTermination()
    spark.stop()


def run_stream(arguments: Sequence[str] | None = None) -> int:
    """Run the query until it fails or is ended; return the exit code."""
    parser = argparse.ArgumentParser(
        description="Copy the usage topic to Parquet by day.",
        epilog="@FILE stands for the arguments in a file, one in each line.",
        fromfile_prefix_chars="@",
    )
    servers_help = "HOST:PORT,... of the proxy, or of the brokers"
    parser.add_argument("--bootstrap-servers", required=True, help=servers_help)
    out_help = "folder or URL for the Parquet files and the checkpoint"
    parser.add_argument("--out", required=True, help=out_help)
    parser.add_argument("--topic", default=USAGE_NAME)
    id_help = "the query's name, and client id for rules of the proxy"
    parser.add_argument("--client-id", default=USAGE_NAME, help=id_help)
    trigger_help = "time between two batches (default: %(default)s)"
    parser.add_argument("--trigger", default=STREAM_TRIGGER, help=trigger_help)
    once_help = "copy what is there now, and end"
    parser.add_argument("--once", action="store_true", help=once_help)
    option_help = "of the Kafka source, such as kafka.security.protocol=SASL_SSL; again for more"
    parser.add_argument(
        "--option", action=KeyValues, default={}, metavar="KEY=VALUE", help=option_help
    )
    url_help = "the proxy's admin address, for reports by its QuotaListener"
    parser.add_argument("--admin-url", help=url_help)
    parser.add_argument("--token-file", type=Path, help="the token for these reports")
    return run_program(_run, parser, arguments)


if __name__ == "__main__":
    sys.exit(run_stream())
