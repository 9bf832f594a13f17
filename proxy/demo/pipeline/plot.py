"""Draws the pipeline with flow control and the one without: what waits between, and rates."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from proxy.demo.pipeline.figures import LONGEST_LAG, Outcome, rates
from proxy.demo.pipeline.jobs import FIRST, FREE_FIRST, FREE_SECOND, SECOND
from proxy.demo.plot import BOUND_COLOUR, DPI, HEIGHT_PX, STYLE, WIDTH_PX

FREE_COLOUR, FIRST_COLOUR, SECOND_COLOUR = "#8a8a86", "#d9730d", "#4a7fb5"
SLOW_COLOUR = "#f3ead9"
PANEL_HEIGHTS = (3, 3, 2)
DASHED = (0, (5, 3))
LABEL_GAP_PT = 8


def draw(outcome: Outcome, path: Path) -> None:
    """Write the picture as PNG, 1600 x 900 pixels."""
    samples, slow = outcome.samples, outcome.slow
    start_s = samples[0].at_s
    wall_s = [sample.at_s for sample in samples]
    at_s = [each - start_s for each in wall_s]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_PX / DPI, HEIGHT_PX / DPI), dpi=DPI, layout="constrained")
        panels = figure.subplots(
            len(PANEL_HEIGHTS),
            sharex=True,
            gridspec_kw={"height_ratios": PANEL_HEIGHTS, "hspace": 0.06},
        )
        for axes in panels:
            axes.axvspan(slow.start_s - start_s, slow.end_s - start_s, color=SLOW_COLOUR, zorder=0)
        lags, speeds, waiting = panels
        for job, colour in ((FREE_SECOND, FREE_COLOUR), (SECOND, FIRST_COLOUR)):
            lag = [sample.lag.get(job.name, 0) for sample in samples]
            lags.plot(at_s, lag, color=colour, linewidth=2.0)
        _mark(lags, LONGEST_LAG)
        held = [sample.rate if sample.is_held else float("nan") for sample in samples]
        for job, colour in (
            (FREE_FIRST, FREE_COLOUR),
            (FIRST, FIRST_COLOUR),
            (SECOND, SECOND_COLOUR),
        ):
            speeds.plot(at_s, rates(outcome.batches[job.name], wall_s), color=colour, linewidth=1.8)
        speeds.step(at_s, held, where="post", color=BOUND_COLOUR, linewidth=1.3, linestyle=DASHED)
        for job, colour in ((FREE_FIRST, FREE_COLOUR), (FIRST, FIRST_COLOUR)):
            lag = [sample.lag.get(job.name, 0) for sample in samples]
            waiting.plot(at_s, lag, color=colour, linewidth=2.0)
        lags.set(ylabel="records between\nthe two queries", ylim=(0, None))
        speeds.set(ylabel="records per second", ylim=(0, None))
        waiting.set(ylabel="records before\nthe first", ylim=(0, None), xlabel="seconds")
        waiting.set_xlim(at_s[0], at_s[-1])
        _label(lags, ((0.75, "without", FREE_COLOUR), (0.3, "with\nflow control", FIRST_COLOUR)))
        _label(
            speeds,
            (
                (0.86, "first,\nwithout", FREE_COLOUR),
                (0.6, "first", FIRST_COLOUR),
                (0.42, "its bound", BOUND_COLOUR),
                (0.24, "second", SECOND_COLOUR),
            ),
        )
        _label(waiting, ((0.75, "with", FIRST_COLOUR), (0.3, "without", FREE_COLOUR)))
        lags.annotate(
            f"each record takes {SECOND.slow_row_ms / SECOND.row_ms:g} times as long",
            ((slow.start_s + slow.end_s) / 2 - start_s, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, -12),
            textcoords="offset points",
            ha="center",
        )
        figure.suptitle(
            "The second query slows down: with flow control the first one waits for it",
            **{"x": 0.01, "ha": "left", "fontsize": 13, "fontweight": "bold"},
        )
        figure.savefig(path, facecolor="white")


def _mark(axes: Any, height: float) -> None:
    axes.axhline(height, color=BOUND_COLOUR, linewidth=1.3, linestyle=DASHED)


def _label(axes: Any, labels: tuple[tuple[float, str, str], ...]) -> None:
    """Write what the lines are, beside the right end of the axes; heights from 0 to 1."""
    for height, text, colour in labels:
        axes.annotate(
            text,
            (1, height),
            xycoords="axes fraction",
            xytext=(LABEL_GAP_PT, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontweight="bold",
        )
