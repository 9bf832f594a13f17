"""What stages write between two reports: the output of the batch that is reported next.

A restart forgets it. The records behind those that are known are then taken for the output of the
batch that a stage reports first, if it began before this process took up the state. Some may be of
its next batch, or of others: that makes a root wait longer, and never too short. A handover knows
what was written, and hands it over.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from structlog import get_logger

from proxy.wire.topic_partition import TopicPartition

from .edges import TopicRange
from .graph import StageSettings

MAX_OUTPUTS = 10_000
"""Ranges that a stage has written since its last report; of more the oldest belong to no batch."""

LATE_MS = 60_000.0
"""The response to what is in the log at the start has passed by then: no client waits longer."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenRange:
    """A range that a client of a stage has written, and when."""

    range: TopicRange
    at_ms: float


class StageOutputs:
    """What the stages of one pipeline have written since their last reports."""

    def __init__(self) -> None:
        self.ranges: dict[str, list[WrittenRange]] = defaultdict(list)
        """By stage."""
        self._loaded_ms = -math.inf
        self._reported: set[str] = set()
        """Stages that have reported a batch since."""
        self._counted: dict[TopicPartition, int] = {}
        """Up to where records are counted as output although nobody saw who wrote them."""
        self._crowded: set[str] = set()
        """Stages that have written more since their last report than is kept."""

    def take_up(self, now_ms: float) -> None:
        """Begin with the state of an earlier process, whose stages may have batches under way."""
        self._loaded_ms = now_ms

    def follow(self, stages: Mapping[str, StageSettings]) -> None:
        """Forget what the stages of a changed pipeline do not produce any more."""
        for name, written in self.ranges.items():
            produces = stages[name].produces if name in stages else ()
            self.ranges[name] = [each for each in written if each.range.topic in produces]

    def wrote(self, stage: str, written: TopicRange, now_ms: float) -> None:
        """Keep what a stage has written until its batch is reported, but for what is counted."""
        counted = self._counted.get((written.topic, written.partition))
        if counted is not None and now_ms <= self._loaded_ms + LATE_MS:
            written = replace(written, start=min(max(written.start, counted), written.end))
        outputs = self.ranges[stage]
        outputs.append(WrittenRange(written, now_ms))
        if len(outputs) > MAX_OUTPUTS:
            del outputs[0]
            if stage not in self._crowded:  # once, not for each
                self._crowded.add(stage)
                _log.warning("more is written than can be kept", stage=stage)

    def take(self, stage: str, until_ms: float) -> tuple[TopicRange, ...]:
        """Return what a stage wrote up to then, and forget it."""
        written = self.ranges.pop(stage, [])
        self._crowded.discard(stage)
        self.ranges[stage] = [each for each in written if each.at_ms > until_ms]
        return tuple(each.range for each in written if each.at_ms <= until_ms)

    def is_recovering(self, stage: str, started_ms: float) -> bool:
        """Return whether a batch that began then may have written what was not seen here."""
        return started_ms < self._loaded_ms and stage not in self._reported

    def recover(
        self,
        stage: StageSettings,
        starts: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
    ) -> tuple[TopicRange, ...]:
        """Return what only an earlier process can have seen the first batch of a stage write.

        Up to `starts` it is known who wrote; `ends` are those of the logs. What is left of the
        stage here was written since that batch.
        """
        self._reported.add(stage.name)
        ends = dict(ends)
        for later in self.ranges[stage.name]:
            key = (later.range.topic, later.range.partition)
            ends[key] = min(ends.get(key, later.range.start), later.range.start)
        found = tuple(
            TopicRange(*key, starts[key], ends[key])
            for key in sorted(starts.keys() & ends.keys())
            if key[0] in stage.produces and starts[key] < ends[key]
        )
        self._counted |= {(one.topic, one.partition): one.end for one in found}
        if found:
            records = sum(each.end - each.start for each in found)
            _log.info("counted what an earlier process saw", stage=stage.name, records=records)
        return found
