"""Figure: throughput of large Fetch responses against HAProxy in TCP mode with one thread.

Targets take turns within each round, and the figure is the median of the rounds' ratios, so that
a slow moment of the machine hits both alike. The process under test has the first core to itself
(one proxy and one HAProxy are up, but only one of them has traffic); generator and client share
the other cores, and a row says so when they are the limit. HAProxy runs as installed, once
copying and once with `splice-auto`; the faster of the two is the yardstick.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.client import Load
from bench.lab import Lab, Target, open_lab, unviolated_rules
from bench.processes import BenchError
from bench.rates import GIGABYTE, rate_between
from bench.report import Row, Verdict

FIGURE = "large fetch"
CLIENT_ID = "bench-large"
TARGET_RATIO = 2.0
RESPONSE_BYTES = 1_000_000
CONNECTIONS = 2
# The first part of a trial, while windows and buffers grow, is left out.
WARM_UP_S = 0.3
# Share of the load's cores from which on generator and client count as the limit.
LOAD_FULL_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to ask: Fetch version and requests outstanding per connection."""

    version: int
    depth: int
    has_target: bool

    @property
    def title(self) -> str:
        """As printed in the table."""
        return f"1 MB, {CONNECTIONS} connections, v{self.version}, {self.depth} outstanding"


@dataclass(frozen=True, slots=True)
class Trial:
    """One short run.

    Attributes:
        bytes_per_s: throughput after the warm-up.
        cpu_s_per_gb: CPU seconds of the target per gigabyte (of the generator, if direct).
        load_busy: share of the load's cores that generator and client used, 0 to 1; near 1 they
            are the limit and not the target.

    """

    bytes_per_s: float
    cpu_s_per_gb: float
    load_busy: float


VARIANTS = (Variant(12, 1, True), Variant(12, 2, False), Variant(17, 1, False))


def measure(quick: bool) -> list[Row]:
    """Run all variants over all targets in turn and give the rows."""
    rounds, duration_s = (1, 1.0) if quick else (5, 1.5)
    with open_lab() as lab:
        direct = lab.start_generator([RESPONSE_BYTES])
        rivals = lab.start_haproxy(direct.address)
        proxy = lab.start_proxy(direct.address, unviolated_rules()).target()
        rows = []
        for variant in VARIANTS:
            targets = [proxy, *rivals, direct]
            trials: dict[str, list[Trial]] = {target.name: [] for target in targets}
            for _ in range(rounds):
                for target in targets:
                    trials[target.name].append(try_once(lab, target, direct, variant, duration_s))
            rows += _rows(variant, proxy, rivals, trials)
    return rows


def try_once(
    lab: Lab, target: Target, direct: Target, variant: Variant, duration_s: float
) -> Trial:
    """Ask one target for a while."""
    load = Load(
        CLIENT_ID,
        *target.address,
        CONNECTIONS,
        RESPONSE_BYTES,
        variant.version,
        variant.depth,
    )
    target_before, generator_before = target.usage(), direct.usage()
    outcome = lab.run_client([load], duration_s)
    target_s = target.usage().cpu_s - target_before.cpu_s
    load_s = direct.usage().cpu_s - generator_before.cpu_s + outcome.cpu_s
    times, sizes = outcome.served[0].completed_s, outcome.served[0].frame_bytes
    if not times:
        raise BenchError(f"{target.name}: no response in {duration_s} s")
    return Trial(
        rate_between(times, sizes, WARM_UP_S, duration_s).interpolated,
        target_s / (sum(sizes) / GIGABYTE),
        load_s / (duration_s * len(lab.cores.load)),
    )


def _rows(
    variant: Variant,
    proxy: Target,
    rivals: Sequence[Target],
    trials: dict[str, list[Trial]],
) -> list[Row]:
    target = f"at least {TARGET_RATIO:.1f}x" if variant.has_target else ""
    samples: dict[str, object] = {
        name: {
            "bytes_per_s": [trial.bytes_per_s for trial in found],
            "cpu_s_per_gb": [trial.cpu_s_per_gb for trial in found],
            "load_busy": [trial.load_busy for trial in found],
        }
        for name, found in trials.items()
    }
    speeds = ", ".join(
        f"{name} {_median_rate(found) / GIGABYTE:.2f}" for name, found in trials.items()
    )
    costs = ", ".join(
        f"{name} {statistics.median(trial.cpu_s_per_gb for trial in found):.2f}"
        for name, found in trials.items()
    )
    scale = [
        Row(FIGURE, "  GB/s", "", speeds, Verdict.INFO, samples),
        Row(FIGURE, "  CPU s per GB", "", costs, Verdict.INFO),
    ]
    if not rivals:
        missing = "haproxy not installed"
        return [Row(FIGURE, variant.title, target, missing, Verdict.NOT_MEASURED), *scale]
    fastest = max(rivals, key=lambda rival: _median_rate(trials[rival.name]))
    ratio = statistics.median(
        ours.bytes_per_s / theirs.bytes_per_s
        for ours, theirs in zip(trials[proxy.name], trials[fastest.name], strict=True)
    )
    verdict = Verdict.of(ratio >= TARGET_RATIO) if variant.has_target else Verdict.INFO
    measured = f"{ratio:.2f}x of {fastest.name}"
    measured += "".join(
        f"; load is the limit with {name}"
        for name in (proxy.name, fastest.name)
        if statistics.median(trial.load_busy for trial in trials[name]) > LOAD_FULL_SHARE
    )
    return [Row(FIGURE, variant.title, target, measured, verdict), *scale]


def _median_rate(trials: Sequence[Trial]) -> float:
    return statistics.median(trial.bytes_per_s for trial in trials)
