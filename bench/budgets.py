"""Figure: clients of one budget get their weighted max-min share, and together no more than it.

The proxy runs as configured by default. Each cell is a budget of its own with clients that always
want more, against water filling. What it costs is the proxy's CPU for each response, far below the
bound and at it, in rounds that take turns with the same clients under a rule of their own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.bound import KIB, MEGABYTE, size_text
from bench.client import Load
from bench.lab import Lab, Proxy, Rule, Target, open_lab
from bench.rates import most_within, rate_between
from bench.report import Row, Verdict
from proxy.quota.shares import Claim, divide_fairly

FIGURE = "budgets"
RATE = 100 * MEGABYTE
FAR_ABOVE = 100_000 * MEGABYTE
"""A budget that nobody comes near."""
TOTAL_WITHIN, SHARE_WITHIN = 0.02, 0.05
WINDOW_S, MOST_IN_WINDOW = 11.0, 1.1
NEWCOMER_WAITS_S = 0.1
COST_WITHIN = 1.10
START_S, TAIL_S = 4.0, 2.0
FULL_S, QUICK_S = 14.0, 12.0
COST_ROUND_S, ROUNDS, QUICK_ROUNDS = 4.0, 7, 2
LARGE, SMALL = 2 * MEGABYTE, 10_000


@dataclass(frozen=True, slots=True)
class Sharer:
    """A client of a budget, with what it asks for."""

    weight: float = 1.0
    guaranteed: int = 0
    ceiling: int = 0
    """0: none but the budget's."""
    connections: int = 4
    size: int = 500_000


@dataclass(frozen=True, slots=True)
class Cell:
    """A budget with its clients; of a newcomer the waits are judged, not the share."""

    name: str
    sharers: Sequence[Sharer]
    newcomer: Sharer | None = None
    rate: int = RATE
    clients: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        names = [f"{self.name}-{number}" for number in range(len(self.all_sharers))]
        object.__setattr__(self, "clients", names)

    @property
    def all_sharers(self) -> list[Sharer]:
        """With the newcomer last."""
        return [*self.sharers, *([self.newcomer] if self.newcomer else [])]

    @property
    def budget(self) -> Rule:
        """As the configuration has it."""
        return {"name": self.name, "consumer_byte_rate": self.rate}

    def rules(self) -> Iterator[Rule]:
        """Yield those of its clients."""
        for client_id, each in zip(self.clients, self.all_sharers, strict=True):
            rule: Rule = {"client-id": client_id, "budget": self.name, "weight": each.weight}
            rule |= {"guaranteed": each.guaranteed} if each.guaranteed else {}
            yield rule | ({"consumer_byte_rate": each.ceiling} if each.ceiling else {})

    def loads(self, proxy: Target) -> list[Load]:
        """Return what its clients do."""
        return [
            Load(client_id, *proxy.address, each.connections, each.size, batch_bytes=16 * KIB)
            if each.size >= 16 * KIB
            else Load(client_id, *proxy.address, each.connections, each.size)
            for client_id, each in zip(self.clients, self.all_sharers, strict=True)
        ]

    def shares(self) -> list[float]:
        """Return what its clients are to get, in bytes per second."""
        claims = [
            Claim(each.weight, each.guaranteed, each.ceiling or self.rate) for each in self.sharers
        ]
        return divide_fairly(self.rate, claims)


_ETL = {"weight": 3.0, "guaranteed": 30 * MEGABYTE, "ceiling": 75 * MEGABYTE}
CELLS = (
    Cell("two", [Sharer(3.0), Sharer()]),
    Cell("three", [Sharer(**_ETL), Sharer(), Sharer()]),  # type: ignore[arg-type]
    Cell(
        "connections",
        [Sharer(size=MEGABYTE, connections=1), Sharer(size=MEGABYTE, connections=16)],
    ),
    Cell(
        "sizes",
        [
            Sharer(size=50_000, connections=16),
            Sharer(size=500_000, connections=16),
            Sharer(size=LARGE, connections=16),
        ],
    ),
    Cell("ten", [Sharer(**_ETL), *[Sharer()] * 9]),  # type: ignore[arg-type]
    Cell("hundred", [Sharer(connections=1 + number % 4, size=100_000) for number in range(100)]),
    Cell(
        "newcomer",
        [Sharer(size=LARGE, connections=8), Sharer(size=LARGE, connections=8)],
        Sharer(size=SMALL, connections=1),
    ),
)
QUICK_CELLS = ("three", "connections", "newcomer")

BURST = "500ms"
"""As a budget has it: ten seconds' credit of a rule would pass without being held."""

