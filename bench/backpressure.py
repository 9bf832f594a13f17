"""Figure: real Spark jobs with an adaptive rule are never worse than without one.

Real broker, real Spark (one session), one proxy. Each job runs with each way: `none` (a rule
without `adaptive`), and one for each estimator. All ways of a job read the same topics at the same
time, with their own client ids and checkpoints; the costs are sleeps then. Where a job costs
computing time they take turns, round by round, on topics of their own. Lag is the sum of the true
end offsets less what the query has completed, by its own progress events.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from uuid import uuid4

from bench.backpressure_jobs import JOBS, QUICK_JOBS, QUICK_SHARE, TRIGGER_S, Job, Kind, Phase
from bench.backpressure_judge import (
    COMPLETION_FLOOR_S,
    FIRST_BATCHES,
    FIRST_TRIGGERS,
    LAG_FLOOR,
    LEAST_BATCHES,
    LEAST_SHARE,
    LONGEST_TRIGGERS,
    MOST_RATIO,
    Figures,
    figures_of,
    lag_of,
    over_rounds,
    ratios,
    worst,
)
from bench.backpressure_run import Driver, Plan, Watch, run
from bench.lab import Lab, Proxy, Rule, open_lab
from bench.processes import BenchError
from bench.report import Row, Verdict
from examples.devkit.broker import EmbeddedBroker

FIGURE = "backpressure"
NONE = "none"
WAYS = (NONE, "pid", "cost")
CEILING = "50MiB"
"""Of every rule; no job comes near it."""
ROUNDS = 2
"""Of a job whose ways take turns; one in a quick run."""
WARM_UP = replace(JOBS["record-40"], phases=(Phase(20),))


_Runs = list[tuple[Watch, str]]
"""Each query as it was seen in one round of one way."""


@dataclass(slots=True)
class _Result:
    """What was seen of a job: by way, for each round, the runs of its queries."""

    job: Job
    rounds: dict[str, list[_Runs]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def figures(self, way: str) -> Figures:
        """Join the figures of a way's queries and rounds."""
        pairs = zip(self.rounds[way], self.rounds[NONE], strict=True)
        return over_rounds([_figures(runs, none) for runs, none in pairs])

    def drain_s(self) -> float:
        """How long the way without adaptive took at most when feeding had ended, so far."""
        return max((_drain_s(runs) for runs in self.rounds[NONE]), default=0.0)


@dataclass(slots=True)
class _Bench:
    """Where the jobs run."""

    lab: Lab
    broker: str
    proxy: Proxy
    driver: Driver

    def measure(self, job: Job, rounds: int) -> _Result:
        """Run a job with all ways. Raises BenchError when a query fails."""
        result = _Result(job)
        if job.at_once:
            self._round(result, WAYS, 0)
            return result
        for number in range(rounds):
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                self._round(result, [way], number)
        return result

    def warm_up(self) -> None:
        """Run a query that nobody looks at: Spark's first batches take longer than any later."""
        run(WARM_UP, self.driver, self.broker, Plan({"warm-up": 0}, [f"warm-up-{uuid4().hex}"]))

    def restart(self) -> None:
        """Take a new Spark driver: the old one has had a query that failed."""
        self.driver.close()
        self.driver = Driver(self.lab, self.proxy)

    def _round(self, result: _Result, ways: Sequence[str], number: int) -> None:
        job = result.job
        names = {way: _names(job, way, number) for way in ways}
        plan = Plan(
            {name: place for each in names.values() for place, name in enumerate(each)},
            [f"{job.name}-{'-'.join(ways)}-{number}-{topic}" for topic in range(job.kind.topics)],
            names.get(NONE, ()),
            result.drain_s(),
        )
        watch = run(job, self.driver, self.broker, plan)
        for way in ways:
            result.rounds[way].append([(watch, name) for name in names[way]])


def measure(quick: bool, jobs: Sequence[str] = ()) -> list[Row]:
    """Run the jobs, all of them unless some are named, and give the rows."""
    names = jobs or (QUICK_JOBS if quick else tuple(JOBS))
    chosen = [_shorter(JOBS[name]) if quick else JOBS[name] for name in names]
    rounds = 1 if quick else ROUNDS
    rows: list[Row] = []
    loads: list[float] = []
    with open_lab() as lab:
        broker = lab.enter(EmbeddedBroker(lab.work_dir / "broker"))
        host, _, port = broker.bootstrap.rpartition(":")
        rules = [rule for job in chosen for rule in _rules(job, rounds)]
        proxy = lab.start_proxy((host, int(port)), rules, pinned=False)
        bench = _Bench(lab, broker.bootstrap, proxy, Driver(lab, proxy))
        bench.warm_up()
        for job in chosen:
            loads.append(os.getloadavg()[0])
            try:
                found = _rows(bench.measure(job, rounds))
            except BenchError as error:
                found = [Row(FIGURE, job.name, "", str(error), Verdict.FAILED)]
                bench.restart()
            # All of them take long: show how far it is.
            for row in found:
                print(f"  {job.name}: {row.measured}", flush=True)
            rows += found
    return rows + _notes(max(loads))


