"""The demo of pipelines: of two queries in a row the second slows down for a while.

`a` is fed at a steady rate. `first` reads it and writes `b`, `second` reads that and writes `c`:
a pipeline of examples/demo-pipeline.yaml. `free-first` and `free-second` do the same with topics of
their own and are no pipeline. While it is slow each record takes both second queries much longer.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from examples.demo import canvas, trial
from examples.demo.canvas import BOUND_COLOUR, BOUND_LINE, FREE_COLOUR, MAIN_COLOUR, OTHER_COLOUR
from examples.demo.frame import Scenario
from examples.demo.jobs import FIRST, FREE_FIRST, FREE_SECOND, PIPELINE, SECOND
from metrics.exposition import PREFIX

TRIAL = trial.Trial(
    plan="pipeline",
    full=trial.Timing(fast_s=20.0, slow_s=55.0, again_s=45.0),
    brief=trial.Timing(fast_s=5.0, slow_s=20.0, again_s=5.0),
    start_text="PySpark queries start: 'first' and 'second' are a pipeline, "
    "'free-first' and 'free-second' are not",
    slow_text=f"{SECOND.name!r} slows down, and so does the one beside it",
    fast_text="They are fast again",
    warm_up=(100.0, 12.0),
)

PANEL_HEIGHTS = (3, 3, 2)
LONGEST_LAG = 5000
"""Records that wait for `second` at most: max_lag of the example, 2,400, and the first batch of a
run, which is not bounded."""
SETTLE_S = 20.0
"""From the start of the slow time, until rates are compared."""
NEAR = 0.25
"""Share by which the first one's rate may differ from the second one's."""
RATE_WINDOW_S = 6.0
"""Rates are those of so many seconds: some batches."""
MEDIAN, MOST = 0.5, 0.95


@dataclass(frozen=True, slots=True)
class Ledger:
    """How the source batches fared since the proxy's start."""

    completed: int
    failed: int
    """For whatever reason, time-outs too."""
    pending: int
    buckets: tuple[tuple[float, float], ...]
    """Upper bound in seconds and how many took no longer; ascending."""

    def completion_s(self, share: float) -> float:
        """Return in which time such a share was completed, as exactly as buckets can tell; NaN."""
        wanted = share * self.completed
        for (low, below), (high, count) in pairwise(((0.0, 0.0), *self.buckets)):
            if count >= wanted and count > below:
                return min(high, low + (high - low) * (wanted - below) / (count - below))
        return math.nan


@dataclass(frozen=True, slots=True)
class Sample(trial.Sample):
    """What the proxy said at one moment; `first` is the query that may be held."""

    rate: float
    """Rate in force of `first`, in records per second; when it is not held, its normal one."""
    ledger: Ledger


def sample_of(text: str, lag: Mapping[str, int], at_s: float) -> Sample:
    """Find the sample in Prometheus' text format; what is not there is 0."""
    families = {
        family.name.removeprefix(PREFIX): family for family in text_string_to_metric_families(text)
    }
    duration = dict(_values(families, "ledger_completion_seconds", "le", "_bucket"))
    buckets = sorted((float(bound), count) for bound, count in duration.items())
    is_held = dict(_values(families, "stage_state", "stage")).get(FIRST.name, 0.0) > 0
    rate = dict(_values(families, "stage_rate", "stage")).get(FIRST.name, 0.0)
    now = f"is held at {rate:,.0f} records/s" if is_held else "is free again"
    return Sample(
        at_s=at_s,
        lag=lag,
        is_held=is_held,
        text=f"{FIRST.name!r} {now}",
        rate=rate,
        ledger=Ledger(
            completed=int(max(duration.values(), default=0.0)),
            failed=int(sum(dict(_values(families, "ledger_failed", "reason", "_total")).values())),
            pending=int(sum(dict(_values(families, "ledger_pending", "pipeline")).values())),
            buckets=tuple(buckets),
        ),
    )


def rates(batches: Sequence[trial.Batch], at_s: Sequence[float]) -> list[float]:
    """Return the records per second up to each of these times, over RATE_WINDOW_S."""
    return [_rows(batches, end_s - RATE_WINDOW_S, end_s) / RATE_WINDOW_S for end_s in at_s]


def _look(admin_url: str, now_s: float) -> Sample:
    """Ask the proxy how far the queries are. Raises DemoError."""
    return sample_of(trial.read_text(f"{admin_url}/metrics"), trial.lag_of(admin_url), now_s)


