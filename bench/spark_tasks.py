"""Figure: 32 tasks of a Spark batch read at 1 MiB/s stay within 2 % of their bound.

Real broker, real Spark (`local[32]`, one partition for each task, `noop` sink), the proxy and
Kafka's clients as configured by default. The rate is read off what the proxy counts for the
query (requests are in it, which are small), while all tasks read: not at the start, where a client
may take more, and not at the end, when the first tasks are done. A task that fails fails the read,
since Spark tries none again in local mode.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from bench.lab import Proxy, open_lab, rule
from bench.processes import BenchError, Child
from bench.rates import per_second, rate_between
from bench.report import Row, Verdict
from bench.spark_read import PRODUCER_SETTINGS, fill, start_reader
from examples.devkit.broker import EmbeddedBroker

FIGURE = "spark tasks"
TOLERANCE = 0.02
CLIENT_ID = "bench-tasks"
TASKS = 32
BOUND = 1 << 20
FULL_BYTES, QUICK_BYTES = 60_000_000, 16_000_000
# Kafka's default for producers.
BATCH_BYTES = 16_384
SAMPLE_EVERY_S = 0.25
# Shares of the time from the first bytes to the last between which the rate is measured.
START_SHARE, END_SHARE = 0.3, 0.85
READ_TIMEOUT_S = 300.0


@dataclass(slots=True)
class Carried:
    """How many bytes the proxy had carried for the query at which time after the start."""

    times_s: list[float] = field(default_factory=lambda: [0.0])
    totals: list[float] = field(default_factory=lambda: [0.0])

    def increases(self) -> tuple[list[float], list[int]]:
        """Give when the total was seen to have grown, and by how much."""
        grown = [
            (time_s, int(after - before))
            for time_s, (before, after) in zip(self.times_s[1:], pairwise(self.totals), strict=True)
            if after > before
        ]
        return [time_s for time_s, _ in grown], [size for _, size in grown]


def measure(quick: bool) -> list[Row]:
    """Fill a topic, read it through the proxy and give the row."""
    total_bytes = QUICK_BYTES if quick else FULL_BYTES
    with open_lab() as lab:
        broker = lab.enter(EmbeddedBroker(lab.work_dir / "broker"))
        settings = {**PRODUCER_SETTINGS, "batch.size": BATCH_BYTES}
        fill(broker.bootstrap, total_bytes, TASKS, settings)
        host, _, port = broker.bootstrap.rpartition(":")
        proxy = lab.start_proxy((host, int(port)), [rule(CLIENT_ID, str(BOUND))], pinned=False)
        reader = start_reader(lab, TASKS)
        # Straight from the broker, to warm up.
        _read(reader, broker.bootstrap)
        with _watched(proxy) as carried:
            read_s = _read(reader, "{}:{}".format(*proxy.bootstrap))
    return [_row(total_bytes, read_s, carried)]


@contextmanager
def _watched(proxy: Proxy) -> Iterator[Carried]:
    """Sample what the proxy carries for the query until the end of the context."""
    carried, is_over = Carried(), threading.Event()
    started_s = time.monotonic()

    def watch() -> None:
        while not is_over.wait(SAMPLE_EVERY_S):
            total = proxy.metric("bytes_total", api="Fetch", client_id=CLIENT_ID)
            carried.times_s.append(time.monotonic() - started_s)
            carried.totals.append(total)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield carried
    finally:
        is_over.set()
        watcher.join()


def _read(reader: Child, bootstrap: str) -> float:
    """Let Spark read the topic; returns seconds. Raises BenchError when a task failed."""
    options = {"bootstrap.servers": bootstrap, "client.id": CLIENT_ID}
    reader.send_line(json.dumps(options))
    answer = reader.wait_line(lambda line: line.startswith("read "), READ_TIMEOUT_S)
    return float(answer.split()[1])


def _row(total_bytes: int, read_s: float, carried: Carried) -> Row:
    times, sizes = carried.increases()
    if len(times) < 2:
        raise BenchError("nothing went through the proxy")
    took_s = times[-1] - times[0]
    start_s, end_s = times[0] + START_SHARE * took_s, times[0] + END_SHARE * took_s
    rate = rate_between(times, sizes, start_s, end_s).interpolated
    error = rate / BOUND - 1
    went_through = sum(sizes) >= total_bytes
    measured = (
        f"{error:+.2%}; {sum(sizes) / total_bytes:.3f}x of the topic carried in {read_s:.1f} s"
    )
    if not went_through:
        measured += "; not all of it went through the proxy"
    return Row(
        FIGURE,
        f"{TASKS} tasks read {total_bytes / 1e6:.0f} MB at 1 MiB/s",
        f"within {TOLERANCE:.0%}, no task fails",
        measured,
        Verdict.of(abs(error) <= TOLERANCE and went_through),
        {
            "bytes_per_s": rate,
            "read_s": read_s,
            "carried_bytes": sum(sizes),
            "bytes_in_each_second": per_second(times, sizes),
        },
    )
