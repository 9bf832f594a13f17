"""Usage records as DataFrames: from a topic's messages to Parquet by day, each record once."""

from __future__ import annotations

from datetime import date
from typing import Any, NamedTuple

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it

RECORD_VERSION = 1
RECORD_SCHEMA = """
    schema_version INT, member STRING, epoch BIGINT, sequence BIGINT, start_ms BIGINT,
    end_ms BIGINT, listener STRING, user STRING, client_id STRING, hashed BOOLEAN, rule STRING,
    budget STRING, topic STRING, direction STRING, bytes BIGINT, requests BIGINT,
    connections BIGINT, held_seconds DOUBLE, would_be_seconds DOUBLE, sampled BOOLEAN,
    rates MAP<STRING, BIGINT>, peak DOUBLE
"""
REJECTED_SCHEMA = "topic STRING, partition INT, offset BIGINT, reason STRING, value BINARY"
RECORD_KEY = ("member", "epoch", "sequence")
"""A record is written twice at most under the same key, and then ends on the same day."""

RECORDS_FOLDER, REJECTED_FOLDER = "usage", "rejected"
"""Below the folder of the pipeline, each with a folder `day=YYYY-MM-DD` for each day in UTC."""

NEWER_VERSION = f"schema version newer than {RECORD_VERSION}"
NO_RECORD = "no usage record"
DAMAGED = "damaged: not JSON, or a field of another type"
IMPOSSIBLE = "a field is missing or has an impossible value"

_BETWEEN = StorageLevel.DISK_ONLY
"""Of messages that are gone through more than once: months of them fit no heap."""

_ROWS_OF_BLOCK = "spark.sql.inMemoryColumnarStorage.batchSize"
_FEW_ROWS = "500"
"""On their way to the disk Spark's JavaSerializer keeps up to 100 blocks of each task in memory: a
gigabyte, of 10,000 rows each, as Spark has it by default."""

_UNFINISHED = "_temporary"
"""Where Hadoop keeps what is written until all of it is there."""

_COUNTS = ("requests", "connections", "held_seconds", "would_be_seconds", "peak")
_DAY_MS = 86_400_000
_FIRST_DAY, _DAYS_AHEAD = date(2026, 1, 1), 366
"""Before this day there were no records, and clocks are at most so far ahead. Each day is a folder,
which takes tens of milliseconds to make: who writes to the topic may name any."""
_FIRST_MS = (_FIRST_DAY - date(1970, 1, 1)).days * _DAY_MS
_MOST = 2**53  # of a figure in one record: thousands of them can't exceed what a sum holds


class StoredCounts(NamedTuple):
    """What became of a batch of messages."""

    records: int
    doubles: int
    """Records that were there before, or twice in the batch."""
    rejected: int


def utc_day(milliseconds: str) -> Column:
    """Return the day in UTC of milliseconds since 1970, whatever the session's time zone."""
    return F.expr(f"date_add(date'1970-01-01', cast(floor(({milliseconds}) / {_DAY_MS}) as int))")


def _is_possible(milliseconds: str) -> str:
    """Return the condition that a record may have been written at a time."""
    latest = f"unix_millis(current_timestamp()) + {_DAYS_AHEAD * _DAY_MS}"
    return f"{milliseconds} between {_FIRST_MS} and {latest}"


def parse_messages(messages: DataFrame) -> DataFrame:
    """Return each message of Spark's Kafka source with its `record` and the `reason` against it.

    `reason` is null for a sound record, and is one of a few texts otherwise, with the `value`.
    """
    text = messages.withColumn("text", F.col("value").cast("string")).withColumn(
        "json",
        F.from_json(
            "text",
            f"{RECORD_SCHEMA}, corrupt STRING",
            {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "corrupt"},
        ),
    )
    version = F.expr("try_cast(get_json_object(text, '$.schema_version') as int)")
    possible = F.expr(f"""
        json.member is not null and json.epoch between 0 and {_MOST}
        and json.sequence between 0 and {_MOST} and json.start_ms between 0 and {_MOST}
        and {_is_possible("json.end_ms")}
        and json.listener is not null and json.direction in ('read', 'write')
        and json.bytes between 0 and {_MOST}
        and {" and ".join(f"coalesce(json.{name}, 0) between 0 and {_MOST}" for name in _COUNTS)}
        and forall(coalesce(map_entries(json.rates), array()),
                   each -> each.key rlike '^-?[0-9]{{1,4}}$'
                           and each.value between 0 and {_MOST})
    """)
    reason = (
        F.when(F.col("value").isNull(), NO_RECORD)
        .when(version > RECORD_VERSION, NEWER_VERSION)
        .when(F.col("json.corrupt").isNotNull(), DAMAGED)
        .when(version.isNull() | (version < 1), NO_RECORD)
        .when(possible, None)
        .otherwise(IMPOSSIBLE)
    )
    return text.select(
        *("topic", "partition", "offset", "timestamp"),
        F.when(reason.isNotNull(), F.col("value")).alias("value"),
        reason.alias("reason"),
        F.col("json").dropFields("corrupt").alias("record"),
    )


