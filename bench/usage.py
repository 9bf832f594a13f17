"""Figure: a report of usage takes as long for each record of a month as of an hour.

Spark makes the records itself, of 1,000 clients, and stores them as the stream does; then the
report is made as `quota-proxy usage report --parquet` makes it, in one process of 1 GiB heap.
"""

import re
import time
from datetime import date, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from pyspark.sql import SparkSession
from pyspark.sql.functions import expr

from bench.report import Row, Verdict
from proxy.onboarding.local_usage import LOCAL_SETTINGS
from proxy.spark.usage.record_frames import RECORDS_FOLDER, utc_day
from proxy.spark.usage.usage_report import Span, write_report

FIGURE = "usage"
FULL, QUICK = (1_000_000, 10_000_000, 100_000_000), (300_000, 1_000_000)
"""How many records; what the first takes for each is what the others are compared with."""
RECORDS_PER_MINUTE, CLIENTS, TOPICS, MEMBERS = 2_000, 1_000, 50, 3
RATES_PER_RECORD, RECORDS_PER_FILE = 6, 500_000
MOST_RATIO = 1.3
MOST_RSS_GIB = 2.0
FIRST = date(2026, 1, 1)

_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def measure(quick: bool) -> list[Row]:
    """Measure reports of more and more records."""
    spark = SparkSession.builder.config(map=LOCAL_SETTINGS).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    rows, per_record = [], list[float]()
    try:
        _timed(spark, QUICK[0])  # all code is compiled by then
        for count in QUICK if quick else FULL:
            elapsed_s = _timed(spark, count)
            per_record.append(elapsed_s / count)
            ratio = per_record[-1] / per_record[0]
            text = f"{elapsed_s:.1f} s, {1e6 * per_record[-1]:.2f} µs for each, {ratio:.2f} times"
            what = f"report of {count / 1e6:g} million records"
            target = f"at most {MOST_RATIO:g} times the time for each of the first"
            rows.append(Row(FIGURE, what, target, text, Verdict.of(ratio <= MOST_RATIO)))
        pid = spark._jvm.java.lang.ProcessHandle.current().pid()
        (peak_kib,) = _PEAK.findall(Path(f"/proc/{pid}/status").read_text())
        gib = int(peak_kib) / 2**20
        target = f"less than {MOST_RSS_GIB:g} GiB"
        met = Verdict.of(gib < MOST_RSS_GIB)
        rows.append(Row(FIGURE, "peak memory of Spark's process", target, f"{gib:.2f} GiB", met))
    finally:
        spark.stop()
    return rows


def _timed(spark: SparkSession, count: int) -> float:
    """Store so many records; return how long their report takes."""
    with TemporaryDirectory(prefix="quota-proxy-bench-") as name:
        folder, out = f"{name}/parquet", Path(name, "out")
        out.mkdir()
        days = _store(spark, count, folder)
        started_s = time.monotonic()
        figures, _ = write_report(spark, folder, Span(FIRST, FIRST + timedelta(days)), out)
        elapsed_s = time.monotonic() - started_s
    assert sum(each.requests for each in figures.teams) == count
    return elapsed_s


def _store(spark: SparkSession, count: int, folder: str) -> int:
    """Write the records as Parquet by day; return on which day from the first they end."""
    start_ms = (FIRST - date(1970, 1, 1)).days * 86_400_000
    records = (
        spark.range(0, count, 1, max(count // RECORDS_PER_FILE, 1))
        .withColumn("minute", expr(f"id div {RECORDS_PER_MINUTE}"))
        .withColumn("end_ms", expr(f"{start_ms} + (minute + 1) * 60000"))
        .withColumn("client", expr(f"id % {CLIENTS}"))
        .selectExpr(
            "1 as schema_version",
            f"concat('host/', id % {MEMBERS}) as member",
            f"{start_ms}L as epoch",
            f"id div {MEMBERS} as sequence",
            "end_ms - 60000 as start_ms",
            "end_ms",
            "'default' as listener",
            "if(client % 2 = 0, concat('user-', client % 20), null) as user",
            "concat('client-', client) as client_id",
            "false as hashed",
            "if(client % 10 = 0, concat('client-id=client-', client), null) as rule",
            "cast(null as string) as budget",
            f"concat('topic-', client % {TOPICS}) as topic",
            "if(id div 1000 % 2 = 0, 'read', 'write') as direction",
            "1000000 + hash(id) % 1000000L as bytes",
            "1L as requests",
            "0L as connections",
            "if(client % 10 = 0, 0.5D, 0D) as held_seconds",
            "0D as would_be_seconds",
            "client % 2 = 0 as sampled",
            f"map(string(280 + hash(id) % 20), {RATES_PER_RECORD - 2}L, '310', 2L) as rates",
            "4e6D as peak",
            "end_ms as written_ms",
        )
    )
    daily = records.withColumn("day", utc_day("end_ms"))
    daily.write.partitionBy("day").parquet(f"{folder}/{RECORDS_FOLDER}")
    return (count // RECORDS_PER_MINUTE + 1) // (24 * 60)