def _shorter(job: Job) -> Job:
    """Feed for a shorter time, unless the job is about what happens when."""
    if job.slow is not None:
        return job
    phases = [replace(phase, seconds=phase.seconds * QUICK_SHARE) for phase in job.phases]
    return replace(job, phases=phases)


def _names(job: Job, way: str, number: int) -> list[str]:
    """Name the queries of a way in a round; the names are their client ids, too."""
    return [f"{job.name}-{way}-{number}-{place}" for place in range(len(job.row_costs_s))]


def _rules(job: Job, rounds: int) -> list[Rule]:
    return [
        _rule(name, way)
        for number in range(1 if job.at_once else rounds)
        for way in WAYS
        for name in _names(job, way, number)
    ]


def _rule(client_id: str, way: str) -> Rule:
    plain: Rule = {"client-id": client_id, "consumer_byte_rate": CEILING}
    if way == NONE:
        return plain
    return {**plain, "adaptive": {"batch_interval": f"{TRIGGER_S:g}s", "estimator": way}}


def _drain_s(runs: _Runs) -> float:
    return worst([figures_of(watch, query, watch.over_s) for watch, query in runs]).completion_s


def _figures(runs: _Runs, none: _Runs) -> Figures:
    """Measure a round of a way, its lag for as long as the way without adaptive had any."""
    after_s = max(TRIGGER_S, _drain_s(none))
    return worst([figures_of(watch, query, watch.fed_s + after_s) for watch, query in runs])


def _rows(result: _Result) -> list[Row]:
    job, none = result.job, result.figures(NONE)
    title = f"{job.name}: {job.says}"
    lags = f"lag {none.mean_lag:,.0f}, at most {none.max_lag:,.0f}"
    rows = [
        Row(
            FIGURE,
            title,
            "",
            f"none: {lags}; complete {_completion(none)}; {_batches(none)}",
            Verdict.INFO,
            _samples(result, NONE, none),
        )
    ]
    # What two cores need for a state store is not known before: none must have kept it itself.
    fits = job.fits if job.kind is Kind.WORK else none.share >= LEAST_SHARE
    for way in WAYS[1:]:
        found = result.figures(way)
        ratio = ratios(found, none)
        completion = "" if found.complete else "at least "
        measured = (
            f"{way}: lag {ratio.mean_lag:.2f}x, most {ratio.max_lag:.2f}x; "
            f"complete {completion}{ratio.completion:.2f}x; {_batches(found)}"
        )
        keeps = not fits or (found.share >= LEAST_SHARE and found.first <= FIRST_TRIGGERS)
        is_complete = found.complete or not none.complete
        verdict = Verdict.of(ratio.hold() and is_complete and keeps)
        if none.batches < LEAST_BATCHES:
            verdict = Verdict.NOT_MEASURED
        target = f"{MOST_RATIO}x" + (", batches" if fits else "")
        rows.append(Row(FIGURE, "", target, measured, verdict, _samples(result, way, found)))
    return rows


def _completion(figures: Figures) -> str:
    return f"{'' if figures.complete else 'not '}in {figures.completion_s:.1f} s"


def _batches(figures: Figures) -> str:
    in_time = f"{figures.share:.0%} in time, longest {figures.longest:.1f}"
    in_time += f", first {figures.first:.1f}"
    return f"batches of {figures.rows:,.0f}, {in_time}"


def _samples(result: _Result, way: str, figures: Figures) -> dict[str, object]:
    """Give the figures, and for each query of each round the batches and the lag."""
    return {
        "job": result.job.name,
        "way": way,
        "figures": asdict(figures),
        "runs": [
            {
                "query": query,
                "fed_s": watch.fed_s - watch.started_s,
                "lag": [
                    (round(at_s - watch.started_s, 2), lag) for at_s, lag in lag_of(watch, query)
                ],
                "batches": [
                    (round(batch.started_s - watch.started_s, 3), batch.duration_s, batch.rows)
                    for batch in watch.batches[query]
                ],
            }
            for runs in result.rounds[way]
            for watch, query in runs
        ],
    }


def _notes(load: float) -> list[Row]:
    notes = {
        "lag": "records, mean and most; that of `none` until it was through",
        "complete": "from the last record fed until all was processed",
        "ratios": f"to `none`; what differs by {LAG_FLOOR:g} records or {COMPLETION_FLOOR_S:g} s "
        "or less counts as 1.00x",
        "batches": f"rows in the median; within {LONGEST_TRIGGERS} triggers of {TRIGGER_S:g} s, at "
        f"least {LEAST_SHARE:.0%}, without the first {FIRST_BATCHES}; the longest in triggers; the "
        f"first at most {FIRST_TRIGGERS:g}",
        "machine": f"load average {load:.0f} at the most, {os.cpu_count()} cores: where more wants "
        "to run than there are cores, batches wait for them",
    }
    return [Row(FIGURE, f"  {what}", "", text, Verdict.INFO) for what, text in notes.items()]
