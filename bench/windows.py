"""Figure: no 11 s carry more than 1.1 times the bound, whatever the client did before.

A client that was quiet, or that stayed just below its bound, asks for all it can. The proxy runs
as configured by default. What a consumer gets counts when it has it, what a producer sends when
it reaches the broker. All clients run side by side through one proxy.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from bench.bound import size_text
from bench.client import ALL_IT_CAN, QUIET, Load
from bench.lab import Lab, Rule, Target, open_lab
from bench.rates import most_within, per_second, rate_between
from bench.report import Row, Verdict
from bench.traffic import Address

FIGURE = "windows"
WINDOW_S = 11.0
MOST_OF_BOUND = 1.1
TOLERANCE = 0.02
BOUND = 1_000_000
CONNECTIONS = (1, 8)
FETCH_BYTES = 1 << 20
FETCH_BATCH_BYTES = 16 << 10
PRODUCE_BYTES = 50_000
# Kafka's `max.in.flight.requests.per.connection`.
PRODUCE_DEPTH = 5
TAIL_S = 3.0


@dataclass(frozen=True, slots=True)
class Kind:
    """What a client does: it fetches, or it produces with these acks."""

    name: str
    quota: str
    acks: int | None


@dataclass(frozen=True, slots=True)
class Before:
    """What a client asks for before it asks for all it can, as a share of its bound."""

    title: str
    share: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Span:
    """How long a client asks for all it can, and after how much of that its rate is measured."""

    asked_s: float
    settled_s: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One client id."""

    kind: Kind
    connections: int
    before: Before

    @property
    def client_id(self) -> str:
        """Client id that only this cell uses."""
        return f"windows-{self.kind.name}-{self.connections}-{self.before.title}".replace(" ", "-")

    @property
    def title(self) -> str:
        """As printed in the table."""
        plural = "s" if self.connections > 1 else ""
        return f"{self.kind.name}, {self.connections} connection{plural}, {self.before.title}"

    def rule(self) -> Rule:
        """Quota rule of the client."""
        return {"client-id": self.client_id, self.kind.quota: str(BOUND)}

    def load(self, address: Address) -> Load:
        """Say what the client does through a proxy at `address`."""
        fetches = self.kind.acks is None
        return Load(
            self.client_id,
            *address,
            self.connections,
            FETCH_BYTES if fetches else PRODUCE_BYTES,
            depth=1 if fetches else PRODUCE_DEPTH,
            batch_bytes=FETCH_BATCH_BYTES,
            acks=self.kind.acks,
            paces=(
                (0.0, self.before.share * BOUND),
                (self.before.duration_s, ALL_IT_CAN),
            ),
        )


KINDS = (
    Kind("consumer", "consumer_byte_rate", None),
    Kind("producer acks=1", "producer_byte_rate", 1),
    Kind("producer acks=0", "producer_byte_rate", 0),
)


def measure(quick: bool) -> list[Row]:
    """Run every cell (without the steady ones when quick) and give a row for each."""
    quiet = Before("after quiet", QUIET, 3.0 if quick else 15.0)
    steady = Before("after 95 %", 0.95, 20.0)
    span = Span(20.0, 14.0) if quick else Span(70.0, 30.0)
    cells = [
        Cell(*cell) for cell in product(KINDS, CONNECTIONS, (quiet,) if quick else (quiet, steady))
    ]
    with open_lab() as lab:
        generator = lab.start_generator([FETCH_BATCH_BYTES], logs_answered=True)
        proxy = lab.start_proxy(generator.address, [cell.rule() for cell in cells]).target()
        return list(_run(lab, proxy, cells, span))


def _run(lab: Lab, proxy: Target, cells: Sequence[Cell], span: Span) -> Iterable[Row]:
    loads = [cell.load(proxy.address) for cell in cells]
    longest_s = max(cell.before.duration_s for cell in cells) + span.asked_s + TAIL_S
    outcome = lab.run_client(loads, longest_s)
    for cell, served in zip(cells, outcome.served, strict=True):
        if cell.kind.acks is None:
            times, sizes = served.completed_s, served.frame_bytes
        else:
            arrivals = lab.arrivals(cell.client_id)
            times = [time_s - outcome.started_s for time_s, _ in arrivals]
            sizes = [size for _, size in arrivals]
        yield _row(cell, span, times, sizes)


def _row(cell: Cell, span: Span, times: Sequence[float], sizes: Sequence[int]) -> Row:
    most = most_within(times, sizes, WINDOW_S) / (WINDOW_S * BOUND)
    from_s = cell.before.duration_s
    rate = rate_between(times, sizes, from_s + span.settled_s, from_s + span.asked_s)
    error = rate.interpolated / BOUND - 1
    return Row(
        FIGURE,
        f"{size_text(BOUND)}/s, {cell.title}",
        f"at most {MOST_OF_BOUND}x in any {WINDOW_S:.0f} s; later within {TOLERANCE:.0%}",
        f"{most:.3f}x; {error:+.2%}",
        Verdict.of(most <= MOST_OF_BOUND and abs(error) <= TOLERANCE),
        {
            "most_in_window_of_bound": most,
            "later_bytes_per_s": rate.interpolated,
            "bytes_in_each_second": per_second(times, sizes),
        },
    )
