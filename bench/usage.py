"""Figure: a report of usage takes as long for each record of a month as of an hour.

Spark makes the records itself, of 1,000 clients, and stores them as the stream does; then the
report is made as `quota-proxy usage report --parquet` makes it, in one process of 1 GiB heap. The
same from messages as the topic has them, as `quota-proxy usage report` makes it.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import date, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr

from bench.report import Row, Verdict
from proxy.onboarding.local_usage import LOCAL_SETTINGS
from proxy.spark.usage.record_frames import RECORDS_FOLDER, store_records, utc_day
from proxy.spark.usage.teams import parse_teams
from proxy.spark.usage.usage_report import DateRange, write_report

FIGURE = "usage"
FEW, FULL, QUICK = 1_000, (1_000_000, 10_000_000, 100_000_000), (300_000, 1_000_000)
"""How many records. What a report of the few takes is the fixed part; what the first of the others
takes beyond that, for each record, is what the rest is compared with."""
MESSAGES = {1_000_000: (250_000, 1_000_000, 4_000_000), 300_000: (100_000, 300_000)}
"""Likewise by the first of the others, of messages as the topic has them."""
RECORDS_PER_MINUTE, CLIENTS, TOPICS, MEMBERS = 2_000, 1_000, 50, 3
RATES_PER_RECORD, RECORDS_PER_FILE = 6, 500_000
REPEATED_UP_TO, REPEATS = 1_000_000, 3
"""Small ones are measured more than once, and the least counts: the fixed part is as large."""
MOST_RATIO = 1.3
MOST_RSS_GIB = 2.0
FIRST = date(2026, 1, 1)

TEAMS = parse_teams(
    {"teams": [{"name": f"team-{n}", "users": [f"user-{2 * n}"]} for n in range(10)]}, "bench"
)

_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


class Cost(NamedTuple):
    """What something took; CPU of Spark's process, which other processes do not add to."""

    wall_s: float
    cpu_s: float


def measure(quick: bool) -> Iterator[Row]:
    """Measure reports of more and more records, and how these become Parquet."""
    spark = SparkSession.builder.config(map=LOCAL_SETTINGS).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    counts = QUICK if quick else FULL
    jvm = spark._jvm  # noqa: SLF001 - pyspark has no public name for it
    spark_process = psutil.Process(jvm.java.lang.ProcessHandle.current().pid())
    try:
        for made in (_report_cost, _copy_cost):  # all code is compiled by then
            made(spark, spark_process, QUICK[0])
        yield from _linear("report", _report_cost, counts, spark, spark_process)
        messages = MESSAGES[counts[0]]
        yield from _linear("report from the topic", _copy_cost, messages, spark, spark_process)
        (peak_kib,) = _PEAK.findall(Path(f"/proc/{spark_process.pid}/status").read_text())
        gib = int(peak_kib) / 2**20
        target = f"less than {MOST_RSS_GIB:g} GiB"
        met = Verdict.of(gib < MOST_RSS_GIB)
        yield Row(FIGURE, "peak memory of Spark's process", target, f"{gib:.2f} GiB", met)
    finally:
        spark.stop()


def _linear(
    what: str,
    cost_of: Callable[[SparkSession, psutil.Process, int], Cost],
    counts: Iterable[int],
    spark: SparkSession,
    spark_process: psutil.Process,
) -> Iterator[Row]:
    """Yield a row for each number of records, beside what a few of them take."""

    def least_cost(count: int) -> Cost:
        repeats = REPEATS if count <= REPEATED_UP_TO else 1
        every = [cost_of(spark, spark_process, count) for _ in range(repeats)]
        return Cost(*(min(column) for column in zip(*every, strict=True)))

    fixed, first = least_cost(FEW), 0.0
    for count in counts:
        cost = least_cost(count)
        each = Cost(*(1e6 * (now - then) / count for now, then in zip(cost, fixed, strict=True)))
        first = first or each.cpu_s
        ratio = each.cpu_s / first
        text = (
            f"{cost.wall_s:.1f} s, {fixed.wall_s:.1f} s of them for {FEW}; {each.wall_s:.2f} s and "
            f"{each.cpu_s:.2f} s of CPU for each million more, {ratio:.2f} times"
        )
        target = f"at most {MOST_RATIO:g} times the CPU for each of the first"
        name = f"{what} of {count / 1e6:g} million records"
        yield Row(FIGURE, name, target, text, Verdict.of(ratio <= MOST_RATIO))


def _cost(spark_process: psutil.Process, run: Callable[[], object]) -> Cost:
    def cpu_s() -> float:
        times = spark_process.cpu_times()
        return times.user + times.system

    started_s, before_s = time.monotonic(), cpu_s()
    run()
    return Cost(time.monotonic() - started_s, cpu_s() - before_s)


def _report_cost(spark: SparkSession, spark_process: psutil.Process, count: int) -> Cost:
    """Store so many records as the stream does; return what their report takes."""
    with TemporaryDirectory(prefix="quota-proxy-bench-") as name:
        folder, out = f"{name}/parquet", Path(name, "out")
        out.mkdir()
        daily = _records(spark, count).withColumn("day", utc_day("end_ms"))
        daily.write.partitionBy("day").parquet(f"{folder}/{RECORDS_FOLDER}")
        figures = []

        def report() -> None:
            figures.append(write_report(spark, folder, _span(count), out, TEAMS)[0])

        cost = _cost(spark_process, report)
    assert sum(each.requests for each in figures[0].teams) == count
    return cost


def _copy_cost(spark: SparkSession, spark_process: psutil.Process, count: int) -> Cost:
    """Make so many messages as the topic has them; return what storing and reporting takes."""
    with TemporaryDirectory(prefix="quota-proxy-bench-") as name:
        folder, out = f"{name}/parquet", Path(name, "out")
        out.mkdir()
        _records(spark, count).selectExpr(
            "encode(to_json(struct(*), map('ignoreNullFields', 'false')), 'utf-8') as value",
            "'usage' as topic",
            "0 as partition",
            "sequence as offset",
            "timestamp_millis(end_ms) as timestamp",
        ).write.parquet(f"{name}/topic")

        def report() -> None:
            assert store_records(spark.read.parquet(f"{name}/topic"), folder)[:2] == (count, 0)
            write_report(spark, folder, _span(count), out, TEAMS)

        return _cost(spark_process, report)


def _span(count: int) -> DateRange:
    return DateRange(FIRST, FIRST + timedelta((count // RECORDS_PER_MINUTE + 1) // (24 * 60)))


def _records(spark: SparkSession, count: int) -> DataFrame:
    start_ms = (FIRST - date(1970, 1, 1)).days * 86_400_000
    return (
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
