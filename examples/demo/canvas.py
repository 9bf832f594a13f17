"""The look that the demos' pictures share, and the parts that several of them have."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.figure import Figure

from examples.demo.trial import Phase

WIDTH_PX, HEIGHT_PX, DPI = 1600, 900, 160
PANEL_GAP = 0.06
LABEL_GAP_PT = 8
NOTE_DROP_PT = 12

MAIN_COLOUR, OTHER_COLOUR, FREE_COLOUR = "#d9730d", "#4a7fb5", "#8a8a86"
BOUND_COLOUR, SLOW_COLOUR = "#b3261e", "#f3ead9"
TEXT_COLOUR, GRID_COLOUR = "#37352f", "#e6e6e3"
BOUND_LINE: dict[str, Any] = {"color": BOUND_COLOUR, "linewidth": 1.3, "linestyle": (0, (5, 3))}

_STYLE = {
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


@contextmanager
def picture(path: Path, title: str, heights: Sequence[int]) -> Iterator[Any]:
    """Give the axes of panels one below the other; then write them as PNG, 1600 x 900 pixels.

    `heights` are those of the panels, in proportion.
    """
    with mpl.rc_context(_STYLE):
        # Not by way of pyplot: no window system, and nothing that is shared.
        figure = Figure(figsize=(WIDTH_PX / DPI, HEIGHT_PX / DPI), dpi=DPI, layout="constrained")
        figure.suptitle(title, **{"x": 0.01, "ha": "left", "fontsize": 13, "fontweight": "bold"})
        yield figure.subplots(
            len(heights),
            sharex=True,
            gridspec_kw={"height_ratios": heights, "hspace": PANEL_GAP},
        )
        figure.savefig(path, facecolor="white")


def shade(panels: Sequence[Any], slow: Phase, start_s: float) -> None:
    """Mark on all panels when processing was slow; their time begins at `start_s`."""
    for axes in panels:
        axes.axvspan(slow.start_s - start_s, slow.end_s - start_s, color=SLOW_COLOUR, zorder=0)


def note(axes: Any, slow: Phase, start_s: float, text: str) -> None:
    """Say at the top of the shade what is slow."""
    axes.annotate(
        text,
        ((slow.start_s + slow.end_s) / 2 - start_s, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, -NOTE_DROP_PT),
        textcoords="offset points",
        ha="center",
    )


def label(
    axes: Any, height: float, text: str, colour: str, unit: Literal["data", "axes fraction"]
) -> None:
    """Write what a line is beside the right end of the axes, at this height."""
    axes.annotate(
        text,
        (1, height),
        xycoords=("axes fraction", unit),
        xytext=(LABEL_GAP_PT, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        fontweight="bold",
    )
