"""Draws the picture of the demo: rates and bound over time, and below how long responses waited."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from proxy.demo.figures import LIMITED, UNLIMITED, Sample, seconds

MIB = 1024 * 1024

WIDTH_PX, HEIGHT_PX, DPI = 1600, 900, 160
PANEL_HEIGHTS = (3, 1)
HEADROOM = 1.15
LABEL_GAP_PT = 8
BEFORE_S = 5.0
"""How much is shown of the time before the query's first fetch."""
BAR_S = 0.8

LIMITED_COLOUR, UNLIMITED_COLOUR, BOUND_COLOUR = "#d9730d", "#4a7fb5", "#b3261e"
TEXT_COLOUR, GRID_COLOUR = "#37352f", "#e6e6e3"
STYLE = {
    "axes.edgecolor": GRID_COLOUR,
    "axes.labelcolor": TEXT_COLOUR,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "font.size": 9.5,
    "grid.color": GRID_COLOUR,
    "text.color": TEXT_COLOUR,
    "xtick.color": TEXT_COLOUR,
    "ytick.color": TEXT_COLOUR,
}


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Write the picture as PNG, 1600 x 900 pixels, of the time in which the query read."""
    shown = _while_reading(samples)
    each = seconds(shown)
    at_s = [second.at_s for second in each]
    bound = max(sample.bound_bytes for sample in shown) / MIB
    with mpl.rc_context(STYLE):
        # Not by way of pyplot: no window system, and nothing that is shared.
        figure = Figure(figsize=(WIDTH_PX / DPI, HEIGHT_PX / DPI), dpi=DPI, layout="constrained")
        rates, holds = figure.subplots(
            2, sharex=True, gridspec_kw={"height_ratios": PANEL_HEIGHTS, "hspace": 0.06}
        )
        unlimited = [second.unlimited_rate / MIB for second in each]
        limited = [second.limited_rate / MIB for second in each]
        _draw_unlimited(rates, at_s, unlimited)
        _draw_limited(rates, at_s, limited, shown)
        rates.axhline(bound, color=BOUND_COLOUR, linewidth=1.3, linestyle=(0, (5, 3)))
        _label(rates, bound, f"bound, {bound:g} MiB/s", BOUND_COLOUR)
        rates.set(ylim=(0, HEADROOM * max(bound, *unlimited, *limited)), ylabel="MiB/s")
        figure.suptitle(
            f"A Spark query is held at its quota of {bound:g} MiB/s, the client beside it is not",
            **{"x": 0.01, "ha": "left", "fontsize": 13, "fontweight": "bold"},
        )
        holds.bar(at_s, [second.throttle_s for second in each], BAR_S, color=LIMITED_COLOUR)
        holds.set(ylabel="seconds", xlabel="seconds since the query's first fetch")
        holds.set_xlim(shown[0].at_s, shown[-1].at_s)
        _label(holds, max(holds.get_ylim()) / 2, "mean hold of\na response", LIMITED_COLOUR)
        figure.savefig(path, facecolor="white")


def _while_reading(samples: Sequence[Sample]) -> list[Sample]:
    """Leave out most of Spark's start, and its end; count time from the query's first fetch."""
    total = samples[-1].limited_bytes
    start_s = max((one.at_s for one in samples if not one.limited_bytes), default=samples[0].at_s)
    last_s = next(sample.at_s for sample in samples if sample.limited_bytes == total)
    return [
        replace(sample, at_s=sample.at_s - start_s)
        for sample in samples
        if start_s - BEFORE_S <= sample.at_s <= last_s
    ]


def _draw_unlimited(axes: Any, at_s: list[float], rates: list[float]) -> None:
    axes.plot(at_s, rates, color=UNLIMITED_COLOUR, linewidth=1.6)
    _label(axes, sum(rates) / len(rates), f"{UNLIMITED}\nno quota", UNLIMITED_COLOUR)


def _draw_limited(axes: Any, at_s: list[float], rates: list[float], samples: list[Sample]) -> None:
    axes.bar(at_s, rates, 1.0, color=LIMITED_COLOUR, alpha=0.2, linewidth=0)
    axes.plot(
        [sample.at_s for sample in samples],
        [sample.rate_bytes / MIB for sample in samples],
        color=LIMITED_COLOUR,
        linewidth=2.4,
        solid_capstyle="round",
    )
    bound = max(sample.bound_bytes for sample in samples) / MIB
    text = f"{LIMITED}\nline: the proxy's measure\nbars: each second"
    _label(axes, bound / 2, text, LIMITED_COLOUR)


def _label(axes: Any, height: float, text: str, colour: str) -> None:
    """Write the text beside the right end of the axes, at this height."""
    axes.annotate(
        text,
        (1, height),
        xycoords=("axes fraction", "data"),
        xytext=(LABEL_GAP_PT, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        fontweight="bold",
    )