def valid_records(messages: DataFrame) -> DataFrame:
    """Return the sound records of judged messages, with their `day` and when they were written."""
    written = F.expr("unix_millis(timestamp)").alias("written_ms")
    found = messages.where("reason is null").select("record.*", written)
    found = found.withColumn("client_id", F.coalesce("client_id", F.lit("")))
    return found.fillna(0, list(_COUNTS)).withColumn("day", utc_day("end_ms"))


def store_records(messages: DataFrame, folder: str) -> StoredCounts:
    """Append the messages of a topic to the Parquet files below a folder, each record once.

    What is there already is left out, so a batch may be stored again after any crash, from another
    checkpoint or with none. What is no record goes to `rejected`, with where it stands.
    """
    settings = messages.sparkSession.conf
    rows_before = settings.get(_ROWS_OF_BLOCK)
    settings.set(_ROWS_OF_BLOCK, _FEW_ROWS)
    found = parse_messages(messages).persist(_BETWEEN)
    try:
        records, rejected = valid_records(found), found.where("reason is not null")
        written_ms = "unix_millis(timestamp)"
        told_ms = f"if({_is_possible(written_ms)}, {written_ms}, {_FIRST_MS})"
        rejected = rejected.withColumn("day", utc_day(told_ms))
        rejected = rejected.drop("record", "timestamp")
        seen = records.count()
        new = _append(records, RECORD_KEY, folder, RECORDS_FOLDER)
        refused = _append(rejected, ("topic", "partition", "offset"), folder, REJECTED_FOLDER)
        return StoredCounts(new, seen - new, refused)
    finally:
        found.unpersist()
        settings.set(_ROWS_OF_BLOCK, rows_before)


def _append(frame: DataFrame, key: tuple[str, ...], folder: str, name: str) -> int:
    """Write the rows whose key is not there on their day; return how many."""
    days = [row["day"] for row in frame.select("day").distinct().collect()]
    if not days:
        return 0
    frame = frame.dropDuplicates([*key])
    earlier = read_days(frame.sparkSession, folder, name, days)
    if earlier is not None:
        frame = frame.join(earlier.select(*key, "day"), [*key, "day"], "left_anti")
    # A file for each day and batch. Counted on the way: afterwards the join finds all of them.
    frame = frame.repartition("day").persist(_BETWEEN)
    try:
        count: int = frame.count()
        if count:
            # Of a driver that died while it wrote: Hadoop's FileOutputCommitter would take it for
            # the next one's, which writes these records anew.
            path, files = hadoop_path(frame.sparkSession, f"{folder}/{name}/{_UNFINISHED}")
            files.delete(path, True)
            frame.write.mode("append").partitionBy("day").parquet(f"{folder}/{name}")
        return count
    finally:
        frame.unpersist()


def hadoop_path(spark: SparkSession, name: str) -> tuple[Any, Any]:
    """Return a path of Hadoop's and its file system; pyspark has no public names for them."""
    path = spark._jvm.org.apache.hadoop.fs.Path(name)  # noqa: SLF001
    return path, path.getFileSystem(spark._jsc.hadoopConfiguration())  # noqa: SLF001


def stored_days(spark: SparkSession, folder: str, name: str) -> list[date]:
    """Return the days that have a folder, in order; [] where there is none."""
    path, files = hadoop_path(spark, f"{folder}/{name}/day=*")
    found = files.globStatus(path) or ()
    return sorted(date.fromisoformat(each.getPath().getName()[len("day=") :]) for each in found)


def read_days(spark: SparkSession, folder: str, name: str, days: list[date]) -> DataFrame | None:
    """Return what is stored of these days with their `day`, or None if nothing is."""
    there = set(stored_days(spark, folder, name))
    paths = [f"{folder}/{name}/day={day}" for day in sorted(there.intersection(days))]
    if not paths:
        return None
    schema = f"{RECORD_SCHEMA}, written_ms BIGINT" if name == RECORDS_FOLDER else REJECTED_SCHEMA
    reader = spark.read.schema(f"{schema}, day DATE").option("basePath", f"{folder}/{name}")
    frame: DataFrame = reader.parquet(*paths)
    return frame
