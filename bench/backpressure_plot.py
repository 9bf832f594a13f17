"""Draws each job of the figure `backpressure`: its lag, and beside it how long batches took."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.backpressure_jobs import TRIGGER_S, Job
from bench.backpressure_judge import LONGEST_TRIGGERS, lag_of
from bench.backpressure_run import Watch
from examples.demo.canvas import (
    BOUND_LINE,
    DPI,
    FREE_COLOUR,
    MAIN_COLOUR,
    OTHER_COLOUR,
    TEXT_COLOUR,
)

PAIRS_PER_LINE = 2
PANEL_INCHES = (4.2, 2.3)
COLOURS = {"none": FREE_COLOUR, "pid": OTHER_COLOUR, "cost": MAIN_COLOUR}
LINE: dict[str, Any] = {"linewidth": 1.3}

Drawn = Mapping[str, Sequence[tuple[Watch, str]]]
"""By way: its queries, and what was seen of each."""


def draw(jobs: Sequence[tuple[Job, Drawn]], path: Path) -> None:
    """Write one PNG with two panels for each job. Of several rounds the first is drawn."""
    lines = -(-len(jobs) // PAIRS_PER_LINE)
    columns = 2 * min(PAIRS_PER_LINE, len(jobs))
    size = (columns * PANEL_INCHES[0], lines * PANEL_INCHES[1])
    # Not by way of pyplot: no window system, and nothing that is shared.
    figure = Figure(figsize=size, dpi=DPI / 2, layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in panels[2 * len(jobs) :]:
        axes.set_axis_off()
    for number, (job, drawn) in enumerate(jobs):
        _draw_job(panels[2 * number], panels[2 * number + 1], job, drawn)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white")


def _draw_job(lags: Any, durations: Any, job: Job, drawn: Drawn) -> None:
    for way, queries in drawn.items():
        for number, (watch, query) in enumerate(queries):
            style = {**LINE, "color": COLOURS[way], "label": way if number == 0 else None}
            lag = lag_of(watch, query)
            lags.plot(
                [at_s - watch.started_s for at_s, _ in lag], [each for _, each in lag], **style
            )
            batches = [batch for batch in watch.batches[query] if batch.rows]
            durations.plot(
                [batch.ended_s - watch.started_s for batch in batches],
                [batch.duration_s / TRIGGER_S for batch in batches],
                marker=".",
                **style,
            )
    durations.axhline(LONGEST_TRIGGERS, **BOUND_LINE)
    lags.set_title(f"{job.name}: {job.says}", loc="left", fontsize=8, color=TEXT_COLOUR)
    lags.set(ylim=(0, None))
    lags.set_ylabel("lag, records", fontsize=7)
    durations.set(ylim=(0, None))
    durations.set_ylabel("batch, triggers", fontsize=7)
    for axes in (lags, durations):
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    lags.legend(fontsize=7, frameon=False)
