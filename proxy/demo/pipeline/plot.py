"""Draws the pipeline with flow control and the one without: what waits between, and rates."""

from pathlib import Path
from typing import Any

from proxy.demo.canvas import (
    BOUND_COLOUR,
    BOUND_LINE,
    FREE_COLOUR,
    MAIN_COLOUR,
    OTHER_COLOUR,
    label,
    note,
    picture,
    shade,
)
from proxy.demo.pipeline.figures import LONGEST_LAG, Sample, rates
from proxy.demo.pipeline.jobs import FIRST, FREE_FIRST, FREE_SECOND, JOBS, SECOND
from proxy.demo.verdict import Outcome

PANEL_HEIGHTS = (3, 3, 2)


def draw(outcome: Outcome[Sample], path: Path) -> None:
    """Draw the whole run."""
    samples, slow = outcome.samples, outcome.slow
    start_s = samples[0].at_s
    wall_s = [sample.at_s for sample in samples]
    at_s = [each - start_s for each in wall_s]
    lag_of = {job: [sample.lag.get(job.name, 0) for sample in samples] for job in JOBS}
    title = "The second query slows down: with flow control the first one waits for it"
    with picture(path, title, PANEL_HEIGHTS) as panels:
        lags, speeds, waiting = panels
        shade(panels, slow, start_s)
        for job, colour in ((FREE_SECOND, FREE_COLOUR), (SECOND, MAIN_COLOUR)):
            lags.plot(at_s, lag_of[job], color=colour, linewidth=2.0)
        lags.axhline(LONGEST_LAG, **BOUND_LINE)
        held = [sample.rate if sample.is_held else float("nan") for sample in samples]
        for job, colour in (
            (FREE_FIRST, FREE_COLOUR),
            (FIRST, MAIN_COLOUR),
            (SECOND, OTHER_COLOUR),
        ):
            speeds.plot(at_s, rates(outcome.batches[job.name], wall_s), color=colour, linewidth=1.8)
        speeds.step(at_s, held, where="post", **BOUND_LINE)
        for job, colour in ((FREE_FIRST, FREE_COLOUR), (FIRST, MAIN_COLOUR)):
            waiting.plot(at_s, lag_of[job], color=colour, linewidth=2.0)
        lags.set(ylabel="records between\nthe two queries", ylim=(0, None))
        speeds.set(ylabel="records per second", ylim=(0, None))
        waiting.set(ylabel="records before\nthe first", ylim=(0, None), xlabel="seconds")
        waiting.set_xlim(at_s[0], at_s[-1])
        _label(lags, ((0.75, "without", FREE_COLOUR), (0.3, "with\nflow control", MAIN_COLOUR)))
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
        note(lags, slow, start_s, slower)


def _label(axes: Any, labels: tuple[tuple[float, str, str], ...]) -> None:
    """Say what the lines are; heights from 0 to 1."""
    for height, text, colour in labels:
        label(axes, height, text, colour, "axes fraction")
