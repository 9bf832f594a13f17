"""Figure: round-trip time of a Fetch with one record of 100 bytes against HAProxy's.

One connection, one request at a time, by a blocking client. Targets take turns within each round;
the figure is the median of the rounds' ratios of p50. Generator and client have their part in
every round trip, which the direct row shows.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench import traffic
from bench.client import Load
from bench.lab import Lab, Target, open_lab, unviolated_rules
from bench.processes import BenchError
from bench.rates import quantile
from bench.report import Row, Verdict

FIGURE = "small fetch"
TARGET_RATIO = 1.2
VERSION = 12
WARM_UP_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Quantiles of one trial's round-trip times, in microseconds."""

    p50_us: float
    p95_us: float
    p99_us: float
    responses: int


def measure(quick: bool) -> list[Row]:
    """Run all targets in turn and give the rows."""
    rounds, duration_s = (1, 0.5) if quick else (9, 1.0)
    size = traffic.small_batch_bytes()
    with open_lab() as lab:
        direct = lab.start_generator([size])
        rivals = lab.start_haproxy(direct.address)
        proxy = lab.start_proxy(direct.address, unviolated_rules()).target()
        targets = [proxy, *rivals[:1], direct]
        trials: dict[str, list[RoundTrip]] = {target.name: [] for target in targets}
        for _ in range(rounds):
            for target in targets:
                trials[target.name].append(_try(lab, target, size, duration_s))
    return _rows(proxy, rivals[:1], trials)


def _try(lab: Lab, target: Target, size: int, duration_s: float) -> RoundTrip:
    load = Load("bench-small", *target.address, 1, size, VERSION)
    times_us = lab.run_client([load], duration_s, latency=True).round_trip_us
    kept = times_us[int(len(times_us) * WARM_UP_SHARE) :]
    if not kept:
        raise BenchError(f"{target.name}: no response in {duration_s} s")
    return RoundTrip(quantile(kept, 0.5), quantile(kept, 0.95), quantile(kept, 0.99), len(kept))


def _rows(proxy: Target, rivals: Sequence[Target], trials: dict[str, list[RoundTrip]]) -> list[Row]:
    what = "one 100 byte record, 1 connection: p50"
    target = f"at most {TARGET_RATIO:.1f}x"
    times = ", ".join(
        f"{name} {statistics.median(trial.p50_us for trial in found):.0f}"
        for name, found in trials.items()
    )
    samples: dict[str, object] = {
        name: {
            "p50_us": [trial.p50_us for trial in found],
            "p95_us": [trial.p95_us for trial in found],
            "p99_us": [trial.p99_us for trial in found],
            "responses": [trial.responses for trial in found],
        }
        for name, found in trials.items()
    }
    scale = Row(FIGURE, "p50 in µs", "", times, Verdict.INFO, samples)
    if not rivals:
        return [Row(FIGURE, what, target, "haproxy not installed", Verdict.NOT_MEASURED), scale]
    ratio = statistics.median(
        ours.p50_us / theirs.p50_us
        for ours, theirs in zip(trials[proxy.name], trials[rivals[0].name], strict=True)
    )
    measured = f"{ratio:.2f}x of {rivals[0].name}"
    return [Row(FIGURE, what, target, measured, Verdict.of(ratio <= TARGET_RATIO)), scale]
