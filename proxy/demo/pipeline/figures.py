"""What the queries and the proxy did, and whether it is what flow control promises."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from metrics.exposition import PREFIX
from proxy.demo import verdict
from proxy.demo.pipeline.jobs import FIRST, FREE_FIRST, FREE_SECOND, SECOND
from proxy.demo.verdict import Batch, Claim, Outcome, Phase

LONGEST_LAG = 5000
"""Records that wait for `second` at most: max_lag of the example, 2,400, and the first batch of a
run, which is not bounded."""
SETTLE_S = 20.0
"""From the start of the slow time, until rates are compared."""
NEAR = 0.25
"""Share by which the first one's rate may differ from the second one's."""
RATE_WINDOW_S = 6.0
"""Rates are those of so many seconds: some batches."""
MEDIAN, MOST = 0.5, 0.95


@dataclass(frozen=True, slots=True)
class Ledger:
    """How the source batches fared since the proxy's start."""

    completed: int
    failed: int
    """For whatever reason, time-outs too."""
    pending: int
    buckets: tuple[tuple[float, float], ...]
    """Upper bound in seconds and how many took no longer; ascending."""

    def completion_s(self, share: float) -> float:
        """Return in which time such a share was completed, as exactly as buckets can tell; NaN."""
        wanted = share * self.completed
        for (low, below), (high, count) in pairwise(((0.0, 0.0), *self.buckets)):
            if count >= wanted and count > below:
                return min(high, low + (high - low) * (wanted - below) / (count - below))
        return math.nan


@dataclass(frozen=True, slots=True)
class Sample(verdict.Sample):
    """What the proxy said at one moment; `first` is the query that may be held."""

    rate: float
    """Rate in force of `first`, in records per second; when it is not held, its normal one."""
    ledger: Ledger


def sample_of(text: str, lag: Mapping[str, int], at_s: float) -> Sample:
    """Find the sample in Prometheus' text format; what is not there is 0."""
    families = {
        family.name.removeprefix(PREFIX): family for family in text_string_to_metric_families(text)
    }
    duration = dict(_values(families, "ledger_completion_seconds", "le", "_bucket"))
    buckets = sorted((float(bound), count) for bound, count in duration.items())
    return Sample(
        at_s=at_s,
        lag=lag,
        is_held=dict(_values(families, "stage_state", "stage")).get(FIRST.name, 0.0) > 0,
        rate=dict(_values(families, "stage_rate", "stage")).get(FIRST.name, 0.0),
        ledger=Ledger(
            completed=int(max(duration.values(), default=0.0)),
            failed=int(sum(dict(_values(families, "ledger_failed", "reason", "_total")).values())),
            pending=int(sum(dict(_values(families, "ledger_pending", "pipeline")).values())),
            buckets=tuple(buckets),
        ),
    )


def rates(batches: Sequence[Batch], at_s: Sequence[float]) -> list[float]:
    """Return the records per second up to each of these times, over RATE_WINDOW_S."""
    return [_rows(batches, end_s - RATE_WINDOW_S, end_s) / RATE_WINDOW_S for end_s in at_s]


def judge(outcome: Outcome[Sample]) -> list[Claim]:
    """Compare what was seen with what flow control promises."""
    samples, slow = outcome.samples, outcome.slow
    longest, free_longest = (
        max(sample.lag.get(job.name, 0) for sample in samples) for job in (SECOND, FREE_SECOND)
    )
    start_s, end_s = slow.start_s + SETTLE_S, slow.end_s
    first, second, free_first = (
        _rows(outcome.batches[job.name], start_s, end_s) / (end_s - start_s)
        for job in (FIRST, SECOND, FREE_FIRST)
    )
    ledger, batches = samples[-1].ledger, len(outcome.batches[FIRST.name])
    median_s, most_s = ledger.completion_s(MEDIAN), ledger.completion_s(MOST)
    return [
        Claim(
            f"at most {LONGEST_LAG:,} records wait between the two",
            f"{longest:,} at most",
            longest <= LONGEST_LAG,
        ),
        Claim(
            "without flow control they grow beyond that",
            f"up to {free_longest:,}",
            free_longest > LONGEST_LAG,
        ),
        Claim(
            f"while it is slow {FIRST.name!r} is held at the rate of {SECOND.name!r}, "
            f"within {NEAR:.0%}",
            f"{first:,.0f}/s and {second:,.0f}/s; {free_first:,.0f}/s without",
            second > 0 and abs(first - second) <= NEAR * second,
        ),
        _judge_control(samples, slow),
        Claim(
            f"each of {batches:,} source batches is known to be finished",
            f"{ledger.completed:,} completed, {ledger.failed:,} failed, {ledger.pending:,} pending",
            batches > 0 and (ledger.completed, ledger.failed, ledger.pending) == (batches, 0, 0),
        ),
        Claim(
            f"the proxy tells how long that took: half of them, and {MOST:.0%}",
            f"about {median_s:.1f} s and {most_s:.1f} s",
            0 < median_s <= most_s,
        ),
    ]


def _judge_control(samples: Sequence[Sample], slow: Phase) -> Claim:
    held_s = [sample.at_s for sample in samples if sample.is_held]
    text = "control begins when it is slow, and ends afterwards"
    if not held_s:
        return Claim(text, "it did not begin", holds=False)
    after_s = min((each.at_s for each in samples if each.at_s > held_s[-1]), default=math.inf)
    return Claim(
        text,
        f"after {held_s[0] - slow.start_s:.0f} s, and {after_s - slow.end_s:.0f} s after its end",
        slow.start_s <= held_s[0] < slow.end_s < after_s < math.inf,
    )


def _rows(batches: Sequence[Batch], start_s: float, end_s: float) -> float:
    """Return how many rows were processed in a time; of batches in part, their part."""
    return sum(
        batch.rows
        * max(0.0, min(end_s, batch.ended_s) - max(start_s, batch.started_s))
        / batch.duration_s
        for batch in batches
    )


def _values(
    families: Mapping[str, Metric], name: str, label: str, suffix: str = ""
) -> Iterator[tuple[str, float]]:
    """Yield what a metric says, by one of its labels."""
    if name in families:
        for sample in families[name].samples:
            if sample.name == f"{PREFIX}{name}{suffix}":
                yield sample.labels[label], sample.value
