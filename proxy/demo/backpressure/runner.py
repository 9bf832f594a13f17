"""Runs the demo of backpressure from the first step to the verdict."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kafka import KafkaAdminClient
from rich.console import Console

from proxy.demo.backpressure.figures import TRIGGER_S, Sample, judge
from proxy.demo.backpressure.plot import draw
from proxy.demo.children import Child
from proxy.demo.parts import Addresses, await_proxy, start_proxy, write_config
from proxy.demo.runner import fetch_jars
from proxy.demo.screen import Screen
from proxy.demo.verdict import (
    Batch,
    Claim,
    Phase,
    Timing,
    batches_of,
    judge_rows,
    lag_of,
    progress,
    rows_out_of,
    summarise,
)
from proxy.devkit.broker import EmbeddedBroker
from proxy.devkit.jars import connector_jars
from proxy.devkit.signals import stop_signals_interrupt

EXAMPLE = "demo-backpressure.yaml"
TOPIC = "events"
PARTITIONS = 3
FREE, PRESSED = "without", "with"
"""Query names and client ids; the second has an adaptive rule in the example."""

RATE = 1000.0
"""Records per second that are written."""
ROW_MS, SLOW_ROW_MS = 1.0, 4.0
"""Work per record; each partition is a task of its own."""

START_TIMEOUT_S = 120.0
DRAIN_TIMEOUT_S = 150.0
INTERVAL_S = 1.0
EXIT_DONE, EXIT_FAILED = 0, 1


FULL = Timing(fast_s=36.0, slow_s=40.0, again_s=28.0)
BRIEF = Timing(fast_s=8.0, slow_s=10.0, again_s=6.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the run gave."""

    batches: dict[str, list[Batch]]
    samples: list[Sample]
    slow: Phase
    rows_in: int
    rows_out: dict[str, tuple[int, int]]
    """By query: rows, and different ones among them."""


def run(out_dir: Path, timing: Timing) -> int:
    """Run the demo; return 0 when every claim holds. Raises `DevkitError`."""
    started_s = time.monotonic()
    screen = Screen(Console())
    out_dir.mkdir(parents=True, exist_ok=True)
    with stop_signals_interrupt():
        fetch_jars(screen)
        with tempfile.TemporaryDirectory(
            prefix="quota-proxy-demo-", ignore_cleanup_errors=True
        ) as work_dir:
            outcome = _measure(screen, timing, Path(work_dir), out_dir)
        picture = out_dir / "backpressure.png"
        draw(dict(outcome.batches), outcome.samples, outcome.slow, picture)
    claims = _claims(outcome)
    summarise(screen.console, claims)
    screen.step(f"Plot: {picture}")
    screen.step(f"Configuration and logs: {out_dir}")
    screen.step(f"Took {time.monotonic() - started_s:.0f} s.")
    return EXIT_DONE if all(claim.holds for claim in claims) else EXIT_FAILED


def _measure(screen: Screen, timing: Timing, work_dir: Path, out_dir: Path) -> Outcome:
    screen.step("Kafka broker starts")
    with EmbeddedBroker(work_dir / "broker") as broker:
        _make_topics(broker.bootstrap)
        config = out_dir / EXAMPLE
        write_config(broker.bootstrap, config, EXAMPLE)
        screen.step(f"Proxy starts with {config}")
        with start_proxy(config, out_dir) as proxy:
            addresses = await_proxy(proxy)
            screen.step(f"PySpark queries {FREE!r} and {PRESSED!r} start, one trigger in 2 s")
            with _start_queries(addresses, work_dir, out_dir) as query:
                query.wait_for(lambda: query.objects() or None, "started", START_TIMEOUT_S)
                screen.step(f"{RATE:,.0f} records a second for {timing.total_s:.0f} s")
                with _start_feed(broker.bootstrap, timing, out_dir) as feed:
                    return _watch(screen, timing, work_dir, addresses.admin_url, query, feed)


def _make_topics(bootstrap: str) -> None:
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    names = (TOPIC, *(f"{query}-processed" for query in (FREE, PRESSED)))
    try:
        form = {"num_partitions": PARTITIONS, "replication_factor": 1}
        admin.create_topics(dict.fromkeys(names, form), wait_for_metadata=True)
    finally:
        admin.close()


