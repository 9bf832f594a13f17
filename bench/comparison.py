"""Compares the proxy with its rivals: trials in turn, medians of the rounds' ratios.

Within each round all lines carry the same load, one after the other, every second round backwards,
so that a slow moment of the machine hits all alike. The process under test has the first core to
itself (proxy and rivals are up, but only one of them has traffic); generator and client share the
others, and have their part in every figure: the direct line shows it.
"""

import statistics
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from bench.client import Load, Outcome
from bench.lab import Lab, Target
from bench.processes import BenchError
from bench.rates import GIGABYTE, quantile, rate_between
from bench.report import Row, Verdict

# A load that goes where the line says, under the line's client id.
anywhere = partial(Load, client_id="", host="", port=0)

US_PER_S = 1e6
# The first part of a trial, while windows and buffers grow, is left out.
WARM_UP_S = 0.2
# Share of the load's cores from which on generator and client count as the limit.
LOAD_FULL_SHARE = 0.95
# Share of the time from which on other work on the machine is told of.
WAITED_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Trial:
    """One short run.

    Attributes:
        p50_us, p99_us: of its round trips, in microseconds; of requests that get no response, of
            their ways to the broker. 0 where they are not timed.
        bytes_per_s: throughput after the warm-up.
        cpu_s_per_gb: CPU seconds of the process under test per gigabyte.
        cpu_us_each: the same per round trip, in microseconds.
        load_busy: share of the load's cores that generator and client used, 0 to 1; near 1 they
            are the limit.
        waited_share: share of the time for which other work had the core of the process under test
            while it could have run.
        version: of the requests.

    """

    p50_us: float
    p99_us: float
    bytes_per_s: float
    cpu_s_per_gb: float
    cpu_us_each: float
    load_busy: float
    waited_share: float
    version: int

    @property
    def each_per_cpu_s(self) -> float:
        """Round trips for each CPU second of the process under test; 0 where there is none."""
        return US_PER_S / self.cpu_us_each if self.cpu_us_each else 0.0


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a trial.

    Attributes:
        title: as printed.
        name: the trial's attribute.
        unit: as printed; the attribute divided by `scale`.
        grows: more is better.

    """

    title: str
    name: str
    unit: str
    digits: int = 0
    scale: float = 1.0
    grows: bool = False

    def of(self, trial: Trial) -> float:
        """Read it."""
        value: float = attrgetter(self.name)(trial)
        return value / self.scale


P50 = Metric("p50", "p50_us", "µs")
P99 = Metric("p99", "p99_us", "µs")
THROUGHPUT = Metric("throughput", "bytes_per_s", "GB/s", 2, GIGABYTE, grows=True)
CPU_PER_GB = Metric("CPU per GB", "cpu_s_per_gb", "s", 3)
CPU_EACH = Metric("CPU per round trip", "cpu_us_each", "µs")
CAPACITY = Metric("round trips per CPU second", "each_per_cpu_s", "thousand", 1, 1e3, grows=True)


@dataclass(frozen=True, slots=True)
class Line:
    """A way for a load to go.

    Attributes:
        name: as printed.
        client_id: under which the load goes there.

    """

    name: str
    target: Target
    client_id: str


@dataclass(frozen=True, slots=True)
class Goal:
    """What a line is to reach.

    Attributes:
        line: its name.
        limit: its ratio to the best of the rivals, at most or, of what grows, at least; None: it
            is only shown.

    """

    line: str
    metric: Metric
    limit: float | None = None

    @property
    def text(self) -> str:
        """As printed."""
        if self.limit is None:
            return ""
        return f"at {'least' if self.metric.grows else 'most'} {self.limit:g}x"

    def verdict(self, ratio: float) -> Verdict:
        """Judge a ratio."""
        if self.limit is None:
            return Verdict.INFO
        return Verdict.of(ratio >= self.limit if self.metric.grows else ratio <= self.limit)


@dataclass(frozen=True, slots=True)
class Contest:
    """One load on all lines.

    Attributes:
        title: as printed.
        load: what goes there; host, port and client id are the line's.
        latency: one blocking connection.
        longer: of trials, so many times: each of many connections is a newcomer first.

    """

    title: str
    load: Load
    goals: Sequence[Goal]
    latency: bool = False
    longer: float = 1.0


@dataclass(frozen=True, slots=True)
class Ring:
    """Who takes part.

    Attributes:
        direct: the generator itself.
        rivals: names of the lines that the others are compared with.
        rounds: how often each line has its turn.
        duration_s: how long each time.

    """

    lab: Lab
    direct: Target
    lines: Sequence[Line]
    rivals: Sequence[str]
    rounds: int
    duration_s: float

    def run(self, figure: str, contest: Contest) -> Iterable[Row]:
        """Run all lines in turn and give the rows of the contest."""
        trials: dict[str, list[Trial]] = {line.name: [] for line in self.lines}
        for number in range(self.rounds):
            for line in self.lines[:: -1 if number % 2 else 1]:
                trials[line.name].append(self.try_once(line, contest))
        samples: dict[str, object] = {**trials}
        for goal in contest.goals:
            yield self._row(figure, contest, goal, trials, samples)
            samples = {}

    def try_once(self, line: Line, contest: Contest) -> Trial:
        """Put the load on a line for a while."""
        host, port = line.target.address
        client_id = line.client_id
        if not contest.load.is_answered:
            # Arrivals at the broker are told apart by it.
            client_id += f"-{time.monotonic_ns()}"
        load = replace(contest.load, client_id=client_id, host=host, port=port)
        before: list[tuple[float, float]] = []
        duration_s = self.duration_s * contest.longer

        def opened() -> None:
            before.extend((line.target.usage(), self.direct.usage()))

        outcome = self.lab.run_client([load], duration_s, latency=contest.latency, opened=opened)
        (cpu_before_s, waited_before_s), (load_before_s, _) = before
        cpu_after_s, waited_after_s = line.target.usage()
        load_after_s, _ = self.direct.usage()
        cpu_s = cpu_after_s - cpu_before_s
        load_s = load_after_s - load_before_s + outcome.cpu_s
        times, waits, sizes = self._completed(load, outcome)
        if not times or times[-1] < WARM_UP_S:
            raise BenchError(f"{line.name}: too few requests in {duration_s} s")
        kept = waits[bisect_left(times, WARM_UP_S) :]
        return Trial(
            quantile(kept, 0.5) * US_PER_S if kept else 0.0,
            quantile(kept, 0.99) * US_PER_S if kept else 0.0,
            rate_between(times, sizes, WARM_UP_S, duration_s).interpolated,
            cpu_s / (sum(sizes) / GIGABYTE),
            cpu_s / len(times) * US_PER_S,
            load_s / (duration_s * len(self.lab.cores.load)),
            (waited_after_s - waited_before_s) / duration_s,
            outcome.version,
        )

    def _completed(
        self, load: Load, outcome: Outcome
    ) -> tuple[Sequence[float], Sequence[float], Sequence[int]]:
        """Return when each request was complete, how long that took, and its bytes that count."""
        served = outcome.served[0]
        if load.acks is None:
            return served.completed_s, served.waited_s, served.frame_bytes
        if load.is_answered:
            count = len(served.completed_s)
            return served.completed_s, served.waited_s, [load.max_bytes] * count
        arrivals = self.lab.arrivals(load.client_id)
        times = [time_s - outcome.started_s for time_s, _ in arrivals]
        # A blocking client sends them one after the other, and the last ones may be on their way.
        waits = [came_s - sent_s for came_s, sent_s in zip(times, served.sent_s, strict=False)]
        return times, waits, [size for _, size in arrivals]

    def _row(
        self,
        figure: str,
        contest: Contest,
        goal: Goal,
        trials: Mapping[str, Sequence[Trial]],
        samples: dict[str, object],
    ) -> Row:
        metric = goal.metric
        values = {name: [metric.of(trial) for trial in found] for name, found in trials.items()}
        medians = {name: statistics.median(found) for name, found in values.items()}
        scale = ", ".join(f"{name} {value:.{metric.digits}f}" for name, value in medians.items())
        what = f"{contest.title}, {goal.line}: {metric.title}"
        if not self.rivals:
            missing = f"haproxy not installed; {scale} {metric.unit}"
            return Row(figure, what, goal.text, missing, Verdict.NOT_MEASURED, samples)
        best = (max if metric.grows else min)(self.rivals, key=medians.__getitem__)
        ratio = statistics.median(
            ours / theirs for ours, theirs in zip(values[goal.line], values[best], strict=True)
        )
        measured = f"{ratio:.2f}x of {best}; {scale} {metric.unit}"
        measured += "".join(
            f"; load is the limit with {name}"
            for name in (goal.line, best)
            if statistics.median(trial.load_busy for trial in trials[name]) > LOAD_FULL_SHARE
        )
        versions = {name: found[-1].version for name, found in trials.items()}
        if versions[goal.line] != versions[best]:
            measured += f"; version {versions[goal.line]} against {versions[best]}"
        waited = statistics.median(trial.waited_share for trial in trials[goal.line])
        if waited > WAITED_SHARE:
            measured += f"; other work had its core for {waited:.0%} of the time"
        return Row(figure, what, goal.text, measured, goal.verdict(ratio), samples)
