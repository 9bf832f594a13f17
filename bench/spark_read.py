"""Figure: wall time of Spark reading 1 GB through the proxy against reading it directly.

Real broker, real Spark (`local[2]`, batch read, `noop` sink), one session, quota sensors on and
not violated. Direct and proxied runs take turns, and the figure is the ratio of their medians. No
process is tied to a core: Spark, broker and proxy share the machine as they would.

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
from bench.lab import Lab, Proxy, open_lab, unviolated_rules
from bench.processes import Child, python
from bench.rates import GIGABYTE
from bench.report import Row, Verdict
from proxy.devkit.broker import EmbeddedBroker
from proxy.devkit.jars import connector_jars

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
FULL_BYTES = 1_000_000_000
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
    total_bytes, runs = (QUICK_BYTES, QUICK_RUNS) if quick else (FULL_BYTES, FULL_RUNS)
    with open_lab() as lab:
        broker = lab.enter(EmbeddedBroker(lab.work_dir / "broker"))
        fill(broker.bootstrap, total_bytes, PARTITIONS, PRODUCER_SETTINGS)
        fill(
            broker.bootstrap,
            total_bytes,
            PARTITIONS,
            PRODUCER_SETTINGS,
            topic=SMALL_TOPIC,
            value_bytes=SMALL_VALUE_BYTES,
        )
        host, _, port = broker.bootstrap.rpartition(":")
        proxy = lab.start_proxy(
            (host, int(port)), unviolated_rules(), queries=[{"name": QUERY}], pinned=False
        )
        reader = start_reader(lab, TASKS)
        return [
            _measure(variant, total_bytes, runs, broker.bootstrap, proxy, reader)
            for variant in VARIANTS
        ]


def _measure(
    variant: Variant, total_bytes: int, runs: int, direct: str, proxy: Proxy, reader: Child
) -> Row:
    ways = {"direct": direct, "proxy": "{}:{}".format(*proxy.bootstrap)}
    lines = {}
    for way, bootstrap in ways.items():
        lines[way] = {"bootstrap.servers": bootstrap, "topic": variant.topic, **variant.options}
        if variant.is_followed:
            lines[way] |= {"query": QUERY, "client.id": QUERY}
    if variant.is_followed:
        lines["proxy"]["report_to"] = "http://{}:{}".format(*proxy.admin)
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
    """Compare the medians; a run in which Spark found a way around the proxy does not count."""
    direct_s = statistics.median(seconds["direct"])
    proxy_s = statistics.median(seconds["proxy"])
    ratio = proxy_s / direct_s
    return Row(
        FIGURE,
        what,
        f"at most {target_ratio:.2f}x direct",
        "; ".join([f"{ratio:.3f}x ({proxy_s:.2f} s, direct {direct_s:.2f} s)", *problems]),
        Verdict.of(ratio <= target_ratio and not problems),
        {"seconds": seconds},
    )