def _start_queries(addresses: Addresses, work_dir: Path, out_dir: Path) -> Child:
    arguments = ["--bootstrap", addresses.bootstrap, "--proxy", addresses.admin_url]
    arguments += ["--topic", TOPIC]
    arguments += ["--name", FREE, "--name", PRESSED, "--trigger", f"{TRIGGER_S:g} seconds"]
    arguments += ["--row-ms", str(ROW_MS), "--slow-row-ms", str(SLOW_ROW_MS)]
    arguments += ["--slow-file", str(work_dir / "slow"), "--stop-file", str(work_dir / "stop")]
    arguments += ["--jars", ",".join(map(str, connector_jars())), "--work-dir", str(work_dir)]
    return Child("queries", "proxy.demo.backpressure.query", arguments, out_dir)


def _start_feed(bootstrap: str, timing: Timing, out_dir: Path) -> Child:
    arguments = ["--bootstrap", bootstrap, "--topic", TOPIC, "--partitions", str(PARTITIONS)]
    arguments += ["--rate", str(RATE), "--seconds", str(timing.total_s)]
    return Child("feed", "proxy.demo.feed", arguments, out_dir)


def _watch(
    screen: Screen, timing: Timing, work_dir: Path, admin_url: str, query: Child, feed: Child
) -> Outcome:
    """Make processing slow and fast again, and collect samples until the queries have ended."""
    samples: list[Sample] = []
    began_s, slow_file = time.time(), work_dir / "slow"
    slow_start_s = slow_end_s = stop_s = 0.0
    rows_in = 0
    next_s = time.monotonic()
    while query.exit_code is None:
        now_s = time.time()
        if not slow_start_s and now_s >= began_s + timing.fast_s:
            slow_file.touch()
            slow_start_s = now_s
            screen.step("Processing slows down: 4 times the time for each record")
        if not slow_end_s and now_s >= began_s + timing.fast_s + timing.slow_s:
            slow_file.unlink()
            slow_end_s = now_s
            screen.step("Processing is fast again")
        if not stop_s and feed.exit_code is not None:
            rows_in = _rows_written(feed)
            stop_s = now_s
            # Renamed when it is whole: the query may look at any moment.
            whole = work_dir / "stop.new"
            whole.write_text(str(rows_in))
            whole.rename(work_dir / "stop")
            screen.step(f"{rows_in:,} records are written; the queries read to the end")
        if stop_s and now_s > stop_s + DRAIN_TIMEOUT_S:
            raise query.failure("The queries have not ended.")
        samples.append(_sample(admin_url, now_s))
        next_s = max(next_s + INTERVAL_S, time.monotonic())
        time.sleep(next_s - time.monotonic())
    if query.exit_code:
        raise query.failure("The Spark queries failed.")
    lines = query.objects()
    return Outcome(
        batches={name: batches_of(lines, name) for name in (FREE, PRESSED)},
        samples=samples,
        slow=Phase(slow_start_s, slow_end_s),
        rows_in=rows_in,
        rows_out=rows_out_of(lines),
    )


def _rows_written(feed: Child) -> int:
    if feed.exit_code:
        raise feed.failure("The records could not be written.")
    return int(feed.objects()[-1]["rows_in"])


def _sample(admin_url: str, now_s: float) -> Sample:
    """Ask the proxy how far the queries are. Raises DemoError."""
    queries = progress(admin_url)
    return Sample(
        at_s=now_s,
        lag=lag_of(queries),
        bound={
            query["name"]: query["adaptive"]["rate"]
            for query in queries
            if query.get("adaptive") and query["adaptive"]["rate"] is not None
        },
    )


def _claims(outcome: Outcome) -> list[Claim]:
    return [
        *judge(
            outcome.batches[FREE],
            outcome.batches[PRESSED],
            outcome.slow,
            rate=RATE,
        ),
        judge_rows(outcome.rows_in, outcome.rows_out, len((FREE, PRESSED))),
    ]
