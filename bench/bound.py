"""Figure: a client's rate stays within 2 % of its bound, whatever its connections and sizes.

A cell is one client id with its own rule and 1, 4 or 32 connections that always want more. Cells
run side by side through one proxy: all of 1 and 10 MB/s together, those of 100 MB/s three at a
time, so mixed that each round carries every fetch size once.

The corner of 32 connections, 2 MB and 1 MB/s needs 64 s for one turn of all connections, so the
proxy runs with `max_delay: 120s`. Our client has no request timeout; a real one, which gives up
after 30 s, could not be run in that corner.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from bench.client import Load
from bench.lab import Lab, Target, open_lab, rule
from bench.rates import MeasuredRate, per_second, rate_between
from bench.report import Row, Verdict

FIGURE = "bound"
TOLERANCE = 0.02
VERSION = 12
MEGABYTE = 1_000_000
CONNECTIONS = (1, 4, 32)
FETCH_BYTES = (50_000, 500_000, 2_000_000)
SLOW_BOUNDS_MB = (1, 10)
FAST_BOUND_MB = 100
MAX_DELAY = "120s"
# Load goes on a little after the window, so that a completion beyond its end is seen.
TAIL_S = 2.5


@dataclass(frozen=True, slots=True)
class Cell:
    """One client id: its bound in MB/s, its connections and the length of its responses."""

    bound_mb: int
    connections: int
    fetch_bytes: int

    @property
    def client_id(self) -> str:
        """Client id that only this cell uses."""
        return f"bound{self.bound_mb}-conn{self.connections}-fetch{self.fetch_bytes}"

    @property
    def bound(self) -> float:
        """Bound in bytes per second."""
        return float(self.bound_mb * MEGABYTE)


@dataclass(frozen=True, slots=True)
class Window:
    """When the rate is measured, in seconds after the start."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell, its rate and the bytes of each second."""

    cell: Cell
    rate: MeasuredRate
    bytes_per_second: list[int]

    @property
    def error(self) -> float:
        """Share by which the rate is above (or below) the bound."""
        return self.rate.interpolated / self.cell.bound - 1


def measure(quick: bool) -> list[Row]:
    """Run every cell (a few when quick) and give one row per bound and number of connections."""
    rounds = _quick_rounds() if quick else _rounds()
    window = Window(4.0, 8.0) if quick else Window(10.0, 40.0)
    cells = [cell for together in rounds for cell in together]
    with open_lab() as lab:
        generator = lab.start_generator([(VERSION, size) for size in FETCH_BYTES])
        rules = [rule(cell.client_id, f"{cell.bound_mb}MB") for cell in cells]
        proxy = lab.start_proxy(generator.address, rules, max_delay=MAX_DELAY).target()
        measured = [found for together in rounds for found in _run(lab, proxy, together, window)]
    return _rows(measured)


def _rounds() -> list[list[Cell]]:
    slow = [Cell(*cell) for cell in product(SLOW_BOUNDS_MB, CONNECTIONS, FETCH_BYTES)]
    fast = [
        [
            Cell(FAST_BOUND_MB, connections, FETCH_BYTES[(place + turn) % len(FETCH_BYTES)])
            for place, connections in enumerate(CONNECTIONS)
        ]
        for turn in range(len(FETCH_BYTES))
    ]
    return [slow, *fast]


def _quick_rounds() -> list[list[Cell]]:
    return [[Cell(10, connections, 50_000) for connections in CONNECTIONS]]


def _run(lab: Lab, proxy: Target, cells: list[Cell], window: Window) -> Iterable[Measured]:
    host, port = proxy.address
    loads = [
        Load(cell.client_id, host, port, cell.connections, cell.fetch_bytes, VERSION)
        for cell in cells
    ]
    outcome = lab.run_client(loads, window.end_s + TAIL_S)
    for cell, size, times in zip(cells, outcome.frame_bytes, outcome.completed_s, strict=True):
        rate = rate_between(times, size, window.start_s, window.end_s)
        yield Measured(cell, rate, per_second(times, size))


def _rows(measured: list[Measured]) -> list[Row]:
    groups: dict[tuple[int, int], list[Measured]] = {}
    for found in measured:
        groups.setdefault((found.cell.bound_mb, found.cell.connections), []).append(found)
    rows = []
    for (bound_mb, connections), group in sorted(groups.items()):
        group.sort(key=lambda found: found.cell.fetch_bytes)
        rows.append(
            Row(
                FIGURE,
                f"{bound_mb} MB/s, {connections} connection{'s' if connections > 1 else ''}",
                f"within {TOLERANCE:.0%}",
                ", ".join(
                    f"{found.cell.fetch_bytes // 1000} kB {found.error:+.2%}" for found in group
                ),
                Verdict.of(all(abs(found.error) <= TOLERANCE for found in group)),
                {found.cell.client_id: _samples(found) for found in group},
            )
        )
    return rows


def _samples(found: Measured) -> dict[str, object]:
    return {
        "bound_bytes_per_s": found.cell.bound,
        "interpolated_bytes_per_s": found.rate.interpolated,
        "plain_bytes_per_s": found.rate.plain,
        "responses_in_window": found.rate.responses,
        "bytes_in_each_second": found.bytes_per_second,
    }
