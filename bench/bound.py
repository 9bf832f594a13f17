"""Figure: a client's rate stays within 2 % of its bound, whatever its connections and sizes.

The proxy runs as configured by default, but for the throttle mode of some cells. A cell is one
client id with its own rule and connections that always want more. Cells run side by side through
one proxy for each mode: those of up to 10 MB/s together, those of 100 MB/s two at a time, those of
200 MB/s one after another.

A request that waits for 30 s is given up by real clients (`request.timeout.ms`), so none may wait
for so long. Nothing can keep that where one record batch for each connection is more than 30 s of
the bound; no cell is like that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from bench.client import Load, Served
from bench.lab import Lab, Target, open_lab, rule
from bench.rates import MeasuredRate, quantile, rate_between
from bench.report import Row, Verdict

FIGURE = "bound"
DELAY, MUTE = "delay", "mute"
TOLERANCE = 0.02
REQUEST_TIMEOUT_S = 30.0
SHOWN_SHARE = 0.9
KIB, MIB = 1 << 10, 1 << 20
KILOBYTE, MEGABYTE = 1_000, 1_000_000
# Load goes on a little after the window, so that a completion beyond its end is seen.
TAIL_S = 3.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One client id: its bound in bytes per second, its connections and what they ask for."""

    bound: int
    connections: int
    max_bytes: int
    batch_bytes: int = 16 * KIB
    version: int = 17
    fetches_per_connection: int = 0
    mode: str = DELAY

    @property
    def client_id(self) -> str:
        """Client id that only this cell uses."""
        return (
            f"bound{self.bound}-conn{self.connections}-fetch{self.max_bytes}"
            f"-batch{self.batch_bytes}-v{self.version}-each{self.fetches_per_connection}"
            f"-{self.mode}"
        )

    @property
    def title(self) -> str:
        """As printed in the table."""
        title = (
            f"{size_text(self.bound)}/s, {self.connections} x {size_text(self.max_bytes)}, "
            f"batches {size_text(self.batch_bytes)}, v{self.version}, {self.mode}"
        )
        each = self.fetches_per_connection
        return f"{title}, connects again after {each}" if each else title


# What tasks of Spark do with Kafka's defaults, and what made clients exceed their bound.
_NAMED = (
    Cell(MIB, 32, MIB),
    Cell(MIB, 100, MIB),
    Cell(MEGABYTE, 32, 2 * MEGABYTE, version=12),
    Cell(MEGABYTE, 100, 10 * MIB),
    Cell(MEGABYTE, 1, 50 * MEGABYTE),
    Cell(100 * KILOBYTE, 200, 50 * KILOBYTE, 4 * KIB),
)
# Batches longer than what is granted, and clients that connect again instead of waiting.
_SPECIAL = (
    Cell(MEGABYTE, 4, 10 * MEGABYTE, MEGABYTE),
    Cell(100 * KILOBYTE, 1, 10 * MEGABYTE, MEGABYTE, version=12),
    Cell(MEGABYTE, 32, MIB, fetches_per_connection=1),
)
_SLOW = (
    Cell(100 * KILOBYTE, 1, 50 * KILOBYTE, version=12),
    Cell(100 * KILOBYTE, 1, 50 * MEGABYTE),
    Cell(100 * KILOBYTE, 200, 50 * MEGABYTE, 4 * KIB),
    Cell(MEGABYTE, 4, 50 * KILOBYTE, version=12),
    Cell(10 * MEGABYTE, 4, MIB),
    Cell(10 * MEGABYTE, 32, 10 * MEGABYTE, version=12),
)
_FAST = (
    (
        Cell(100 * MEGABYTE, 1, 50 * KILOBYTE),
        Cell(100 * MEGABYTE, 200, 50 * MEGABYTE, version=12),
    ),
    (
        Cell(100 * MEGABYTE, 200, 50 * KILOBYTE, version=12),
        Cell(100 * MEGABYTE, 1, 50 * MEGABYTE),
    ),
)
# Every bound with every number of connections and both modes, each asking for Kafka's default.
_CONNECTIONS = (1, 8, 64)
_GRID_SLOW = (256 * KILOBYTE, 2500 * KILOBYTE, 10 * MEGABYTE)
_GRID_FAST = 200 * MEGABYTE


@dataclass(frozen=True, slots=True)
class Together:
    """Cells of one mode that run side by side."""

    cells: Sequence[Cell]
    start_s: float
    end_s: float
    """Of the window in which the rate is measured, after the start."""

    @property
    def mode(self) -> str:
        """Throttle mode of the proxy."""
        return self.cells[0].mode


