"""Runs queries whose processing is slow for a while, looks on, and judges what was promised."""

import json
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.table import Table

from examples.demo import DemoError
from examples.demo.children import Child
from examples.demo.frame import Frame, Pace, Servers, make_topics, servers
from examples.demo.jobs import PLANS
from examples.devkit.jars import connector_jars
from metrics.clock import MS_PER_SECOND

HTTP_TIMEOUT_S = 5.0
EXIT_DONE, EXIT_FAILED = 0, 1
START_TIMEOUT_S = 120.0
FEED_TIMEOUT_S = 150.0
"""From the time at which a feed should end: its producer may wait twice for the broker, 60 s."""
RELEASE_TIMEOUT_S = 40.0
"""How long the queries go on after the last record, for control to end."""
DRAIN_TIMEOUT_S = 150.0
"""From the stop file to the queries' end; they give up sooner by themselves."""

SLOW_FILE, STOP_FILE = "slow", "stop"
"""Names in the working folder; `examples.demo.queries` says what they mean."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long each part of a run takes, in seconds."""

    fast_s: float
    slow_s: float
    again_s: float

    @property
    def total_s(self) -> float:
        """The time for which records are written."""
        return self.fast_s + self.slow_s + self.again_s


@dataclass(frozen=True, slots=True)
class Trial:
    """What is run."""

    plan: str
    """Name of the queries' plan."""
    full: Timing
    brief: Timing
    start_text: str
    """Said when the queries start."""
    slow_text: str
    """Said when processing slows down."""
    fast_text: str
    """Said when it is fast again."""
    warm_up: tuple[float, float] | None = None
    """Records per second, and for how many seconds: what is written at first, while each query has
    its first batch, which takes Spark long."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch; times in seconds since the epoch."""

    started_s: float
    rows: int
    duration_s: float

    @property
    def ended_s(self) -> float:
        """When it was done."""
        return self.started_s + self.duration_s


@dataclass(frozen=True, slots=True)
class Phase:
    """When processing was slow, in seconds since the epoch."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """What the proxy said at one moment."""

    at_s: float
    lag: Mapping[str, int]
    """By query, records that it has not completed."""
    is_held: bool
    """Whether a query is held back for another one."""

    text: str
    """Says, when that changes, how it is now."""


S = TypeVar("S", bound=Sample)


@dataclass(frozen=True, slots=True)
class Seen(Generic[S]):
    """What a run gave."""

    batches: Mapping[str, Sequence[Batch]]
    """By query."""
    samples: Sequence[S]
    slow: Phase
    rows_in: int
    rows_out: Mapping[str, tuple[int, int]]
    """By query, of those that were counted: rows, and different ones among them."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A promise, and what was seen."""

    text: str
    seen: str
    holds: bool


def measure(
    trial: Trial,
    look: Callable[[str, float], S],
    frame: Frame,
    _megabytes: int | None,
    brief: bool,
) -> Seen[S]:
    """Run a trial from the broker's start to the end of its queries.

    `look` asks the proxy at its admin address; it gets the time in seconds since the epoch. As long
    as its sample says that a query is held, the queries go on when all is written, but not for
    longer than RELEASE_TIMEOUT_S. Raises one of the kinds of `DevkitError`.
    """
    plan, timing = PLANS[trial.plan], trial.brief if brief else trial.full
    topics = (plan.topic, *(job.produces for job in plan.jobs))
    example = f"demo-{trial.plan}.yaml"
    with servers(frame, example, lambda to: make_topics(to, topics, plan.partitions)) as running:
        frame.screen.step(trial.start_text)
        with frame.start(
            "queries",
            "queries",
            "plan",
            plan=trial.plan,
            bootstrap=running.bootstrap,
            proxy=running.admin_url,
            jars=",".join(map(str, connector_jars())),
            work_dir=str(frame.work_dir),
        ) as queries:
            queries.wait_for(lambda: queries.objects() or None, "started", START_TIMEOUT_S)
            before = _warm_up(trial, frame, running, queries)
            frame.screen.step(f"{plan.rate:,.0f} records a second for {timing.total_s:.0f} s")
            with _feed("feed", trial, frame, running, plan.rate, timing.total_s) as feed:

                def ask(now_s: float) -> S:
                    return look(running.admin_url, now_s)

                return _watch(trial, timing, frame, queries, (*before, feed), ask)


