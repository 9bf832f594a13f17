"""Batches that wait until it is known what they have read.

A stage that reads while the stage before it still writes may report its batch first. It waits until
the ranges that it read have been reported, or the stage before reports a batch that began after
this one was reported, or says that it is idle. What was not claimed then is nobody's.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .edges import StagePartition, TopicRange
from .graph import PipelineGraph
from .ledger import LedgerItem

MAX_WAIT_MS = 60_000.0
"""And half of the ledger's timeout: the most that a batch waits. The stage before may be dead."""

MAX_DEFERRED = 1_000
"""Batches of one stage that wait at most; beyond it the first is taken as it is."""


@dataclass(frozen=True, slots=True)
class StageBatch:
    """One batch of a stage, finished. Raises ValueError when its time or size cannot be."""

    stage: str
    batch: int
    inputs: tuple[TopicRange, ...]
    outputs: tuple[TopicRange, ...]
    """What its clients have appended since the batch before."""
    started_ms: float
    """When it began, monotonic: all that was appended before was reported before."""
    size_bytes: int = 0
    """What it has read; counts against `max_pending` when it is a source batch."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.started_ms) or self.size_bytes < 0:
            raise ValueError(f"{self} cannot be")


@dataclass(slots=True)
class DeferredBatch:
    """A batch that waits, reported at `at_ms`; the number keeps the order over a restart."""

    number: int
    batch: StageBatch
    at_ms: float
    is_kept: bool = False
    """Whether it has a record: most need not wait."""


class DeferredBatches:
    """The batches of one pipeline that wait; `known_to` is that of EdgeTable, `mark` of Ledger."""

    def __init__(
        self,
        graph: PipelineGraph,
        known_to: Callable[[StagePartition], int],
        mark: Callable[[LedgerItem], None],
    ) -> None:
        self._mark = mark
        self._graph = graph
        self._known_to = known_to
        self.waiting: dict[int, DeferredBatch] = {}
        """By number, in that order."""
        self.settled: dict[str, float] = {}
        """By stage the time before which all that it appended is reported, monotonic."""
        self.forced = 0
        """Batches that were taken although it was not known what they had read."""
        self.dropped = 0
        """Batches whose stage went while they waited."""

    def update(self, graph: PipelineGraph) -> None:
        """Follow a reload; batches of stages that are gone are dropped."""
        self._graph = graph
        for deferred in [*self.waiting.values()]:
            if deferred.batch.stage not in graph.stages:
                self.dropped += 1
                self._remove(deferred)
        for name in self.settled.keys() - graph.stages:
            del self.settled[name]
            self._mark(("stage", name))

    def add(self, batch: StageBatch, now_ms: float) -> None:
        """Add a batch; `ready` yields it, at once if it need not wait."""
        self.restore(DeferredBatch(next(reversed(self.waiting), 0) + 1, batch, now_ms))

    def ready(self, now_ms: float) -> Iterator[tuple[StageBatch, bool]]:
        """Yield what need not wait, and whether its input is known; apply each before the next."""
        limit_ms = min(MAX_WAIT_MS, self._graph.settings.timeout_ms / 2)
        queues: dict[str, list[DeferredBatch]] = defaultdict(list)
        for deferred in self.waiting.values():
            queues[deferred.batch.stage].append(deferred)
        for stage in [name for name in self._graph.order if name in queues]:
            queue = deque(queues[stage])
            while queue:
                first = queue[0]
                is_known = self._is_known(first)
                is_over = now_ms >= first.at_ms + limit_ms or len(queue) > MAX_DEFERRED
                if not (is_known or is_over):
                    break
                self._remove(queue.popleft())
                self.forced += not is_known
                yield first.batch, is_known
                self.settle(stage, min(first.batch.started_ms, first.at_ms))
            for deferred in queue:
                if not deferred.is_kept:
                    deferred.is_kept = True
                    self._mark(("early", deferred.number))

    def idle(self, stage: str, now_ms: float) -> None:
        """Record that a stage has nothing to do: all that it appended is reported."""
        if stage in self._graph.stages and not self.waiting_of(stage):
            self.settle(stage, now_ms)

    def settle(self, stage: str, time_ms: float) -> None:
        """Record that all is reported that a stage appended before that time."""
        if time_ms > self.settled.get(stage, -math.inf):
            self.settled[stage] = time_ms
            self._mark(("stage", stage))

    def waiting_of(self, stage: str) -> int:
        """Return how many batches of a stage wait."""
        return sum(deferred.batch.stage == stage for deferred in self.waiting.values())

    def restore(self, deferred: DeferredBatch) -> None:
        """Add a batch as it was; those of a stage in the order of their numbers."""
        self.waiting[deferred.number] = deferred

    def _remove(self, deferred: DeferredBatch) -> None:
        del self.waiting[deferred.number]
        if deferred.is_kept:
            self._mark(("early", deferred.number))

    def _is_known(self, deferred: DeferredBatch) -> bool:
        stage = deferred.batch.stage
        for read in deferred.batch.inputs:
            feeder = self._graph.feeder(stage, read.topic)
            if feeder is None or read.start == read.end:
                continue
            is_settled = self.settled.get(feeder, -math.inf) >= deferred.at_ms
            if not is_settled and read.end > self._known_to((stage, read.topic, read.partition)):
                return False
        return True
