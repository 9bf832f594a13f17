"""What the two queries did, and whether it is what backpressure promises."""

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.demo.verdict import Batch, Claim, Phase

TRIGGER_S = 2.0
LONGEST_BATCH = 1.5
"""Trigger intervals that a batch may take under backpressure, once the loop has settled."""
SETTLE_BATCHES = 5
MIN_RATE = 100.0
"""Records per second that the loop never goes below; the default of an adaptive rule."""
AWAY_FROM_MINIMUM = 2.0
"""Times the minimum that a batch keeps to, or the loop has spiralled down."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the proxy said at one moment, by query."""

    at_s: float
    lag: dict[str, int]
    """Records that the query has not completed."""
    bound: dict[str, float]
    """Adaptive rate, in records per second; of queries that have one."""


def judge(
    free: Sequence[Batch],
    pressed: Sequence[Batch],
    slow: Phase,
    *,
    rate: float,
) -> list[Claim]:
    """Compare both queries with what backpressure promises.

    Args:
        free: batches of the query without an adaptive bound.
        pressed: those of the one with it.
        slow: when processing was slow.
        rate: records per second that come in.

    """
    settled = _during(pressed, slow)[SETTLE_BATCHES:]
    grown = _during(free, slow)
    after = [batch for batch in pressed if batch.started_s >= slow.end_s]
    longest_s = max((batch.duration_s for batch in settled), default=0.0)
    free_longest_s = max((batch.duration_s for batch in grown), default=0.0)
    fewest = min((batch.rows for batch in settled), default=0)
    floor = AWAY_FROM_MINIMUM * MIN_RATE * TRIGGER_S
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
            f"no spiral to the minimum of {MIN_RATE * TRIGGER_S:,.0f} rows",
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
