"""Batches that wait until it is known what they have read.

A stage that reads while the stage before it still writes may report its batch first. Which roots
its input belongs to is known only with the other report, so its batch waits: until the ranges that
it read have been reported, or the stage before reports a batch that began after this one was
reported, or says that it is idle. What was not claimed then is nobody's.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .graph import StageSettings
from .lane import LaneKey, TopicRange

EARLY_MS = 60_000.0
"""No batch waits longer, nor longer than half of the ledger's timeout: the stage before may be
dead, or what was read may be another producer's."""

MAX_EARLY = 1_000
"""Batches of one stage that wait at most; beyond it the first is taken as it is."""


@dataclass(frozen=True, slots=True)
class StageBatch:
    """One batch of a stage, finished. Raises ValueError when its time or size cannot be."""

    stage: str
    batch: int
    """Its number at the stage."""
    inputs: tuple[TopicRange, ...]
    """What it has completed."""
    outputs: tuple[TopicRange, ...]
    """What its clients have appended since the batch before."""
    started_ms: float
    """When it began, monotonic: all that was appended before was reported before."""
    size_bytes: int = 0
    """What it has read; counts against `max_pending` when it is a source batch."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.started_ms) or self.size_bytes < 0:
            raise ValueError(f"{self} cannot be")


@dataclass(frozen=True, slots=True)
class Early:
    """A batch that waits."""

    number: int
    """Counts up, so that the order survives a restart."""
    batch: StageBatch
    at_ms: float
    """When it was reported, monotonic."""


class EarlyBatches:
    """The batches of one pipeline that wait, in order of report for each stage.

    Args:
        stages: in topological order.
        known_to: tells up to which offset it is known who produced what waits in a lane.
        timeout_ms: of the ledger.

    """

    def __init__(
        self,
        stages: Sequence[StageSettings],
        known_to: Callable[[LaneKey], int],
        timeout_ms: float,
    ) -> None:
        self._known_to = known_to
        self._queues: dict[str, deque[Early]] = {}
        self._next = 1
        self.settled: dict[str, float] = {}
        """By stage the time before which all that it appended is reported, monotonic."""
        self.forced = 0
        """Batches that were taken although it was not known what they had read."""
        self.dropped = 0
        """Batches whose stage went while they waited."""
        self.dirty: set[int] = set()
        """Numbers of batches that came or went since this was cleared."""
        self.dirty_stages: set[str] = set()
        """Stages whose time changed since this was cleared."""
        self.update(stages, timeout_ms)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def update(self, stages: Sequence[StageSettings], timeout_ms: float) -> None:
        """Follow a reload; batches of stages that are gone are dropped."""
        self._limit_ms = min(EARLY_MS, timeout_ms / 2)
        self._rank = {stage.name: rank for rank, stage in enumerate(stages)}
        producers = {topic: stage.name for stage in stages for topic in stage.produces}
        self._feeders = {
            (stage.name, topic): producers[topic]
            for stage in stages
            for topic in stage.consumes
            if topic in producers
        }
        for name in [name for name in self._queues if name not in self._rank]:
            gone = self._queues.pop(name)
            self.dropped += len(gone)
            self.dirty.update(early.number for early in gone)
        for name in [name for name in self.settled if name not in self._rank]:
            del self.settled[name]
            self.dirty_stages.add(name)

    def add(self, batch: StageBatch, now_ms: float) -> None:
        """Take a batch; `ready` gives it out again, at once if it need not wait."""
        self.dirty.add(self._next)
        self.restore(Early(self._next, batch, now_ms))

    def ready(self, now_ms: float) -> Iterator[tuple[StageBatch, bool]]:
        """Give out the batches that need not wait, each with whether its input is known.

        One goes after those that feed it and after the earlier ones of its stage. Each must be
        applied before the next is taken.
        """
        for stage in sorted(self._queues, key=self._rank.__getitem__):
            queue = self._queues[stage]
            while queue:
                early = queue[0]
                is_known = self._is_known(early)
                is_over = now_ms >= early.at_ms + self._limit_ms or len(queue) > MAX_EARLY
                if not (is_known or is_over):
                    break
                queue.popleft()
                self.dirty ^= {early.number}  # one that came since they were written is in it
                self.forced += not is_known
                yield early.batch, is_known
                self.settle(stage, min(early.batch.started_ms, early.at_ms))
            if not queue:
                del self._queues[stage]

    def idle(self, stage: str, now_ms: float) -> None:
        """Hear that a stage has nothing to do: all that it appended is reported."""
        if stage in self._rank and stage not in self._queues:
            self.settle(stage, now_ms)

    def settle(self, stage: str, time_ms: float) -> None:
        """Take all as reported that a stage appended before that time."""
        settled_ms = self.settled.get(stage)
        if settled_ms is None or time_ms > settled_ms:
            self.settled[stage] = time_ms
            self.dirty_stages.add(stage)

    def waiting(self) -> dict[int, Early]:
        """Return the batches that wait, by number."""
        return {early.number: early for queue in self._queues.values() for early in queue}

    def waiting_of(self, stage: str) -> int:
        """Return how many batches of a stage wait."""
        return len(self._queues.get(stage, ()))

    def restore(self, early: Early) -> None:
        """Take up a batch as it was; those of a stage in the order of their numbers."""
        self._next = max(self._next, early.number + 1)
        self._queues.setdefault(early.batch.stage, deque()).append(early)

    def _is_known(self, early: Early) -> bool:
        stage = early.batch.stage
        for read in early.batch.inputs:
            feeder = self._feeders.get((stage, read.topic))
            if feeder is None or read.start == read.end:
                continue
            settled_ms = self.settled.get(feeder)
            if settled_ms is not None and settled_ms >= early.at_ms:
                continue
            if read.end > self._known_to((stage, read.topic, read.partition)):
                return False
        return True
