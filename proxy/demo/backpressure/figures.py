"""What the two queries did, and whether it is what backpressure promises."""

from collections.abc import Sequence

from proxy.demo.backpressure.jobs import FREE, PRESSED, SOURCE
from proxy.demo.jobs import TRIGGER_S
from proxy.demo.verdict import Batch, Claim, Outcome, Phase, Sample

LONGEST_BATCH = 1.5
"""Trigger intervals that a batch may take under backpressure, once the loop has settled."""
SETTLE_BATCHES = 5
MIN_RATE = 100.0
"""Records per second that the loop never goes below; the default of an adaptive rule."""
AWAY_FROM_MINIMUM = 2.0
"""Times the minimum that a batch keeps to, or the loop has spiralled down."""


def judge(outcome: Outcome[Sample]) -> list[Claim]:
    """Compare what both queries did with what backpressure promises."""
    slow, pressed = outcome.slow, outcome.batches[PRESSED.name]
    settled = _during(pressed, slow)[SETTLE_BATCHES:]
    grown = _during(outcome.batches[FREE.name], slow)
    after = [batch for batch in pressed if batch.started_s >= slow.end_s]
    longest_s = max((batch.duration_s for batch in settled), default=0.0)
    free_longest_s = max((batch.duration_s for batch in grown), default=0.0)
    fewest = min((batch.rows for batch in settled), default=0)
    floor = AWAY_FROM_MINIMUM * MIN_RATE * TRIGGER_S
    recovered = next(
        (number for number, batch in enumerate(after, 1) if batch.rows >= SOURCE.rate * TRIGGER_S),
        None,
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
