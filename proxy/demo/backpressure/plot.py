"""Draws both queries in one picture: batch durations, batch sizes, and what they lag behind."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from proxy.demo.backpressure.figures import LONGEST_BATCH, TRIGGER_S, Sample
from proxy.demo.plot import BOUND_COLOUR, DPI, HEIGHT_PX, STYLE, TEXT_COLOUR, WIDTH_PX
from proxy.demo.verdict import Batch, Phase

FREE_COLOUR, PRESSED_COLOUR, SLOW_COLOUR = "#8a8a86", "#d9730d", "#f3ead9"
PANEL_HEIGHTS = (3, 2, 2)


def draw(
    batches: dict[str, Sequence[Batch]], samples: Sequence[Sample], slow: Phase, path: Path
) -> None:
    """Write the picture as PNG, 1600 x 900 pixels.

    Args:
        batches: by query, first the one without backpressure, then the one with it.
        samples: what the proxy said meanwhile.
        slow: when processing was slow.
        path: of the file.

    """
    start_s = min(batch.started_s for each in batches.values() for batch in each)
    colours = dict(zip(batches, (FREE_COLOUR, PRESSED_COLOUR), strict=True))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_PX / DPI, HEIGHT_PX / DPI), dpi=DPI, layout="constrained")
        durations, sizes, lags = figure.subplots(
            3, sharex=True, gridspec_kw={"height_ratios": PANEL_HEIGHTS, "hspace": 0.06}
        )
        for axes in (durations, sizes, lags):
            axes.axvspan(slow.start_s - start_s, slow.end_s - start_s, color=SLOW_COLOUR, zorder=0)
        for query, colour in colours.items():
            of_query = batches[query]
            ends_s = [batch.ended_s - start_s for batch in of_query]
            line: dict[str, Any] = {"color": colour, "linewidth": 2.0, "marker": "o"}
            line |= {"markersize": 4, "label": f"{query} backpressure"}
            durations.plot(ends_s, [batch.duration_s for batch in of_query], **line)
            sizes.plot(ends_s, [batch.rows for batch in of_query], **line)
            at_s = [sample.at_s - start_s for sample in samples]
            lags.plot(
                at_s, [sample.lag.get(query, 0) for sample in samples], color=colour, linewidth=2.0
            )
        durations.axhline(TRIGGER_S, color=TEXT_COLOUR, linewidth=1.0)
        durations.axhline(
            LONGEST_BATCH * TRIGGER_S, color=BOUND_COLOUR, linewidth=1.3, linestyle=(0, (5, 3))
        )
        durations.set(ylabel="batch, seconds", ylim=(0, None))
        durations.legend(loc="upper right", frameon=False)
        sizes.set(ylabel="batch, rows", ylim=(0, None))
        lags.set(ylabel="lag, records", ylim=(0, None), xlabel="seconds since the first batch")
        lags.annotate(
            "processing takes 4 times as long",
            ((slow.start_s + slow.end_s) / 2 - start_s, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, -12),
            textcoords="offset points",
            ha="center",
        )
        figure.suptitle(
            f"A {TRIGGER_S:g} s trigger: with backpressure batches stay near it, without it grow",
            **{"x": 0.01, "ha": "left", "fontsize": 13, "fontweight": "bold"},
        )
        figure.savefig(path, facecolor="white")
