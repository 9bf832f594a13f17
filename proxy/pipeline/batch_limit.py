"""How many records the next batch of a stage may have, so that no bound is passed.

Before a stage there is room for `max_lag` records. What waits there takes room, and so does what
the stages before are about to write: what they have planned, by records out per in, less what they
have written of it. One round of their batches fills half of it at most, shared in proportion to
their normal rates. No rate has to settle first.
"""

import math
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from proxy.wire.topic_partition import TopicPartition

ROUND_SHARE = 0.5
"""Share of `max_lag` that the batches of all stages before it may fill at a time. With all of it a
stage and the ones before it would work in turns, and never at the same time."""

MAX_LATE = 1_000
"""Batches without a report that are told apart; where so many are late nobody reports."""


@dataclass(frozen=True, slots=True)
class BatchLimit:
    """What the next batch of a stage may have at most."""

    records: int
    waits_for: str
    """The stage that makes room when it goes on."""
    reason: str
    """Part of a sentence, for people."""


@dataclass(slots=True, eq=False)
class UnreportedBatchCounter:
    """The plans of one query. Totals are offsets, added up over its partitions.

    Structured Streaming works on one batch at a time, up to the ends that its driver was told. So
    each time that the driver asks again the batch before is done, though its report may be late.
    """

    limit: BatchLimit | None = None
    """Of the latest; None: no bound."""
    _looked_up: set[TopicPartition] = field(default_factory=set)
    """What the driver has looked up, for the plan that it makes or carries out."""
    _earlier: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_LATE))
    """What was told in all with each plan before that one; ascending."""

    def look_up(self, partitions: Set[TopicPartition], offered: int) -> bool:
        """Record that the driver, told `offered` in all, asks for ends; return if for another plan.

        It does when it looks up a partition again; for one plan it asks each broker for its own.
        """
        if self._looked_up and self._looked_up.isdisjoint(partitions):
            self._looked_up |= partitions
            return False
        self._looked_up = set(partitions)
        if not self._earlier or offered > self._earlier[-1]:
            self._earlier.append(offered)
        return True

    def reported(self) -> None:
        """Record that a batch was reported: what is looked up next makes another plan."""
        self._looked_up.clear()

    def batches(self, offered: int, done: int) -> int:
        """Return how many are not reported when `done` is completed of `offered` offsets in all."""
        while self._earlier and self._earlier[0] <= done:
            self._earlier.popleft()
        while self._earlier and self._earlier[-1] > offered:
            self._earlier.pop()  # of a run that is over
        # The latest of them is among these when the driver was told nothing new since.
        return sum(total < offered for total in self._earlier) + (offered > done)


@dataclass(frozen=True, slots=True)
class UpstreamStage:
    """A stage that writes to the topics of another one."""

    weight: float
    """Its share of the room; 0: it has nothing to read and needs none."""
    records_out: float
    """Records that it writes there for one that it reads, 0 or more."""
    planned: float = 0.0
    """Records of its batches that are not reported."""
    written: int = 0
    """What it has written there since its last report."""

    @property
    def coming(self) -> float:
        """Records that it is still to write there."""
        return max(0.0, self.planned * self.records_out - self.written)


def records_that_fit(
    max_lag: int, lag: int, asking: UpstreamStage, others: Sequence[UpstreamStage], least: int = 1
) -> int | None:
    """Return how many records the next batch of the writer that asks may read; None: any number.

    A batch has `least` records at least, as one of each partition. Where `max_lag` (1 or more) has
    no room for these, so many go when nothing waits, or the stage would stand still for ever.
    """
    if asking.records_out <= 0:
        return None
    coming = asking.coming + sum(each.coming for each in others)
    whole = asking.weight + sum(each.weight for each in others)
    share = max_lag * ROUND_SHARE * (asking.weight / whole if whole > 0 else 1.0)
    # With a share below `least` nobody could go on, however much room there is.
    share = max(share - asking.coming, least * asking.records_out)
    records = math.floor(min(max_lag - lag - coming, share) / asking.records_out)
    if records >= least:
        return records
    return least if lag == 0 and coming == 0 else 0
