"""Runs queries whose processing is slow for a while: starts, feeds, watches and ends them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kafka import KafkaAdminClient

from proxy.demo.children import Child
from proxy.demo.frame import Frame, servers
from proxy.demo.jobs import TRIGGER_S, Job, Source
from proxy.demo.pace import Pace
from proxy.demo.parts import Addresses
from proxy.demo.verdict import Outcome, Phase, S, Timing, batches_of, rows_out_of
from proxy.devkit.jars import connector_jars

START_TIMEOUT_S = 120.0
FEED_TIMEOUT_S = 150.0
"""From the time at which a feed should end: its producer may wait twice for the broker, 60 s."""
RELEASE_TIMEOUT_S = 40.0
"""How long the queries go on after the last record, for control to end."""
DRAIN_TIMEOUT_S = 150.0
"""From the stop file to the queries' end; they give up sooner by themselves."""

SLOW_FILE, STOP_FILE = "slow", "stop"
"""Names in the working folder; `proxy.demo.streams` says what they mean."""


@dataclass(frozen=True, slots=True)
class Feed:
    """What is written to the source."""

    rate: float
    """Records per second."""
    duration_s: float


@dataclass(frozen=True, slots=True)
class Trial:
    """What is run."""

    example: str
    """File name of the proxy's configuration."""
    module: str
    """The program of the queries."""
    source: Source
    jobs: Sequence[Job]
    start_text: str
    """Said when the queries start."""
    slow_text: str
    """Said when processing slows down."""
    fast_text: str
    """Said when it is fast again."""
    warm_up: Feed | None = None
    """Comes first, while each query has its first batch, which takes Spark long."""


def measure(
    trial: Trial, frame: Frame, timing: Timing, look: Callable[[str, float], S]
) -> Outcome[S]:
    """Run a trial from the broker's start to the end of its queries.

    Args:
        trial: what is run.
        frame: where.
        timing: how long.
        look: asks the proxy at its admin address; gets the time in seconds since the epoch. As
            long as its sample says that a query is held, the queries go on when all is written,
            but not for longer than RELEASE_TIMEOUT_S.

    Raises one of the kinds of `DevkitError`.
    """
    out_dir = frame.out_dir
    with servers(frame, trial.example, lambda broker: _make_topics(broker, trial)) as running:
        frame.screen.step(trial.start_text)
        with _start_queries(trial, frame, running.addresses) as queries:
            queries.wait_for(lambda: queries.objects() or None, "started", START_TIMEOUT_S)
            before = _warm_up(trial, running.broker, queries, out_dir)
            main = Feed(trial.source.rate, timing.total_s)
            frame.screen.step(f"{main.rate:,.0f} records a second for {main.duration_s:.0f} s")
            with _start_feed("feed", main, running.broker, trial.source, out_dir) as feed:
                ask = partial(look, running.addresses.admin_url)
                return _watch(trial, frame, timing, queries, (*before, feed), ask)


def _make_topics(bootstrap: str, trial: Trial) -> None:
    """Make the topic that is fed, and those that the queries write."""
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    names = (trial.source.topic, *(job.produces for job in trial.jobs))
    try:
        form = {"num_partitions": trial.source.partitions, "replication_factor": 1}
        admin.create_topics(dict.fromkeys(names, form), wait_for_metadata=True)
    finally:
        admin.close()


def _start_queries(trial: Trial, frame: Frame, addresses: Addresses) -> Child:
    work_dir = frame.work_dir
    arguments = ["--bootstrap", addresses.bootstrap, "--proxy", addresses.admin_url]
    arguments += ["--trigger", f"{TRIGGER_S:g} seconds"]
    arguments += ["--slow-file", str(work_dir / SLOW_FILE)]
    arguments += ["--stop-file", str(work_dir / STOP_FILE)]
    arguments += ["--jars", ",".join(map(str, connector_jars())), "--work-dir", str(work_dir)]
    return Child("queries", trial.module, arguments, frame.out_dir)


def _start_feed(title: str, feed: Feed, bootstrap: str, source: Source, out_dir: Path) -> Child:
    arguments = ["--bootstrap", bootstrap, "--topic", source.topic]
    arguments += ["--partitions", str(source.partitions)]
    arguments += ["--rate", str(feed.rate), "--seconds", str(feed.duration_s)]
    return Child(title, "proxy.demo.feed", arguments, out_dir)


def _warm_up(trial: Trial, bootstrap: str, queries: Child, out_dir: Path) -> Sequence[Child]:
    """Return what has fed the queries, if anything has; they have begun then."""

    def have_begun() -> bool | None:
        return {line.get("query") for line in queries.objects()} >= {
            job.name for job in trial.jobs
        } or None

    if trial.warm_up is None:
        return ()
    with _start_feed("warm-up", trial.warm_up, bootstrap, trial.source, out_dir) as feed:
        queries.wait_for(have_begun, "had their first batches", START_TIMEOUT_S)
        feed.await_end(trial.warm_up.duration_s + FEED_TIMEOUT_S)
        return (feed,)


def _watch(
    trial: Trial,
    frame: Frame,
    timing: Timing,
    queries: Child,
    feeds: Sequence[Child],
    look: Callable[[float], S],
) -> Outcome[S]:
    """Make processing slow and fast again, and look on until the queries have ended."""
    samples: list[S] = []
    slow_file, pace, began_s = frame.work_dir / SLOW_FILE, Pace(), time.time()
    slow_start_s = slow_end_s = fed_s = stop_s = 0.0
    rows_in = 0
    while queries.exit_code is None:
        now_s = time.time()
        if not slow_start_s and now_s >= began_s + timing.fast_s:
            slow_file.touch()
            slow_start_s = now_s
            frame.screen.step(trial.slow_text)
        if not slow_end_s and now_s >= began_s + timing.fast_s + timing.slow_s:
            slow_file.unlink()
            slow_end_s = now_s
            frame.screen.step(trial.fast_text)
        samples.append(look(now_s))
        if not fed_s and all(feed.exit_code is not None for feed in feeds):
            rows_in = sum(map(_rows_written, feeds))
            fed_s = now_s
            frame.screen.step(f"{rows_in:,} records are written; the queries read to the end")
        if not fed_s and now_s > began_s + timing.total_s + FEED_TIMEOUT_S:
            raise feeds[-1].failure("The records are still being written.")
        is_released = not samples[-1].is_held or now_s > fed_s + RELEASE_TIMEOUT_S
        if fed_s and not stop_s and is_released:
            stop_s = now_s
            _stop_after(rows_in, frame.work_dir)
        if stop_s and now_s > stop_s + DRAIN_TIMEOUT_S:
            raise queries.failure("The queries have not ended.")
        pace.wait()
    if queries.exit_code:
        raise queries.failure("The Spark queries failed.")
    samples.append(look(time.time()))
    lines = queries.objects()
    return Outcome(
        batches={job.name: batches_of(lines, job.name) for job in trial.jobs},
        samples=samples,
        slow=Phase(slow_start_s, slow_end_s),
        rows_in=rows_in,
        rows_out=rows_out_of(lines),
    )


def _rows_written(feed: Child) -> int:
    if feed.exit_code:
        raise feed.failure("The records could not be written.")
    return int(feed.objects()[-1]["rows_in"])


def _stop_after(rows: int, work_dir: Path) -> None:
    # Renamed when it is whole: the queries may look at any moment.
    whole = work_dir / f"{STOP_FILE}.new"
    whole.write_text(str(rows))
    whole.rename(work_dir / STOP_FILE)
