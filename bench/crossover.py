"""Figure: from which body length on splice beats copy; the reason behind the relay's threshold.

Two proxies take turns: one splices every body, one copies every body. No target.
"""

import statistics

from bench.client import Load
from bench.lab import Lab, Target, open_lab, unviolated_rules
from bench.rates import GIGABYTE, rate_between
from bench.report import Row, Verdict

FIGURE = "crossover"
CONNECTIONS = 2
RESPONSE_BYTES = (16_384, 32_768, 65_536, 131_072, 262_144, 1_048_576)
SPLICE_ALWAYS = 0
COPY_ALWAYS = 1 << 40
WARM_UP_S = 0.2


def measure(quick: bool) -> list[Row]:
    """Measure both ways for every length; one row each."""
    rounds, duration_s = (1, 0.5) if quick else (3, 0.8)
    sizes = RESPONSE_BYTES[::3] if quick else RESPONSE_BYTES
    with open_lab() as lab:
        direct = lab.start_generator(sizes)
        ways: dict[str, Target] = {
            name: lab.start_proxy(
                direct.address, unviolated_rules(), splice_min_bytes=threshold
            ).target()
            for name, threshold in (("splice", SPLICE_ALWAYS), ("copy", COPY_ALWAYS))
        }
        rows = []
        for size in sizes:
            rates: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, target in ways.items():
                    rates[name].append(_try(lab, target, size, duration_s))
            rows.append(_row(size, rates))
    return rows


def _try(lab: Lab, target: Target, size: int, duration_s: float) -> float:
    load = Load("bench-crossover", *target.address, CONNECTIONS, size)
    (served,) = lab.run_client([load], duration_s).served
    rate = rate_between(served.completed_s, served.frame_bytes, WARM_UP_S, duration_s)
    return rate.interpolated


def _row(size: int, rates: dict[str, list[float]]) -> Row:
    spliced, copied = statistics.median(rates["splice"]), statistics.median(rates["copy"])
    return Row(
        FIGURE,
        f"{size // 1024} KiB, {CONNECTIONS} connections",
        "",
        f"splice {spliced / GIGABYTE:.2f} GB/s, copy {copied / GIGABYTE:.2f} GB/s",
        Verdict.INFO,
        {"bytes_per_s": rates},
    )
