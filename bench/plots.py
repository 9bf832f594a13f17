"""Makes docs/performance.md and its picture of the samples of a bench run.

`python -m bench.plots [JSON...]` reads build/bench.json, or several files of which a later one
counts for the figures that it has. It rewrites what stands between the two marks in the page, and
draws what the files have samples of.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.loop_rounds import STALL_SUFFIX
from examples.demo.canvas import (
    BOUND_LINE,
    DPI,
    FREE_COLOUR,
    GRID_COLOUR,
    MAIN_COLOUR,
    OTHER_COLOUR,
    TEXT_COLOUR,
)
from examples.devkit.jars import KAFKA_VERSION

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PICTURE = DOCS / "performance.md", DOCS / "performance.png"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
# A figure with more rows is summed up in one, beside those that miss their target.
MOST_ROWS = 12
SHOWN = {"met": "yes", "missed": "**no**", "failed": "**failed**", "not measured": "not measured"}
PANEL_INCHES = (5.2, 2.9)
PANELS_PER_LINE = 2
SMALL, TINY = 8, 7
WAY_COLOURS = {
    **{"direct": FREE_COLOUR, "proxy": MAIN_COLOUR, "haproxy": OTHER_COLOUR},
    **{"Kafka's own quota": OTHER_COLOUR, "delay": MAIN_COLOUR, "mute": FREE_COLOUR},
}
PLOTTED_BOUND, PLOTTED_CONNECTIONS = 2_500_000, 8
TOLERANCE, STALL_TARGET_MS, SPARK_TARGET = 0.02, 10.0, 1.02
MEGABYTE = 1e6
LABEL_CHARS = 40
LEGEND_ROOM = 1.35

Sample = Mapping[str, Any]
"""A row of the JSON file."""
Draw = Callable[[Any, Sequence[Sample]], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and the picture; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.plots", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="JSON", help="of `make bench`")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="only draw, to this file")
    options = parser.parse_args(arguments)
    files = options.files or [Path("build/bench.json")]
    documents = [json.loads(file.read_text()) for file in files]
    rows = merged(document["rows"] for document in documents)
    if options.picture is not None:
        draw(rows, options.picture)
        return 0
    text = [conditions(documents[-1]["machine"]), "", *tables(rows)]
    if any(document["options"].get("quick") for document in documents):
        text = ["**From a quick run: it shows that all works, and no more.**", "", *text]
    PAGE.write_text(replaced(PAGE.read_text(), text))
    draw(rows, PICTURE)
    return 0


def merged(documents: Iterable[Sequence[Sample]]) -> list[Sample]:
    """Return all rows; a figure that several documents have is taken from the last of them."""
    by_figure: dict[str, list[Sample]] = {}
    for rows in documents:
        found: dict[str, list[Sample]] = {}
        for row in rows:
            found.setdefault(row["figure"], []).append(row)
        by_figure |= found
    return [row for rows in by_figure.values() for row in rows]


def replaced(page: str, lines: Iterable[str]) -> str:
    """Return the page with these lines between its marks. Raises ValueError without marks."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    text = "\n".join([BEGIN, *lines, END])
    page, found = pattern.subn(lambda _: text, page)
    if found != 1:
        raise ValueError(f"the page must have {BEGIN} and {END} once")
    return page


def conditions(machine: Mapping[str, Any]) -> str:
    """Say what was measured on: how many cores, and which versions."""
    packages = {name: version for name, version in machine["packages"].items() if version}
    names = [f"Python {machine['python']}", f"Kafka {KAFKA_VERSION}"]
    names += [f"{name} {version}" for name, version in packages.items()]
    haproxy = re.search(r"version (\d[\d.]*)", machine["haproxy"] or "")
    names += [f"HAProxy {haproxy[1]}"] if haproxy else []
    java = re.search(r'"([\d.]+)', machine["java"] or "")
    names += [f"Java {java[1]}"] if java else []
    return f"Measured on {machine['cores']} cores, with {', '.join(names)}."