_LONG, _SHORT, _QUICK = (25.0, 90.0), (15.0, 45.0), (14.0, 20.0)
_GRID = {
    mode: [Cell(*of, MIB, mode=mode) for of in product(_GRID_SLOW, _CONNECTIONS)]
    for mode in (DELAY, MUTE)
}
_FULL_ROUNDS = (
    Together((*_NAMED, *_SPECIAL, *_SLOW, *_GRID[DELAY]), *_LONG),
    Together(_GRID[MUTE], *_LONG),
    *(Together(cells, *_LONG) for cells in _FAST),
    *(
        Together((Cell(_GRID_FAST, connections, MIB, mode=mode),), *_SHORT)
        for mode, connections in product((DELAY, MUTE), _CONNECTIONS)
    ),
)
_QUICK_ROUNDS = (
    Together(
        (*(Cell(10 * MEGABYTE, count, 50 * KILOBYTE) for count in (1, 4)), _NAMED[0]), *_QUICK
    ),
    Together((Cell(10 * MEGABYTE, 4, MIB, mode=MUTE),), *_QUICK),
)


def measure(quick: bool) -> list[Row]:
    """Run every cell (a few when quick) and give a row for each."""
    rounds = _QUICK_ROUNDS if quick else _FULL_ROUNDS
    cells = [cell for together in rounds for cell in together.cells]
    with open_lab() as lab:
        generator = lab.start_generator({cell.batch_bytes for cell in cells})
        rules = [rule(cell.client_id, str(cell.bound)) for cell in cells]
        proxies = {
            mode: lab.start_proxy(generator.address, rules, mode=mode).target()
            for mode in (DELAY, MUTE)
        }
        return [row for together in rounds for row in _run(lab, proxies[together.mode], together)]


def size_text(size: int) -> str:
    """Write a size in the largest unit that it is a whole number of."""
    units = {"MiB": MIB, "MB": MEGABYTE, "kB": KILOBYTE, "KiB": KIB}
    for unit, length in units.items():
        if size % length == 0:
            return f"{size // length} {unit}"
    return f"{size} B"


def _run(lab: Lab, proxy: Target, together: Together) -> Iterable[Row]:
    host, port = proxy.address
    loads = [
        Load(
            cell.client_id,
            host,
            port,
            cell.connections,
            cell.max_bytes,
            cell.version,
            batch_bytes=cell.batch_bytes,
            fetches_per_connection=cell.fetches_per_connection,
        )
        for cell in together.cells
    ]
    outcome = lab.run_client(loads, together.end_s + TAIL_S)
    for cell, served in zip(together.cells, outcome.served, strict=True):
        rate = rate_between(
            served.completed_s, served.frame_bytes, together.start_s, together.end_s
        )
        yield _row(cell, served, rate)


def _row(cell: Cell, served: Served, rate: MeasuredRate) -> Row:
    """Judge the rate, the waits, those without an answer included, and the batches.

    A broker cuts the last batch off where the limit is; clients drop that part and ask for the
    batch again. So a response without a whole batch is one with which a client could not go on.
    """
    sizes = served.frame_bytes
    waits = [*served.waited_s, *served.opened_s, *served.unanswered_s]
    error = rate.interpolated / cell.bound - 1
    p90_s, longest_s = quantile(waits, SHOWN_SHARE), max(waits)
    useful_share = sum(size - size % cell.batch_bytes for size in sizes) / max(sum(sizes), 1)
    shortest_bytes = min(sizes, default=0)
    has_cut_batches = shortest_bytes < cell.batch_bytes
    measured = (
        f"{error:+.2%}; waits p90 {p90_s:.2f} s, longest {longest_s:.2f} s; "
        f"{useful_share:.0%} useful"
    )
    if has_cut_batches:
        measured += "; without a whole batch"
    is_in_time = longest_s < REQUEST_TIMEOUT_S
    return Row(
        FIGURE,
        cell.title,
        f"within {TOLERANCE:.0%}, waits < {REQUEST_TIMEOUT_S:.0f} s",
        measured,
        Verdict.of(abs(error) <= TOLERANCE and is_in_time and not has_cut_batches),
        {
            "bound_bytes_per_s": cell.bound,
            "connections": cell.connections,
            "mode": cell.mode,
            "interpolated_bytes_per_s": rate.interpolated,
            "plain_bytes_per_s": rate.plain,
            "responses_in_window": rate.responses,
            "p90_wait_s": p90_s,
            "longest_wait_s": longest_s,
            "useful_share": useful_share,
            "shortest_response_bytes": shortest_bytes,
        },
    )
