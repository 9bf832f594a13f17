"""Figure: wall time of Spark reading through the proxy against reading directly.

Real broker, real Spark (`local[2]`, batch read, `noop` sink), one session, quota sensors on and
not violated. The ways take turns within each round, and the figure is the median of the rounds'
ratios. HAProxy beside it shows what any proxy costs there. No process is tied to a core: Spark,
broker and what is between share the machine as they would.

With Kafka's defaults Spark asks for 1 MB at a time and, around each poll, for offsets: some five
round trips per megabyte. One variant fetches more at once, which is what one would set where
throughput counts. Others are streaming queries: read through the proxy they are followed, and
their listener reports to it; directly there is no listener.
"""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench import topics
from bench.behind_haproxy import DIRECT, PROXY, start_broker, ways_to
from bench.lab import Lab, Proxy, open_lab, unviolated_rules
from bench.processes import Child, python
from bench.rates import GIGABYTE
from bench.report import Row, Verdict
from examples.devkit.jars import connector_jars

FIGURE = "spark"
TARGET_RATIO = 1.02
# A response of many small records should come sooner by the proxy.
SMALL_TARGET_RATIO = 1.0
TOPIC = "bench-spark"
SMALL_TOPIC = "bench-spark-small"
QUERY = "bench-followed"
PARTITIONS = 3
TASKS = 2
VALUE_BYTES = 1000
SMALL_VALUE_BYTES = 100
FULL_BYTES, FULL_SMALL_BYTES = 1_000_000_000, 300_000_000
LARGE_FETCHES = {"max.partition.fetch.bytes": str(8 << 20), "max.poll.records": "5000"}


@dataclass(frozen=True, slots=True)
class Variant:
    """How Spark reads: which topic, with which options, and whether as a query that is followed."""

    title: str
    options: Mapping[str, str] = field(default_factory=dict)
    topic: str = TOPIC
    is_followed: bool = False
    target_ratio: float = TARGET_RATIO


VARIANTS = (
    Variant("Kafka's defaults"),
    Variant("Kafka's defaults, followed with listener", is_followed=True),
    Variant("8 MiB fetches", LARGE_FETCHES),
    Variant("100 byte records", topic=SMALL_TOPIC, target_ratio=SMALL_TARGET_RATIO),
    Variant(
        "100 byte records, followed with listener",
        topic=SMALL_TOPIC,
        is_followed=True,
        target_ratio=SMALL_TARGET_RATIO,
    ),
)
QUICK_BYTES = 20_000_000
FULL_RUNS = 5
QUICK_RUNS = 1
# JVM and page cache are warm after this many runs of each kind.
WARM_UP_RUNS = 1
SESSION_TIMEOUT_S = 90.0
READ_TIMEOUT_S = 180.0
PRODUCER_SETTINGS = {
    "linger.ms": 50,
    "batch.size": 500_000,
    "queue.buffering.max.messages": 200_000,
    "queue.buffering.max.kbytes": 262_144,
    "acks": 1,
}


def measure(quick: bool) -> list[Row]:
    """Fill the topics, read them in turn through both ways and give the rows."""
    runs = QUICK_RUNS if quick else FULL_RUNS
    bytes_of = {
        TOPIC: QUICK_BYTES if quick else FULL_BYTES,
        SMALL_TOPIC: QUICK_BYTES if quick else FULL_SMALL_BYTES,
    }
    with open_lab() as lab:
        broker = start_broker(lab, {})
        for topic, value_bytes in ((TOPIC, VALUE_BYTES), (SMALL_TOPIC, SMALL_VALUE_BYTES)):
            total_bytes = bytes_of[topic]
            fill(
                broker.bootstrap,
                total_bytes,
                PARTITIONS,
                PRODUCER_SETTINGS,
                topic=topic,
                value_bytes=value_bytes,
            )
        proxy = lab.start_proxy(
            broker.address, unviolated_rules(), queries=[{"name": QUERY}], pinned=False
        )
        ways = ways_to(lab, broker, proxy)
        reader = start_reader(lab, TASKS)
        return [
            _measure(variant, bytes_of[variant.topic], runs, ways, proxy, reader)
            for variant in VARIANTS
        ]


