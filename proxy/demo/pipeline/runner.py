"""Runs the demo of pipelines from the first step to the verdict."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kafka import KafkaAdminClient
from rich.console import Console

from proxy.demo.children import Child
from proxy.demo.parts import Addresses, await_proxy, start_proxy, write_config
from proxy.demo.pipeline.figures import Outcome, Sample, judge, sample_of
from proxy.demo.pipeline.jobs import (
    FIRST,
    JOBS,
    LAST_JOBS,
    PARTITIONS,
    RATE,
    SECOND,
    SOURCE_TOPIC,
    TRIGGER_S,
)
from proxy.demo.pipeline.plot import draw
from proxy.demo.runner import fetch_jars
from proxy.demo.screen import Screen
from proxy.demo.verdict import (
    Phase,
    Timing,
    batches_of,
    judge_rows,
    lag_of,
    progress,
    read_text,
    rows_out_of,
    summarise,
)
from proxy.devkit.broker import EmbeddedBroker
from proxy.devkit.jars import connector_jars
from proxy.devkit.signals import stop_signals_interrupt

EXAMPLE = "demo-pipeline.yaml"
PICTURE = "pipeline.png"

START_TIMEOUT_S = 120.0
WARM_UP_RATE, WARM_UP_S = 100.0, 12.0
RELEASE_TIMEOUT_S = 40.0
"""How long the queries go on after the last record, for control to end."""
DRAIN_TIMEOUT_S = 150.0
INTERVAL_S = 1.0
EXIT_DONE, EXIT_FAILED = 0, 1

FULL = Timing(fast_s=20.0, slow_s=55.0, again_s=45.0)
BRIEF = Timing(fast_s=5.0, slow_s=20.0, again_s=5.0)


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
        picture = out_dir / PICTURE
        draw(outcome, picture)
    claims = [*judge(outcome), judge_rows(outcome.rows_in, outcome.rows_out, len(LAST_JOBS))]
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
            screen.step(
                "PySpark queries start: 'first' and 'second' are a pipeline, "
                "'free-first' and 'free-second' are not"
            )
            with _start_queries(addresses, work_dir, out_dir) as query:
                query.wait_for(lambda: query.objects() or None, "started", START_TIMEOUT_S)
                before = _warm_up(broker.bootstrap, query, out_dir)
                screen.step(f"{RATE:,.0f} records a second for {timing.total_s:.0f} s")
                with _start_feed("feed", broker.bootstrap, RATE, timing.total_s, out_dir) as feed:
                    feeds = (before, feed)
                    return _watch(screen, timing, work_dir, addresses.admin_url, query, feeds)


def _warm_up(bootstrap: str, query: Child, out_dir: Path) -> Child:
    """Let each query have its first batch, which takes Spark long; return what fed it."""

    def has_begun() -> bool | None:
        return {line.get("query") for line in query.objects()} >= {job.name for job in JOBS} or None

    with _start_feed("warm-up", bootstrap, WARM_UP_RATE, WARM_UP_S, out_dir) as feed:
        query.wait_for(has_begun, "had their first batches", START_TIMEOUT_S)
        while feed.exit_code is None:
            time.sleep(INTERVAL_S)
        return feed


def _make_topics(bootstrap: str) -> None:
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    names = (SOURCE_TOPIC, *(job.produces for job in JOBS))
    try:
        form = {"num_partitions": PARTITIONS, "replication_factor": 1}
        admin.create_topics(dict.fromkeys(names, form), wait_for_metadata=True)
    finally:
        admin.close()


def _start_queries(addresses: Addresses, work_dir: Path, out_dir: Path) -> Child:
    arguments = ["--bootstrap", addresses.bootstrap, "--proxy", addresses.admin_url]
    arguments += ["--trigger", f"{TRIGGER_S:g} seconds"]
    arguments += ["--slow-file", str(work_dir / "slow"), "--stop-file", str(work_dir / "stop")]
    arguments += ["--jars", ",".join(map(str, connector_jars())), "--work-dir", str(work_dir)]
    return Child("queries", "proxy.demo.pipeline.query", arguments, out_dir)


def _start_feed(title: str, bootstrap: str, rate: float, duration_s: float, out_dir: Path) -> Child:
    arguments = ["--bootstrap", bootstrap, "--topic", SOURCE_TOPIC]
    arguments += ["--partitions", str(PARTITIONS)]
    arguments += ["--rate", str(rate), "--seconds", str(duration_s)]
    return Child(title, "proxy.demo.feed", arguments, out_dir)


def _watch(
    screen: Screen,
    timing: Timing,
    work_dir: Path,
    admin_url: str,
    query: Child,
    feeds: Sequence[Child],
) -> Outcome:
    """Make `second` slow and fast again, and collect samples until the queries have ended."""
    samples: list[Sample] = []
    began_s, slow_file = time.time(), work_dir / "slow"
    slow_start_s = slow_end_s = fed_s = stop_s = 0.0
    rows_in = 0
    was_held = False
    next_s = time.monotonic()
    while query.exit_code is None:
        now_s = time.time()
        if not slow_start_s and now_s >= began_s + timing.fast_s:
            slow_file.touch()
            slow_start_s = now_s
            screen.step(f"{SECOND.name!r} slows down, and so does the one beside it")
        if not slow_end_s and now_s >= began_s + timing.fast_s + timing.slow_s:
            slow_file.unlink()
            slow_end_s = now_s
            screen.step("They are fast again")
        sample = _sample(admin_url, now_s)
        samples.append(sample)
        if sample.is_held != was_held:
            was_held = sample.is_held
            now = f"is held at {sample.rate:,.0f} records/s" if was_held else "is free again"
            screen.step(f"{FIRST.name!r} {now}")
        if not fed_s and all(feed.exit_code is not None for feed in feeds):
            rows_in = sum(map(_rows_written, feeds))
            fed_s = now_s
            screen.step(f"{rows_in:,} records are written; the queries read to the end")
        # They go on for a while when there is nothing to read, for control to end.
        if fed_s and not stop_s and (not was_held or now_s > fed_s + RELEASE_TIMEOUT_S):
            stop_s = now_s
            # Renamed when it is whole: the query may look at any moment.
            whole = work_dir / "stop.new"
            whole.write_text(str(rows_in))
            whole.rename(work_dir / "stop")
        if stop_s and now_s > stop_s + DRAIN_TIMEOUT_S:
            raise query.failure("The queries have not ended.")
        next_s = max(next_s + INTERVAL_S, time.monotonic())
        time.sleep(next_s - time.monotonic())
    if query.exit_code:
        raise query.failure("The Spark queries failed.")
    samples.append(_sample(admin_url, time.time()))
    lines = query.objects()
    return Outcome(
        batches={job.name: batches_of(lines, job.name) for job in JOBS},
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
    return sample_of(read_text(f"{admin_url}/metrics"), lag_of(progress(admin_url)), now_s)
