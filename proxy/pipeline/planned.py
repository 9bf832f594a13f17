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


"""Topic and number."""


class Planned:
    """The plans of one query. Totals are offsets, added up over its partitions."""

    __slots__ = ("_asked", "_earlier")

    def __init__(self) -> None:
        self._asked: set[TopicPartition] = set()
        """What the driver has asked for, for the plan that it makes or carries out."""
        self._earlier: deque[int] = deque(maxlen=MAX_LATE)
        """What was told in all with each plan before that one; ascending."""

    def asks(self, partitions: Set[TopicPartition], told: int) -> bool:
        """Take note that the driver asks for ends; return whether it makes another plan.

        It does when it asks for the same partition again. For one plan it asks each broker that
        leads some of them.

        Args:
            partitions: that it asks for.
            told: what it was told before.

        """
        if self._asked and self._asked.isdisjoint(partitions):
            self._asked |= partitions
            return False
        self._asked = set(partitions)
        if not self._earlier or told > self._earlier[-1]:
            self._earlier.append(told)
        return True

    def reported(self) -> None:
        """Take note that a batch was reported: what is asked for next makes another plan."""
        self._asked.clear()

    def batches(self, told: int, done: int) -> int:
        """Return how many batches are planned and not reported.

        Args:
            told: what the driver was told in all.
            done: what it has completed of that.

        """
        while self._earlier and self._earlier[0] <= done:
            self._earlier.popleft()
        while self._earlier and self._earlier[-1] > told:
            self._earlier.pop()  # of a run that is over
        # The latest of them is among these when the driver was told nothing new since.
        return sum(total < told for total in self._earlier) + (told > done)