_SMALL = Sharer(size=1_000, connections=16)
COSTS = {
    "a small Fetch far below the bound": Cell("below", [_SMALL], rate=FAR_ABOVE),
    "20 kB at the bound": Cell("at", [Sharer(size=20_000, connections=16)], rate=20 * MEGABYTE),
}


def measure(quick: bool) -> list[Row]:
    """Give the rows of all cells (a few when quick), and what a budget costs."""
    cells = [each for each in CELLS if not quick or each.name in QUICK_CELLS]
    with open_lab() as lab:
        generator = lab.start_generator({16 * KIB, 1_000, SMALL, 20_000})
        proxy = _proxy(lab, generator, [*cells, *COSTS.values()])
        plain = lab.start_proxy(
            generator.address,
            [
                {"client-id": client_id, "consumer_byte_rate": cell.rate}
                for cell in COSTS.values()
                for client_id in cell.clients
            ],
            burst=BURST,
        )
        rows = [row for cell in cells for row in _shares(lab, proxy.target(), cell, quick=quick)]
        rounds = QUICK_ROUNDS if quick else ROUNDS
        rows += [_cost(lab, proxy, plain, what, rounds) for what in COSTS]
    return rows


def _proxy(lab: Lab, generator: Target, cells: Sequence[Cell]) -> Proxy:
    rules = [rule for cell in cells for rule in cell.rules()]
    return lab.start_proxy(generator.address, rules, budgets=[cell.budget for cell in cells])


def _shares(lab: Lab, proxy: Target, cell: Cell, *, quick: bool) -> Iterator[Row]:
    end_s = QUICK_S if quick else FULL_S
    outcome = lab.run_client(cell.loads(proxy), end_s + TAIL_S)
    rates = [
        rate_between(served.completed_s, served.frame_bytes, START_S, end_s).interpolated
        for served in outcome.served
    ]
    done = sorted(
        pair
        for served in outcome.served
        for pair in zip(served.completed_s, served.frame_bytes, strict=True)
    )
    most = most_within([at_s for at_s, _ in done], [size for _, size in done], WINDOW_S)
    total, burst = sum(rates) / cell.rate, most / WINDOW_S / cell.rate
    yield Row(
        FIGURE,
        f"{cell.name}: total of {size_text(cell.rate)}/s",
        f"within {TOTAL_WITHIN:.0%}, at most {MOST_IN_WINDOW} in {WINDOW_S:.0f} s",
        f"{total - 1:+.2%}, {burst:.3f} in {WINDOW_S:.0f} s",
        Verdict.of(abs(total - 1) <= TOTAL_WITHIN and burst <= MOST_IN_WINDOW),
        {"bytes_per_s": rates, "most_bytes": most},
    )
    if cell.newcomer is not None:
        waits_s = outcome.served[-1].waited_s
        longest_s = max(waits_s)
        yield Row(
            FIGURE,
            f"{cell.name}: a small answer among large ones",
            f"at most {NEWCOMER_WAITS_S * 1e3:.0f} ms",
            f"median {median(waits_s) * 1e3:.0f} ms, longest {longest_s * 1e3:.0f} ms",
            Verdict.of(longest_s <= NEWCOMER_WAITS_S),
            {"waited_s": waits_s},
        )
        return
    errors = [rate / share - 1 for rate, share in zip(rates, cell.shares(), strict=True)]
    worst = max(errors, key=abs)
    yield Row(
        FIGURE,
        f"{cell.name}: {len(cell.sharers)} shares",
        f"within {SHARE_WITHIN:.0%} each",
        f"worst {worst:+.2%}",
        Verdict.of(abs(worst) <= SHARE_WITHIN),
        {"errors": errors},
    )


def _cost(lab: Lab, proxy: Proxy, plain: Proxy, what: str, rounds: int) -> Row:
    """Compare the proxy's CPU for each response with a rule's, in rounds that take turns."""
    cell = COSTS[what]
    spent: dict[str, list[float]] = {"budget": [], "rule": []}
    targets = {"budget": proxy.target(), "rule": plain.target()}
    for _ in range(rounds):
        for name, target in targets.items():
            before_s, _ = target.usage()
            outcome = lab.run_client(cell.loads(target), COST_ROUND_S)
            responses = sum(len(served.completed_s) for served in outcome.served)
            spent[name].append((target.usage()[0] - before_s) / max(responses, 1) * 1e6)
    ratios = [of / to for of, to in zip(spent["budget"], spent["rule"], strict=True)]
    return Row(
        FIGURE,
        f"CPU of {what}, budget to rule",
        f"at most {COST_WITHIN:.2f}",
        f"{median(ratios):.2f} ({median(spent['budget']):.0f} to {median(spent['rule']):.0f} µs)",
        Verdict.of(median(ratios) <= COST_WITHIN),
        {"us_per_response": spent},
    )
