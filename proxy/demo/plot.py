"""Draws the picture of the demo: rates and bound over time, and below how long responses waited."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxy.demo.canvas import (
    BOUND_COLOUR,
    BOUND_LINE,
    MAIN_COLOUR,
    OTHER_COLOUR,
    label,
    picture,
)
from proxy.demo.figures import LIMITED, UNLIMITED, Sample, seconds

MIB = 1024 * 1024

PANEL_HEIGHTS = (3, 1)
HEADROOM = 1.15
BEFORE_S = 5.0
"""How much is shown of the time before the query's first fetch."""
BAR_S = 0.8


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Draw the time in which the query read."""
    shown = _while_reading(samples)
    each = seconds(shown)
    at_s = [second.at_s for second in each]
    bound = max(sample.bound_bytes for sample in shown) / MIB
    title = f"A Spark query is held at its quota of {bound:g} MiB/s, the client beside it is not"
    with picture(path, title, PANEL_HEIGHTS) as (rates, holds):
        unlimited = [second.unlimited_rate / MIB for second in each]
        limited = [second.limited_rate / MIB for second in each]
        _draw_unlimited(rates, at_s, unlimited)
        _draw_limited(rates, at_s, limited, shown)
        rates.axhline(bound, **BOUND_LINE)
        label(rates, bound, f"bound, {bound:g} MiB/s", BOUND_COLOUR, "data")
        rates.set(ylim=(0, HEADROOM * max(bound, *unlimited, *limited)), ylabel="MiB/s")
        holds.bar(at_s, [second.throttle_s for second in each], BAR_S, color=MAIN_COLOUR)
        holds.set(ylabel="seconds", xlabel="seconds since the query's first fetch")
        holds.set_xlim(shown[0].at_s, shown[-1].at_s)
        label(holds, max(holds.get_ylim()) / 2, "mean hold of\na response", MAIN_COLOUR, "data")


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
    axes.plot(at_s, rates, color=OTHER_COLOUR, linewidth=1.6)
    label(axes, sum(rates) / len(rates), f"{UNLIMITED}\nno quota", OTHER_COLOUR, "data")


def _draw_limited(axes: Any, at_s: list[float], rates: list[float], samples: list[Sample]) -> None:
    axes.bar(at_s, rates, 1.0, color=MAIN_COLOUR, alpha=0.2, linewidth=0)
    axes.plot(
        [sample.at_s for sample in samples],
        [sample.rate_bytes / MIB for sample in samples],
        color=MAIN_COLOUR,
        linewidth=2.4,
        solid_capstyle="round",
    )
    bound = max(sample.bound_bytes for sample in samples) / MIB
    text = f"{LIMITED}\nline: the proxy's measure\nbars: each second"
    label(axes, bound / 2, text, MAIN_COLOUR, "data")
