"""Draws both queries in one picture: batch durations, batch sizes, and what they lag behind."""

from pathlib import Path
from typing import Any

from proxy.demo.backpressure.figures import LONGEST_BATCH
from proxy.demo.backpressure.jobs import FREE, PRESSED, ROW_MS, SLOW_ROW_MS
from proxy.demo.canvas import (
    BOUND_LINE,
    FREE_COLOUR,
    MAIN_COLOUR,
    TEXT_COLOUR,
    note,
    picture,
    shade,
)
from proxy.demo.jobs import TRIGGER_S
from proxy.demo.verdict import Outcome, Sample

PANEL_HEIGHTS = (3, 2, 2)


def draw(outcome: Outcome[Sample], path: Path) -> None:
    """Draw the whole run."""
    samples, slow = outcome.samples, outcome.slow
    start_s = min(batch.started_s for each in outcome.batches.values() for batch in each)
    at_s = [sample.at_s - start_s for sample in samples]
    title = f"A {TRIGGER_S:g} s trigger: with backpressure batches stay near it, without it grow"
    with picture(path, title, PANEL_HEIGHTS) as panels:
        durations, sizes, lags = panels
        shade(panels, slow, start_s)
        for job, colour in ((FREE, FREE_COLOUR), (PRESSED, MAIN_COLOUR)):
            batches = outcome.batches[job.name]
            ends_s = [batch.ended_s - start_s for batch in batches]
            line: dict[str, Any] = {"color": colour, "linewidth": 2.0, "marker": "o"}
            line |= {"markersize": 4, "label": f"{job.name} backpressure"}
            durations.plot(ends_s, [batch.duration_s for batch in batches], **line)
            sizes.plot(ends_s, [batch.rows for batch in batches], **line)
            lag = [sample.lag.get(job.name, 0) for sample in samples]
            lags.plot(at_s, lag, color=colour, linewidth=2.0)
        durations.axhline(TRIGGER_S, color=TEXT_COLOUR, linewidth=1.0)
        durations.axhline(LONGEST_BATCH * TRIGGER_S, **BOUND_LINE)
        durations.set(ylabel="batch, seconds", ylim=(0, None))
        durations.legend(loc="upper right", frameon=False)
        sizes.set(ylabel="batch, rows", ylim=(0, None))
        lags.set(ylabel="lag, records", ylim=(0, None), xlabel="seconds since the first batch")
        slower = f"processing takes {SLOW_ROW_MS / ROW_MS:g} times as long"
        note(lags, slow, start_s, slower)
