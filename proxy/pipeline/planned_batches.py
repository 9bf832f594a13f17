"""Which batches a query has planned and not reported: what is under way, and how many they are.

Structured Streaming works on one batch at a time, up to the ends that its driver was told. So all
that the driver was told and has not completed is under way, and each time that it asks again the
batch before is done, though its report may be late.
"""

from collections import deque
from collections.abc import Set

from proxy.wire.topic_partition import TopicPartition

MAX_LATE = 1_000
"""Batches without a report that are told apart; where so many are late nobody reports."""


class PlannedBatches:
    """The plans of one query. Totals are offsets, added up over its partitions."""

    __slots__ = ("_earlier", "_looked_up")

    def __init__(self) -> None:
        self._looked_up: set[TopicPartition] = set()
        """What the driver has looked up, for the plan that it makes or carries out."""
        self._earlier: deque[int] = deque(maxlen=MAX_LATE)
        """What was told in all with each plan before that one; ascending."""

    def look_up(self, partitions: Set[TopicPartition], offered: int) -> bool:
        """Record that the driver looks up ends; return whether it makes another plan.

        It does when it looks up the same partition again. For one plan it asks each broker that
        leads some of them.

        Args:
            partitions: that it looks up.
            offered: what it was told before, in all.

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
        """Return how many batches are planned and not reported.

        Args:
            offered: what the driver was told in all.
            done: what it has completed of that.

        """
        while self._earlier and self._earlier[0] <= done:
            self._earlier.popleft()
        while self._earlier and self._earlier[-1] > offered:
            self._earlier.pop()  # of a run that is over
        # The latest of them is among these when the driver was told nothing new since.
        return sum(total < offered for total in self._earlier) + (offered > done)
