"""Figure: wall time of Spark reading 1 GB through the proxy against reading it directly.

Real broker, real Spark (`local[2]`, batch read, `noop` sink), one session, quota sensors on and
not violated. Direct and proxied runs take turns, and the figure is the ratio of their medians. No
process is tied to a core: Spark, broker and proxy share the machine as they would.

With Kafka's defaults Spark asks for 1 MB at a time and, around each poll, for offsets: some five
round trips per megabyte. The second variant fetches more at once, which is what one would set
where throughput counts.
"""

import json
import os
import statistics
from collections.abc import Mapping

from bench import topics
from bench.lab import Lab, open_lab, unviolated_rules
from bench.processes import Child, python
from bench.rates import GIGABYTE
from bench.report import Row, Verdict
from proxy.devkit.broker import EmbeddedBroker
from proxy.devkit.jars import connector_jars

FIGURE = "spark"
TARGET_RATIO = 1.02
TOPIC = "bench-spark"
PARTITIONS = 3
TASKS = 2
VALUE_BYTES = 1000
FULL_BYTES = 1_000_000_000
VARIANTS: dict[str, dict[str, str]] = {
    "Kafka's defaults": {},
    "8 MiB fetches": {"max.partition.fetch.bytes": str(8 << 20), "max.poll.records": "5000"},
}
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
    """Fill a topic, read it in turn through both ways and give the rows."""
    total_bytes, runs = (QUICK_BYTES, QUICK_RUNS) if quick else (FULL_BYTES, FULL_RUNS)
    with open_lab() as lab:
        broker = lab.enter(EmbeddedBroker(lab.work_dir / "broker"))
        fill(broker.bootstrap, total_bytes, PARTITIONS, PRODUCER_SETTINGS)
        host, _, port = broker.bootstrap.rpartition(":")
        proxy = lab.start_proxy((host, int(port)), unviolated_rules(), pinned=False)
        ways = {"direct": broker.bootstrap, "proxy": "{}:{}".format(*proxy.bootstrap)}
        reader = start_reader(lab, TASKS)
        rows = []
        for title, options in VARIANTS.items():
            for _ in range(WARM_UP_RUNS):
                for bootstrap in ways.values():
                    _read(reader, bootstrap, options)
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            before = proxy.metric("bytes_total", api="Fetch")
            for _ in range(runs):
                for way, bootstrap in ways.items():
                    seconds[way].append(_read(reader, bootstrap, options))
            carried = proxy.metric("bytes_total", api="Fetch") - before
            what = f"reads {total_bytes / GIGABYTE:g} GB, {title}, medians of {runs}"
            rows.append(_row(what, seconds, carried >= total_bytes * runs))
    return rows


def fill(bootstrap: str, total_bytes: int, partitions: int, settings: Mapping[str, int]) -> None:
    """Create the topic and write records of random bytes until it holds `total_bytes`."""
    topics.create(bootstrap, TOPIC, partitions)
    count = total_bytes // VALUE_BYTES
    topics.fill(bootstrap, TOPIC, partitions, os.urandom(VALUE_BYTES), count, settings)


def start_reader(lab: Lab, tasks: int) -> Child:
    """Start a Spark driver that runs so many tasks at the same time."""
    jars = ",".join(str(jar) for jar in connector_jars())
    reader = lab.start_helper(
        "spark",
        python("bench.spark_reader", f"--jars={jars}", f"--topic={TOPIC}", f"--tasks={tasks}"),
    )
    reader.wait_line(lambda line: line == "ready", SESSION_TIMEOUT_S)
    return reader


def _read(reader: Child, bootstrap: str, options: dict[str, str]) -> float:
    reader.send_line(json.dumps({"bootstrap.servers": bootstrap, **options}))
    answer = reader.wait_line(lambda line: line.startswith("read "), READ_TIMEOUT_S)
    return float(answer.split()[1])


def _row(what: str, seconds: dict[str, list[float]], went_through: bool) -> Row:
    """Compare the medians; a run in which Spark found a way around the proxy does not count."""
    direct_s = statistics.median(seconds["direct"])
    proxy_s = statistics.median(seconds["proxy"])
    ratio = proxy_s / direct_s
    measured = f"{ratio:.3f}x ({proxy_s:.2f} s, direct {direct_s:.2f} s)"
    if not went_through:
        measured += "; not all of it went through the proxy"
    return Row(
        FIGURE,
        what,
        f"at most {TARGET_RATIO:.2f}x direct",
        measured,
        Verdict.of(ratio <= TARGET_RATIO and went_through),
        {"seconds": seconds},
    )