def _feed(
    title: str, trial: Trial, frame: Frame, running: Servers, rate: float, seconds: float
) -> Child:
    plan = PLANS[trial.plan]
    where = {"bootstrap": running.broker, "topic": plan.topic, "partitions": plan.partitions}
    return frame.start(title, "feed", **where, rate=rate, seconds=seconds)


def _warm_up(trial: Trial, frame: Frame, running: Servers, queries: Child) -> Sequence[Child]:
    """Return what has fed the queries, if anything has; they have begun then."""
    names = {job.name for job in PLANS[trial.plan].jobs}
    if trial.warm_up is None:
        return ()
    rate, seconds = trial.warm_up

    def have_begun() -> bool | None:
        return {line.get("query") for line in queries.objects()} >= names or None

    with _feed("warm-up", trial, frame, running, rate, seconds) as feed:
        queries.wait_for(have_begun, "had their first batches", START_TIMEOUT_S)
        feed.await_end(seconds + FEED_TIMEOUT_S)
        return (feed,)


def _watch(
    trial: Trial,
    timing: Timing,
    frame: Frame,
    queries: Child,
    feeds: Sequence[Child],
    look: Callable[[float], S],
) -> Seen[S]:
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
        if samples[-1].is_held != (len(samples) > 1 and samples[-2].is_held):
            frame.screen.step(samples[-1].text)
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
    return Seen(
        batches={job.name: _batches_of(lines, job.name) for job in PLANS[trial.plan].jobs},
        samples=samples,
        slow=Phase(slow_start_s, slow_end_s),
        rows_in=rows_in,
        rows_out=_rows_out_of(lines),
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


def _batches_of(lines: Iterable[dict[str, Any]], query: str) -> list[Batch]:
    """Return the batches that a query printed."""
    return [
        Batch(
            datetime.fromisoformat(line["started"]).timestamp(),
            line["rows"],
            line["duration_ms"] / MS_PER_SECOND,
        )
        for line in lines
        if line.get("query") == query and "batch" in line
    ]


def _rows_out_of(lines: Iterable[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return by query how many rows it wrote, and how many different ones."""
    return {
        line["query"]: (line["rows_out"], line["distinct_rows_out"])
        for line in lines
        if "rows_out" in line
    }


def judge_rows(seen: Seen[S], queries: int) -> Claim:
    """Compare what so many queries wrote with what was written for them."""
    rows_in, rows_out = seen.rows_in, seen.rows_out
    once = all(rows == (rows_in, rows_in) for rows in rows_out.values())
    return Claim(
        f"each of {rows_in:,} rows exactly once",
        ", ".join(f"{name}: {rows:,}" for name, (rows, _) in rows_out.items()),
        once and rows_in > 0 and len(rows_out) == queries,
    )


def read_text(url: str) -> str:
    """Read what the proxy answers. Raises DemoError."""
    try:
        with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S) as answer:
            text: str = answer.read().decode()
            return text
    except OSError as error:
        raise DemoError(
            f"The proxy does not answer {url}: {error}", "Read its log, proxy.log."
        ) from error


def lag_of(admin_url: str) -> dict[str, int]:
    """Return by query how many records it has not completed. Raises DemoError."""
    return {
        query["name"]: sum(part["lag_records"] or 0 for part in query["partitions"])
        for query in json.loads(read_text(f"{admin_url}/v1/progress"))["queries"]
    }


def summarise(console: Console, claims: Sequence[Claim]) -> int:
    """Show the promises, and which were kept; return the exit code, 0 when all were."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("promise", "seen", ""):
        table.add_column(title)
    for claim in claims:
        verdict, style = ("holds", "green") if claim.holds else ("DOES NOT HOLD", "bold red")
        table.add_row(claim.text, claim.seen, f"[{style}]{verdict}[/]")
    console.print()
    console.print(table)
    console.print()
    return EXIT_DONE if all(claim.holds for claim in claims) else EXIT_FAILED