def conclude(console: Console, seen: trial.Seen[Sample]) -> int:
    """Compare what was seen with what flow control promises."""
    samples, slow = seen.samples, seen.slow
    longest, free_longest = (
        max(sample.lag.get(job.name, 0) for sample in samples) for job in (SECOND, FREE_SECOND)
    )
    start_s, end_s = slow.start_s + SETTLE_S, slow.end_s
    first, second, free_first = (
        _rows(seen.batches[job.name], start_s, end_s) / (end_s - start_s)
        for job in (FIRST, SECOND, FREE_FIRST)
    )
    ledger, batches = samples[-1].ledger, len(seen.batches[FIRST.name])
    median_s, most_s = ledger.completion_s(MEDIAN), ledger.completion_s(MOST)
    claims = [
        trial.Claim(
            f"at most {LONGEST_LAG:,} records wait between the two",
            f"{longest:,} at most",
            longest <= LONGEST_LAG,
        ),
        trial.Claim(
            "without flow control they grow beyond that",
            f"up to {free_longest:,}",
            free_longest > LONGEST_LAG,
        ),
        trial.Claim(
            f"while it is slow {FIRST.name!r} is held at the rate of {SECOND.name!r}, "
            f"within {NEAR:.0%}",
            f"{first:,.0f}/s and {second:,.0f}/s; {free_first:,.0f}/s without",
            second > 0 and abs(first - second) <= NEAR * second,
        ),
        _judge_control(samples, slow),
        trial.Claim(
            f"each of {batches:,} source batches is known to be finished",
            f"{ledger.completed:,} completed, {ledger.failed:,} failed, {ledger.pending:,} pending",
            batches > 0 and (ledger.completed, ledger.failed, ledger.pending) == (batches, 0, 0),
        ),
        trial.Claim(
            f"the proxy tells how long that took: half of them, and {MOST:.0%}",
            f"about {median_s:.1f} s and {most_s:.1f} s",
            0 < median_s <= most_s,
        ),
        trial.judge_rows(seen, len(PIPELINE.last_jobs)),
    ]
    return trial.summarise(console, claims)


def _judge_control(samples: Sequence[Sample], slow: trial.Phase) -> trial.Claim:
    held_s = [sample.at_s for sample in samples if sample.is_held]
    text = "control begins when it is slow, and ends afterwards"
    if not held_s:
        return trial.Claim(text, "it did not begin", holds=False)
    after_s = min((each.at_s for each in samples if each.at_s > held_s[-1]), default=math.inf)
    return trial.Claim(
        text,
        f"after {held_s[0] - slow.start_s:.0f} s, and {after_s - slow.end_s:.0f} s after its end",
        slow.start_s <= held_s[0] < slow.end_s < after_s < math.inf,
    )


def _rows(batches: Sequence[trial.Batch], start_s: float, end_s: float) -> float:
    """Return how many rows were processed in a time; of batches in part, their part."""
    return sum(
        batch.rows
        * max(0.0, min(end_s, batch.ended_s) - max(start_s, batch.started_s))
        / batch.duration_s
        for batch in batches
    )


def _values(
    families: Mapping[str, Metric], name: str, label: str, suffix: str = ""
) -> Iterator[tuple[str, float]]:
    """Yield what a metric says, by one of its labels."""
    if name in families:
        for sample in families[name].samples:
            if sample.name == f"{PREFIX}{name}{suffix}":
                yield sample.labels[label], sample.value


def draw(seen: trial.Seen[Sample], path: Path) -> None:
    """Draw the whole run."""
    samples, slow = seen.samples, seen.slow
    start_s = samples[0].at_s
    wall_s = [sample.at_s for sample in samples]
    at_s = [each - start_s for each in wall_s]
    lag_of = {job: [sample.lag.get(job.name, 0) for sample in samples] for job in PIPELINE.jobs}
    title = "The second query slows down: with flow control the first one waits for it"
    with canvas.picture(path, title, PANEL_HEIGHTS) as panels:
        lags, speeds, waiting = panels
        canvas.shade(panels, slow, start_s)
        for job, colour in ((FREE_SECOND, FREE_COLOUR), (SECOND, MAIN_COLOUR)):
            lags.plot(at_s, lag_of[job], color=colour, linewidth=2.0)
        lags.axhline(LONGEST_LAG, **BOUND_LINE)
        held = [sample.rate if sample.is_held else float("nan") for sample in samples]
        for job, colour in (
            (FREE_FIRST, FREE_COLOUR),
            (FIRST, MAIN_COLOUR),
            (SECOND, OTHER_COLOUR),
        ):
            speeds.plot(at_s, rates(seen.batches[job.name], wall_s), color=colour, linewidth=1.8)
        speeds.step(at_s, held, where="post", **BOUND_LINE)
        for job, colour in ((FREE_FIRST, FREE_COLOUR), (FIRST, MAIN_COLOUR)):
            waiting.plot(at_s, lag_of[job], color=colour, linewidth=2.0)
        lags.set(ylabel="records between\nthe two queries", ylim=(0, None))
        speeds.set(ylabel="records per second", ylim=(0, None))
        waiting.set(ylabel="records before\nthe first", ylim=(0, None), xlabel="seconds")
        waiting.set_xlim(at_s[0], at_s[-1])
        _label(
            lags,
            (
                (0.75, "without", FREE_COLOUR),
                (0.3, "with\nflow control", MAIN_COLOUR),
            ),
        )
        _label(
            speeds,
            (
                (0.86, "first,\nwithout", FREE_COLOUR),
                (0.6, "first", MAIN_COLOUR),
                (0.42, "its bound", BOUND_COLOUR),
                (0.24, "second", OTHER_COLOUR),
            ),
        )
        _label(waiting, ((0.75, "with", MAIN_COLOUR), (0.3, "without", FREE_COLOUR)))
        slower = f"each record takes {SECOND.slow_row_ms / SECOND.row_ms:g} times as long"
        canvas.note(lags, slow, start_s, slower)


def _label(axes: Any, labels: tuple[tuple[float, str, str], ...]) -> None:
    """Say what the lines are; heights from 0 to 1."""
    for height, text, colour in labels:
        canvas.label(axes, height, text, colour, "axes fraction")


SCENARIO = Scenario(
    Path("build/demo-pipeline"),
    "pipeline.png",
    partial(trial.measure, TRIAL, _look),
    draw,
    conclude,
)
