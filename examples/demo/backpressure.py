"""The demo of backpressure: two queries whose processing slows down, one of them with it.

Both read the same topic through the proxy in the same Spark session, with a trigger every two
seconds. Half-way each record takes four times as long for a while.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.demo import canvas, trial
from examples.demo.canvas import BOUND_LINE, FREE_COLOUR, MAIN_COLOUR, TEXT_COLOUR
from examples.demo.frame import Scenario
from examples.demo.jobs import BACKPRESSURE, FREE, PRESSED, TRIGGER_S

SLOWER = PRESSED.slow_row_ms / PRESSED.row_ms
TRIAL = trial.Trial(
    plan="backpressure",
    full=trial.Timing(fast_s=36.0, slow_s=40.0, again_s=28.0),
    brief=trial.Timing(fast_s=8.0, slow_s=10.0, again_s=6.0),
    start_text=f"PySpark queries {FREE.name!r} and {PRESSED.name!r} start, "
    f"one trigger in {TRIGGER_S:g} s",
    slow_text=f"Processing slows down: {SLOWER:g} times the time for each record",
    fast_text="Processing is fast again",
)

LONGEST_BATCH_S = 1.5 * TRIGGER_S
"""What a batch may take under backpressure, once the loop has settled."""
SETTLE_BATCHES = 5
MIN_RATE = 100.0
"""Records per second that the loop never goes below; the default of an adaptive rule."""
AWAY_FROM_MINIMUM = 2.0
"""Times the minimum that a batch keeps to, or the loop has spiralled down."""

PANEL_HEIGHTS = (3, 2, 2)


def _look(admin_url: str, now_s: float) -> trial.Sample:
    """Ask the proxy how far the queries are; none holds back another. Raises DemoError."""
    return trial.Sample(now_s, trial.lag_of(admin_url), is_held=False, text="")


def conclude(console: Console, seen: trial.Seen[trial.Sample]) -> int:
    """Compare what both queries did with what backpressure promises."""
    slow, pressed = seen.slow, seen.batches[PRESSED.name]
    settled = _during(pressed, slow)[SETTLE_BATCHES:]
    grown = _during(seen.batches[FREE.name], slow)
    after = [batch for batch in pressed if batch.started_s >= slow.end_s]
    longest_s = max((batch.duration_s for batch in settled), default=0.0)
    free_longest_s = max((batch.duration_s for batch in grown), default=0.0)
    fewest = min((batch.rows for batch in settled), default=0)
    usual = BACKPRESSURE.rate * TRIGGER_S
    recovered = next((number for number, each in enumerate(after, 1) if each.rows >= usual), None)
    claims = [
        trial.Claim(
            f"with backpressure a batch takes at most {LONGEST_BATCH_S:g} s, "
            f"after {SETTLE_BATCHES} batches",
            f"{longest_s:.2f} s at most",
            bool(settled) and longest_s <= LONGEST_BATCH_S,
        ),
        trial.Claim(
            "without it batches grow",
            f"up to {free_longest_s:.2f} s",
            free_longest_s > LONGEST_BATCH_S and free_longest_s > longest_s,
        ),
        trial.Claim(
            f"no spiral to the minimum of {MIN_RATE * TRIGGER_S:,.0f} rows",
            f"{fewest:,} at least",
            fewest >= AWAY_FROM_MINIMUM * MIN_RATE * TRIGGER_S,
        ),
        trial.Claim(
            f"after the slow time it is back at the rate of its input in {SETTLE_BATCHES} batches",
            "not at all" if recovered is None else f"in batch {recovered}",
            recovered is not None and recovered <= SETTLE_BATCHES,
        ),
    ]
    return trial.summarise(console, [*claims, trial.judge_rows(seen, len(BACKPRESSURE.last_jobs))])


def _during(batches: Sequence[trial.Batch], phase: trial.Phase) -> list[trial.Batch]:
    return [batch for batch in batches if phase.start_s <= batch.started_s < phase.end_s]


def draw(seen: trial.Seen[trial.Sample], path: Path) -> None:
    """Draw both queries in one picture: batch durations, batch sizes, and their lags."""
    samples, slow = seen.samples, seen.slow
    start_s = min(batch.started_s for each in seen.batches.values() for batch in each)
    at_s = [sample.at_s - start_s for sample in samples]
    title = f"A {TRIGGER_S:g} s trigger: with backpressure batches stay near it, without it grow"
    with canvas.picture(path, title, PANEL_HEIGHTS) as panels:
        durations, sizes, lags = panels
        canvas.shade(panels, slow, start_s)
        for job, colour in ((FREE, FREE_COLOUR), (PRESSED, MAIN_COLOUR)):
            batches = seen.batches[job.name]
            ends_s = [batch.ended_s - start_s for batch in batches]
            line: dict[str, Any] = {"color": colour, "linewidth": 2.0, "marker": "o"}
            line |= {"markersize": 4, "label": f"{job.name} backpressure"}
            durations.plot(ends_s, [batch.duration_s for batch in batches], **line)
            sizes.plot(ends_s, [batch.rows for batch in batches], **line)
            lag = [sample.lag.get(job.name, 0) for sample in samples]
            lags.plot(at_s, lag, color=colour, linewidth=2.0)
        durations.axhline(TRIGGER_S, color=TEXT_COLOUR, linewidth=1.0)
        durations.axhline(LONGEST_BATCH_S, **BOUND_LINE)
        durations.set(ylabel="batch, seconds", ylim=(0, None))
        durations.legend(loc="upper right", frameon=False)
        sizes.set(ylabel="batch, rows", ylim=(0, None))
        lags.set(ylabel="lag, records", ylim=(0, None), xlabel="seconds since the first batch")
        canvas.note(lags, slow, start_s, f"processing takes {SLOWER:g} times as long")


SCENARIO = Scenario(
    Path("build/demo-backpressure"),
    "backpressure.png",
    partial(trial.measure, TRIAL, _look),
    draw,
    conclude,
)