def _measure(
    variant: Variant,
    total_bytes: int,
    runs: int,
    ways: Mapping[str, str],
    proxy: Proxy,
    reader: Child,
) -> Row:
    lines = {}
    for way, bootstrap in ways.items():
        lines[way] = {"bootstrap.servers": bootstrap, "topic": variant.topic, **variant.options}
        if variant.is_followed:
            lines[way] |= {"query": QUERY, "client.id": QUERY}
    if variant.is_followed:
        lines[PROXY]["report_to"] = "http://{}:{}".format(*proxy.admin)
    for _ in range(WARM_UP_RUNS):
        for line in lines.values():
            _read(reader, line)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    carried_before, reports_before = _passed(proxy)
    for _ in range(runs):
        for way, line in lines.items():
            seconds[way].append(_read(reader, line))
    carried, reports = _passed(proxy)
    problems = []
    if carried - carried_before < total_bytes * runs:
        problems.append("not all of it went through the proxy")
    if variant.is_followed and reports - reports_before < runs:
        problems.append("not all batches were reported")
    what = f"reads {total_bytes / GIGABYTE:g} GB, {variant.title}, medians of {runs}"
    return _row(what, seconds, variant.target_ratio, problems)


def _passed(proxy: Proxy) -> tuple[float, float]:
    """Return how many bytes the proxy has carried, and how many reports it has accepted."""
    reports = proxy.metric("spark_reports_total", result="accepted")
    return proxy.metric("bytes_total", api="Fetch"), reports


def fill(
    bootstrap: str,
    total_bytes: int,
    partitions: int,
    settings: Mapping[str, int],
    *,
    topic: str = TOPIC,
    value_bytes: int = VALUE_BYTES,
) -> None:
    """Create the topic and write records of random bytes until it holds `total_bytes`."""
    topics.create(bootstrap, topic, partitions)
    count = total_bytes // value_bytes
    topics.fill(bootstrap, topic, partitions, os.urandom(value_bytes), count, settings)


def start_reader(lab: Lab, tasks: int) -> Child:
    """Start a Spark driver that runs so many tasks at the same time."""
    jars = ",".join(str(jar) for jar in connector_jars())
    reader = lab.start_helper(
        "spark",
        python("bench.spark_reader", f"--jars={jars}", f"--topic={TOPIC}", f"--tasks={tasks}"),
    )
    reader.wait_line(lambda line: line == "ready", SESSION_TIMEOUT_S)
    return reader


def _read(reader: Child, line: Mapping[str, str]) -> float:
    reader.send_line(json.dumps(line))
    answer = reader.wait_line(lambda line: line.startswith("read "), READ_TIMEOUT_S)
    return float(answer.split()[1])


def _row(
    what: str, seconds: dict[str, list[float]], target_ratio: float, problems: Sequence[str]
) -> Row:
    """Compare with direct; a run in which Spark found a way around the proxy does not count."""
    direct = seconds[DIRECT]
    ratios = {
        way: statistics.median(each / base for each, base in zip(taken, direct, strict=True))
        for way, taken in seconds.items()
    }
    others = ", ".join(f"{way} {ratios[way]:.3f}x" for way in ratios if way not in (DIRECT, PROXY))
    medians = ", ".join(f"{way} {statistics.median(taken):.2f}" for way, taken in seconds.items())
    told = [f"{ratios[PROXY]:.3f}x", *([others] if others else []), f"{medians} s", *problems]
    return Row(
        FIGURE,
        what,
        f"at most {target_ratio:.2f}x direct",
        "; ".join(told),
        Verdict.of(ratios[PROXY] <= target_ratio and not problems),
        {"seconds": seconds},
    )
