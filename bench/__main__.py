"""Command line of the bench: `python -m bench [FIGURE...] [--quick] [--jobs NAMES]`."""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from bench import backpressure, bound, budgets, chaos, contests, evasion, scale, usage
from bench.backpressure_jobs import JOBS
from bench.processes import BenchError, raise_file_limit
from bench.report import Row, Verdict, print_table, write_json
from examples.devkit import DevkitError

Measure = Callable[[bool], Iterable[Row]]
FIGURES: dict[str, Measure] = {
    "bound": bound.measure,
    "budgets": budgets.measure,
    "evasion": evasion.measure,
    **{name: duel.measure for name, duel in contests.DUELS.items()},
    "scale": scale.measure,
    "usage": usage.measure,
    "chaos": chaos.measure,
    "backpressure": backpressure.measure,
}
ALONE = {"chaos"}
"""Not among all figures: it has a target of its own in the Makefile."""

# Columns of the table where the output is not a terminal.
FILE_WIDTH = 160
EXIT_MET = 0
EXIT_MISSED = 1
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the figures; returns 0, 1 for a missed target or a failure, 130 if interrupted."""
    options = _parse(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    signal.signal(signal.SIGTERM, _interrupt)
    raise_file_limit()
    figures = FIGURES | {"backpressure": partial(backpressure.measure, jobs=options.jobs)}
    rows: list[Row] = []
    try:
        for name in options.figures or [name for name in figures if name not in ALONE]:
            rows.extend(_measured(name, figures[name], options.quick, console))
    except KeyboardInterrupt:
        print_table(rows, console)
        console.print("interrupted; the table is not complete and was not saved")
        return EXIT_INTERRUPTED
    print_table(rows, console)
    write_json(options.json, rows, {"figures": options.figures, "quick": options.quick})
    console.print(f"raw samples: {options.json}")
    bad = {Verdict.FAILED} if options.quick else {Verdict.FAILED, Verdict.MISSED}
    return EXIT_MISSED if any(row.verdict in bad for row in rows) else EXIT_MET


def _measured(name: str, measure: Measure, quick: bool, console: Console) -> Iterator[Row]:
    """Run one figure; a failure becomes a row, behind those that were measured before."""
    console.print(f"measuring {name} …")
    started_s = time.monotonic()
    try:
        yield from measure(quick)
    except (BenchError, DevkitError) as error:
        console.print(str(error), markup=False)
        yield _failed(name, error)
    except Exception as error:
        console.print_exception(max_frames=4)
        yield _failed(name, error)
    finally:
        console.print(f"{name}: {time.monotonic() - started_s:.0f} s")


def _failed(name: str, error: Exception) -> Row:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return Row(name, "could not be measured", "", reason, Verdict.FAILED)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measure the proxy against its targets."
    )
    parser.add_argument(
        "figures", nargs="*", metavar="FIGURE", help=f"any of: {', '.join(FIGURES)} (default: all)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="short runs that show that everything works; a missed target is no failure",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("build/bench.json"),
        metavar="FILE",
        help="where raw samples and facts about the machine go (default: %(default)s)",
    )
    parser.add_argument(
        "--jobs",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME,...",
        help=f"of the figure backpressure, any of: {', '.join(JOBS)} (default: all)",
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.figures if name not in FIGURES]
    if unknown:
        parser.error(f"unknown figure {unknown[0]!r}; choose from {', '.join(FIGURES)}")
    unknown = [name for name in options.jobs if name not in JOBS]
    if unknown:
        parser.error(f"unknown job {unknown[0]!r}; choose from {', '.join(JOBS)}")
    return options


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
