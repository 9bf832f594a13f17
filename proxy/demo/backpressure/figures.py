"""What the two queries did, and whether it is what backpressure promises."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

TRIGGER_S = 2.0
LONGEST_BATCH = 1.5
"""Trigger intervals that a batch may take under backpressure, once the loop has settled."""
SETTLE_BATCHES = 5
SMALLEST_SHARE = 0.5
"""Of what an interval can process while it is slow: a batch below has spiralled down."""
MS_PER_SECOND = 1000.0


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch; times in seconds since the epoch."""

    started_s: float
    rows: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """What the proxy said at one moment, by query."""

    at_s: float
    lag: dict[str, int]
    """Records that the query has not completed."""
    bound: dict[str, float]
    """Adaptive rate, in records per second; of queries that have one."""


@dataclass(frozen=True, slots=True)
class Phase:
    """When processing was slow, in seconds since the epoch."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Claim:
    """A promise, and what was seen."""

    text: str
    seen: str
    holds: bool


def batches_of(lines: Sequence[dict[str, Any]], query: str) -> list[Batch]:
    """Return the batches that a query printed."""
    return [
        Batch(
            datetime.fromisoformat(line["started"]).timestamp(),
            line["rows"],
            line["duration_ms"] / MS_PER_SECOND,
        )
        for line in lines
        if line.get("query") == query and "batch" in line
    ]


def judge(
    free: Sequence[Batch],
    pressed: Sequence[Batch],
    slow: Phase,
    *,
    rate: float,
    slow_rate: float,
) -> list[Claim]:
    """Compare both queries with what backpressure promises.

    Args:
        free: batches of the query without an adaptive bound.
        pressed: those of the one with it.
        slow: when processing was slow.
        rate: records per second that come in.
        slow_rate: records per second that can be processed while it is slow.

    """
    settled = _during(pressed, slow)[SETTLE_BATCHES:]
    grown = _during(free, slow)
    after = [batch for batch in pressed if batch.started_s >= slow.end_s]
    longest_s = max((batch.duration_s for batch in settled), default=0.0)
    free_longest_s = max((batch.duration_s for batch in grown), default=0.0)
    fewest = min((batch.rows for batch in settled), default=0)
    floor = SMALLEST_SHARE * slow_rate * TRIGGER_S
    recovered = next(
        (index for index, batch in enumerate(after, 1) if batch.rows >= rate * TRIGGER_S), None
    )
    return [
        Claim(
            f"with backpressure a batch takes at most {LONGEST_BATCH * TRIGGER_S:g} s, "
            f"after {SETTLE_BATCHES} batches",
            f"{longest_s:.2f} s at most",
            bool(settled) and longest_s <= LONGEST_BATCH * TRIGGER_S,
        ),
        Claim(
            "without it batches grow",
            f"up to {free_longest_s:.2f} s",
            free_longest_s > LONGEST_BATCH * TRIGGER_S and free_longest_s > longest_s,
        ),
        Claim(
            f"no spiral to the minimum: a batch keeps {floor:,.0f} rows",
            f"{fewest:,} at least",
            fewest >= floor,
        ),
        Claim(
            f"after the slow time it is back at the rate of its input in {SETTLE_BATCHES} batches",
            "not at all" if recovered is None else f"in batch {recovered}",
            recovered is not None and recovered <= SETTLE_BATCHES,
        ),
    ]


def _during(batches: Sequence[Batch], phase: Phase) -> list[Batch]:
    return [batch for batch in batches if phase.start_s <= batch.started_s < phase.end_s]