def tables(rows: Sequence[Sample]) -> Iterator[str]:
    """Yield one table with all figures, in the order of the rows."""
    yield "| figure | what | measured | goal | met |"
    yield "|---|---|---|---|---|"
    for figure in dict.fromkeys(row["figure"] for row in rows):
        of_figure = [row for row in rows if row["figure"] == figure]
        name = f"`{figure}`"
        if len(of_figure) > MOST_ROWS:
            judged = [row for row in of_figure if row["verdict"] != "info"]
            met = sum(row["verdict"] == "met" for row in judged)
            every = SHOWN["met" if met == len(judged) else "missed"]
            yield _line(name, "all cases", f"{met} of {len(judged)} as aimed at", "all", every)
            name = ""
            of_figure = [row for row in judged if row["verdict"] != "met"]
        for row in of_figure:
            shown = SHOWN.get(row["verdict"], "")
            yield _line(name, row["what"], row["measured"], row["target"], shown)
            name = ""


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.strip().replace('|', '/') for cell in cells)} |"


def draw(rows: Sequence[Sample], path: Path) -> None:
    """Write a PNG with a panel for each of the figures that there are samples of."""
    found = {figure: [row for row in rows if row["figure"] == figure] for figure in PANELS}
    present = {
        figure: [row for row in of_figure if row["samples"]]
        for figure, of_figure in found.items()
        if any(row["samples"] for row in of_figure)
    }
    columns = max(1, min(len(present), PANELS_PER_LINE))
    lines = max(1, -(-len(present) // columns))
    size = (columns * PANEL_INCHES[0], lines * PANEL_INCHES[1])
    # Not by way of pyplot: no window system, and nothing that is shared.
    figure = Figure(figsize=size, dpi=DPI / 2, layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in panels[len(present) :]:
        axes.set_axis_off()
    for axes, (name, of_figure) in zip(panels, present.items(), strict=False):
        title, fill = PANELS[name]
        axes.set_title(title, loc="left", fontsize=SMALL, color=TEXT_COLOUR)
        axes.tick_params(labelsize=TINY)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=GRID_COLOUR)
        axes.set_axisbelow(True)
        fill(axes, of_figure)
    figure.savefig(path, facecolor="white")


def _draw_clients(axes: Any, rows: Sequence[Sample]) -> None:
    """Draw throughput as a share of that without anything between."""
    ways = list(rows[0]["samples"]["bytes_per_s"])
    height = 0.8 / len(ways)
    for number, way in enumerate(ways):
        shares = [
            _median(row["samples"]["bytes_per_s"][way])
            / _median(row["samples"]["bytes_per_s"][ways[0]])
            for row in rows
        ]
        places = [place + number * height for place in range(len(rows))]
        axes.barh(places, shares, height, color=WAY_COLOURS[way], label=way)
    middle = (len(ways) - 1) / 2 * height
    axes.set_yticks([place + middle for place in range(len(rows))], [row["what"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("throughput, share of direct", fontsize=TINY)
    axes.set_xlim(0, LEGEND_ROOM * axes.get_xlim()[1])
    axes.legend(fontsize=TINY, frameon=False, loc="center right")


def _draw_own_quota(axes: Any, rows: Sequence[Sample]) -> None:
    """Draw what came in each second with one bound and number of connections."""

    def distance(row: Sample) -> tuple[float, int]:
        samples = row["samples"]
        bound, connections = samples["bound_bytes_per_s"], samples["connections"]
        return abs(bound - PLOTTED_BOUND), abs(connections - PLOTTED_CONNECTIONS)

    row = min(rows, key=distance)
    for way, seconds in row["samples"]["bytes_in_each_second"].items():
        megabytes = [each / MEGABYTE for each in seconds]
        axes.step(range(len(seconds)), megabytes, label=way, color=WAY_COLOURS[way], linewidth=1.2)
    axes.axhline(row["samples"]["bound_bytes_per_s"] / MEGABYTE, **BOUND_LINE)
    axes.set_yscale("symlog", linthresh=1)
    axes.set(ylim=(0, None))
    axes.set_xlabel(f"seconds; {row['what']}", fontsize=TINY)
    axes.set_ylabel("MB in a second", fontsize=TINY)
    axes.legend(fontsize=TINY, frameon=False)


def _draw_bound(axes: Any, rows: Sequence[Sample]) -> None:
    """Draw by how much each case is off its bound."""
    for mode in dict.fromkeys(row["samples"]["mode"] for row in rows):
        samples = [row["samples"] for row in rows if row["samples"]["mode"] == mode]
        axes.scatter(
            [each["bound_bytes_per_s"] for each in samples],
            [
                100 * (each["interpolated_bytes_per_s"] / each["bound_bytes_per_s"] - 1)
                for each in samples
            ],
            s=14,
            label=mode,
            color=WAY_COLOURS[mode],
        )
    for edge in (-TOLERANCE, TOLERANCE):
        axes.axhline(100 * edge, **BOUND_LINE)
    axes.set_xscale("log")
    axes.set_xlabel("bound, bytes per second", fontsize=TINY)
    axes.set_ylabel("off the bound, %", fontsize=TINY)
    axes.legend(fontsize=TINY, frameon=False)


def _draw_entities(axes: Any, rows: Sequence[Sample]) -> None:
    """Draw what a call costs with so many entities."""
    for row, colour in zip(rows, (MAIN_COLOUR, OTHER_COLOUR), strict=False):
        times = row["samples"]["microseconds"]
        counts = [int(count) for count in times]
        axes.plot(counts, list(map(_median, times.values())), "o-", color=colour, label=row["what"])
    axes.set_xscale("log")
    axes.set(ylim=(0, None))
    axes.set_xlabel("client quota entities", fontsize=TINY)
    axes.set_ylabel("µs for a call", fontsize=TINY)
    axes.legend(fontsize=TINY, frameon=False)


def _draw_spark(axes: Any, rows: Sequence[Sample]) -> None:
    """Draw how long Spark reads by the proxy, in times of direct; HAProxy where it was there."""
    seconds = [row["samples"]["seconds"] for row in rows]
    names = [re.sub(r"^reads [^,]*, |, medians of \d+$", "", row["what"]) for row in rows]
    axes.barh(range(len(rows)), [_ratio(each, "proxy") for each in seconds], 0.6, color=MAIN_COLOUR)
    rivals = [(at, _ratio(each, "haproxy")) for at, each in enumerate(seconds) if "haproxy" in each]
    if rivals:
        at, ratios = zip(*rivals, strict=True)
        axes.plot(ratios, at, "|", color=OTHER_COLOUR, markersize=10, label="HAProxy")
        axes.legend(fontsize=TINY, frameon=False)
    axes.set_yticks(range(len(rows)), list(map(_short, names)))
    axes.invert_yaxis()
    axes.axvline(SPARK_TARGET, **BOUND_LINE)
    axes.set_xlabel("time by the proxy, in times of direct", fontsize=TINY)


def _draw_stalls(axes: Any, rows: Sequence[Sample]) -> None:
    """Draw the longest round of the event loop for each kind of work."""
    names = [
        re.sub(r"^\d+ clients, |, [^:]*(?=: )", "", row["what"].removesuffix(STALL_SUFFIX))
        for row in rows
    ]
    axes.barh(
        range(len(rows)),
        [_median(row["samples"]["wall_ms"]) for row in rows],
        0.6,
        color=MAIN_COLOUR,
    )
    axes.set_yticks(range(len(rows)), list(map(_short, names)), fontsize=TINY - 1)
    axes.invert_yaxis()
    axes.axvline(STALL_TARGET_MS, **BOUND_LINE)
    axes.set_xscale("log")
    axes.set_xlabel("longest round of the event loop, ms", fontsize=TINY)


def _ratio(seconds: Mapping[str, Sequence[float]], way: str) -> float:
    """Return the median of the rounds' ratios to reading directly."""
    return _median(
        [each / base for each, base in zip(seconds[way], seconds["direct"], strict=True)]
    )


def _short(text: str) -> str:
    """Keep the end of a long text: it tells the rows of a figure apart."""
    return text if len(text) <= LABEL_CHARS else f"…{text[-LABEL_CHARS:]}"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


PANELS: Mapping[str, tuple[str, Draw]] = {
    "own quota": ("A bound held by Kafka itself, and by the proxy", _draw_own_quota),
    "bound": ("How far each client is from its bound", _draw_bound),
    "clients": ("What real clients get", _draw_clients),
    "spark": ("Spark reads 1 GB and drops it", _draw_spark),
    "entities": ("What a charge costs", _draw_entities),
    "stalls": ("For how long the event loop is kept from its traffic", _draw_stalls),
}

if __name__ == "__main__":
    sys.exit(main())
