"""Figure: throughput of large Fetch responses with progress followed against not followed.

Two proxies stand before the same generator; one has the client in its `queries`. They take turns
within each round, as in `large_fetch`, whose load this is.
"""

import statistics

from bench.lab import open_lab, unviolated_rules
from bench.large_fetch import CLIENT_ID, RESPONSE_BYTES, VARIANTS, Trial, try_once
from bench.rates import GIGABYTE
from bench.report import Row, Verdict

FIGURE = "progress"
TARGET_RATIO = 0.95


def measure(quick: bool) -> list[Row]:
    """Run all variants over both proxies in turn and give the rows."""
    rounds, duration_s = (1, 1.0) if quick else (7, 1.5)
    rows = []
    with open_lab() as lab:
        direct = lab.start_generator([RESPONSE_BYTES])
        off = lab.start_proxy(direct.address, unviolated_rules()).target()
        queries = [{"name": CLIENT_ID}]
        on = lab.start_proxy(direct.address, unviolated_rules(), queries=queries).target()
        for variant in VARIANTS:
            found: dict[str, list[Trial]] = {"on": [], "off": []}
            for _ in range(rounds):
                for name, target in (("on", on), ("off", off)):
                    found[name].append(try_once(lab, target, direct, variant, duration_s))
            pairs = zip(found["on"], found["off"], strict=True)
            ratio = statistics.median(one.bytes_per_s / other.bytes_per_s for one, other in pairs)
            cost = ", ".join(
                f"{name} {statistics.median(trial.cpu_s_per_gb for trial in trials):.3f}"
                for name, trials in found.items()
            )
            samples: dict[str, object] = {
                name: [trial.bytes_per_s / GIGABYTE for trial in trials]
                for name, trials in found.items()
            }
            rows += [
                Row(
                    FIGURE,
                    variant.title,
                    f"at least {TARGET_RATIO}x",
                    f"{ratio:.3f}x of not followed",
                    Verdict.of(ratio >= TARGET_RATIO),
                    samples,
                ),
                Row(FIGURE, "  CPU s per GB", "", cost, Verdict.INFO),
            ]
    return rows
