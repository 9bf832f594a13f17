"""Draws the demo of quotas as it runs: rates against the bound, and what is held."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from examples.demo.figures import LIMITED, UNLIMITED, Sample, rate_text, seconds
from metrics.clock import MS_PER_SECOND

BAR_WIDTH = 20
SPARKS = "▁▂▃▄▅▆▇█"
WIDEST = 80
LIMITED_STYLE, UNLIMITED_STYLE, BOUND_STYLE, DIM_STYLE = "dark_orange3", "blue", "red3", "dim"


def panel(
    samples: Sequence[Sample],
    rows: int,
    query: Mapping[str, float],
    neighbour: Mapping[str, float],
) -> RenderableType:
    """Draw the state after some samples; `rows` are to be read, the mappings are what both said."""
    latest, last = samples[-1], seconds(samples[-2:])
    bound, rate = latest.bound_bytes, latest.rate_bytes
    unlimited_rate = last[0].unlimited_rate if last else 0.0
    scale = max(bound, unlimited_rate, rate, 1.0)
    rates = _grid()
    rates.add_row(
        Text(LIMITED, LIMITED_STYLE),
        ProgressBar(scale, rate, BAR_WIDTH, complete_style=LIMITED_STYLE),
        rate_text(rate),
        Text(f"bound {rate_text(bound)}", BOUND_STYLE) if bound else "",
    )
    if bound:
        place = min(round(bound / scale * BAR_WIDTH), BAR_WIDTH) - 1
        rates.add_row("", Text(" " * max(place, 0) + "▲", BOUND_STYLE), "", "")
    rates.add_row(
        Text(UNLIMITED, UNLIMITED_STYLE),
        ProgressBar(scale, unlimited_rate, BAR_WIDTH, complete_style=UNLIMITED_STYLE),
        rate_text(unlimited_rate),
        Text(f"no quota, waits ≤ {neighbour.get('longest_wait_ms', 0):.0f} ms", DIM_STYLE),
    )
    throttle_ms = last[0].throttle_s * MS_PER_SECOND if last else 0.0
    batches = query.get("batches", 0)
    facts = _grid()
    facts.add_row("throttle time", f"{throttle_ms:.0f} ms", _sparks(samples))
    facts.add_row("delay queue", str(latest.queued), "")
    facts.add_row("held so far", str(latest.holds), f"responses, {latest.held_s:.1f} s in total")
    facts.add_row(
        "rows",
        f"{query.get('rows', 0):,}",
        f"of {rows:,}, batches: {batches}"
        if batches
        else Text("Spark starts, or is in its first batch", DIM_STYLE),
    )
    return Panel(
        Group(rates, "", facts),
        title="PySpark through Kafka Quota Proxy",
        subtitle=f"{latest.at_s - samples[0].at_s:.0f} s",
        border_style=DIM_STYLE,
        padding=(1, 2),
        width=WIDEST,
    )


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "left"):
        grid.add_column(justify=justify, no_wrap=True)
    return grid


def _sparks(samples: Sequence[Sample]) -> Text:
    """Draw the latest rates as a line of small bars, in proportion to the highest."""
    shown = [sample.rate_bytes for sample in samples[-BAR_WIDTH:]]
    top = max((*shown, samples[-1].bound_bytes, 1.0))
    line = "".join(SPARKS[round(rate / top * (len(SPARKS) - 1))] for rate in shown)
    return Text(line, LIMITED_STYLE)
