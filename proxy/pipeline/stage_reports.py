"""What stages report and write: batches that wait for others, and output that waits for its batch.

A stage that reads while the stage before it still writes may report its batch first. It waits until
the ranges that it read have been reported, or the stage before reports a batch that began after
this one was reported, or says that it is idle. What was not claimed then is nobody's.

What a stage writes between two reports is the output of the batch that is reported next. A restart
forgets it. The records behind those that are known are then taken for the output of the batch that
a stage reports first, if it began before this process took up the state. Some may be of its next
batch, or of others: that makes a root wait longer, and never too short. A handover knows what was
written, and hands it over.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from structlog import get_logger

from proxy.wire.topic_partition import TopicPartition

from .edges import StagePartition, TopicRange
from .graph import PipelineGraph
from .ledger import LedgerItem

MAX_WAIT_MS = 60_000.0
"""And half of the ledger's timeout: the most that a batch waits. The stage before may be dead."""

MAX_DEFERRED = 1_000
"""Batches of one stage that wait at most; beyond it the first is taken as it is."""

MAX_OUTPUTS = 10_000
"""Ranges that a stage has written since its last report; of more the oldest belong to no batch."""

LATE_MS = 60_000.0
"""The response to what is in the log at the start has passed by then: no client waits longer."""

_log = get_logger(__name__)


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
    number: int = 0
    """Its place among those that wait, kept over a restart; 0: none yet."""
    at_ms: float = 0.0
    """When it was reported, if it has a number."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.started_ms) or self.size_bytes < 0:
            raise ValueError(f"{self} cannot be")


@dataclass(slots=True)
class StageReports:
    """What is known of the reports of one stage."""

    waiting: deque[StageBatch] = field(default_factory=deque)
    settled_ms: float = -math.inf
    """All that it appended before then is reported, monotonic."""
    written: list[tuple[TopicRange, float]] = field(default_factory=list)
    """What its clients have written since its last report, and when."""
    has_reported: bool = False
    """A batch, since this process took up the state; what it wrote while a reload had left it out
    was not seen either."""
    is_crowded: bool = False
    """Whether it has written more since its last report than is kept."""


class PipelineReports:
    """What is known of the reports of one pipeline's stages.

    `known_to` is that of EdgeTable, `mark` that of Ledger.
    """

    def __init__(
        self,
        graph: PipelineGraph,
        known_to: Callable[[StagePartition], int],
        mark: Callable[[LedgerItem], None],
    ) -> None:
        self._mark = mark
        self._graph = graph
        self._known_to = known_to
        self.stages = {name: StageReports() for name in graph.stages}
        self.early: dict[int, StageBatch] = {}
        """By number, those that have a record: most need not wait."""
        self._last_number = 0
        self.forced = 0
        """Batches that were taken although it was not known what they had read."""
        self.dropped = 0
        """Batches whose stage went while they waited."""
        self.loaded_ms = -math.inf
        """When the state was taken up of an earlier process, whose batches may be under way."""
        self._counted: dict[TopicPartition, int] = {}
        """Up to where records are counted as output although nobody saw who wrote them."""

    def update(self, graph: PipelineGraph) -> None:
        """Follow a reload; batches of stages that are gone are dropped."""
        before, self._graph = self.stages, graph
        self.stages = {name: before.get(name) or StageReports() for name in graph.stages}
        for name in before.keys() - graph.stages:
            self._mark(("stage", name))
            for batch in before[name].waiting:
                self.dropped += 1
                self._forget(batch)
        for name, reports in self.stages.items():
            produces = graph.stages[name].produces
            reports.written = [each for each in reports.written if each[0].topic in produces]

    def add(self, batch: StageBatch, now_ms: float) -> None:
        """Add a batch; `ready` yields it, at once if it need not wait."""
        self._last_number += 1
        numbered = replace(batch, number=self._last_number, at_ms=now_ms)
        self.stages[batch.stage].waiting.append(numbered)

    def ready(self, now_ms: float) -> Iterator[tuple[StageBatch, bool]]:
        """Yield what need not wait, and whether its input is known; apply each before the next."""
        limit_ms = min(MAX_WAIT_MS, self._graph.settings.timeout_ms / 2)
        for stage in self._graph.order:
            queue = self.stages[stage].waiting
            while queue:
                first = queue[0]
                is_known = self._is_known(first)
                is_over = now_ms >= first.at_ms + limit_ms or len(queue) > MAX_DEFERRED
                if not (is_known or is_over):
                    break
                self._forget(queue.popleft())
                self.forced += not is_known
                yield first, is_known
                self.settle(stage, min(first.started_ms, first.at_ms))
            for batch in queue:
                if batch.number not in self.early:
                    self.early[batch.number] = batch
                    self._mark(("early", batch.number))

    def idle(self, stage: str, now_ms: float) -> None:
        """Record that a stage has nothing to do: all that it appended is reported."""
        if stage in self.stages and not self.stages[stage].waiting:
            self.settle(stage, now_ms)

    def settle(self, stage: str, time_ms: float) -> None:
        """Record that all is reported that a stage appended before that time."""
        if time_ms > self.stages[stage].settled_ms:
            self.stages[stage].settled_ms = time_ms
            self._mark(("stage", stage))

    def restore(self, batch: StageBatch) -> None:
        """Add a batch as it was; those of a stage in the order of their numbers."""
        self._last_number = max(self._last_number, batch.number)
        self.early[batch.number] = batch
        self.stages[batch.stage].waiting.append(batch)

    def wrote(self, stage: str, written: TopicRange, now_ms: float) -> None:
        """Keep what a stage has written until its batch is reported, but for what is counted."""
        counted = self._counted.get((written.topic, written.partition))
        if counted is not None and now_ms <= self.loaded_ms + LATE_MS:
            written = replace(written, start=min(max(written.start, counted), written.end))
        reports = self.stages[stage]
        reports.written.append((written, now_ms))
        if len(reports.written) > MAX_OUTPUTS:
            del reports.written[0]
            if not reports.is_crowded:  # once, not for each
                reports.is_crowded = True
                _log.warning("more is written than can be kept", stage=stage)

    def take(self, stage: str, until_ms: float) -> tuple[TopicRange, ...]:
        """Return what a stage wrote up to then, and forget it."""
        reports = self.stages[stage]
        written, reports.is_crowded = reports.written, False
        reports.written = [(each, at_ms) for each, at_ms in written if at_ms > until_ms]
        return tuple(each for each, at_ms in written if at_ms <= until_ms)

    def is_recovering(self, stage: str, started_ms: float) -> bool:
        """Return whether a batch that began then may have written what was not seen here."""
        return started_ms < self.loaded_ms and not self.stages[stage].has_reported

    def recover(
        self, stage: str, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
    ) -> tuple[TopicRange, ...]:
        """Return what only an earlier process can have seen the first batch of a stage write.

        Up to `starts` it is known who wrote; `ends` are those of the logs. What is left of the
        stage here was written since that batch.
        """
        reports, produces, ends = self.stages[stage], self._graph.stages[stage].produces, dict(ends)
        reports.has_reported = True
        for later, _ in reports.written:
            key = (later.topic, later.partition)
            ends[key] = min(ends.get(key, later.start), later.start)
        found = tuple(
            TopicRange(*key, starts[key], ends[key])
            for key in sorted(starts.keys() & ends.keys())
            if key[0] in produces and starts[key] < ends[key]
        )
        self._counted |= {(one.topic, one.partition): one.end for one in found}
        if found:
            records = sum(each.end - each.start for each in found)
            _log.info("counted what an earlier process saw", stage=stage, records=records)
        return found

    def _forget(self, batch: StageBatch) -> None:
        if self.early.pop(batch.number, None) is not None:
            self._mark(("early", batch.number))

    def _is_known(self, batch: StageBatch) -> bool:
        for read in batch.inputs:
            feeder = self._graph.feeder(batch.stage, read.topic)
            if feeder is None or read.start == read.end:
                continue
            is_settled = self.stages[feeder].settled_ms >= batch.at_ms
            key = (batch.stage, read.topic, read.partition)
            if not is_settled and read.end > self._known_to(key):
                return False
        return True
