"""What only an earlier process saw being written, by batches that were under way when it ended.

Nobody can say any more who wrote the records behind those that are known. They are taken for the
output of the batch that a stage reports first, if it began before this process did. Some may be of
its next batch, or of others: that makes a root wait longer, and never too short.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from proxy.wire.topic_partition import TopicPartition

from .edges import TopicRange
from .graph import StageSettings

LATE_MS = 60_000.0
"""The response to what is in the log at the start has passed by then: no client waits longer."""


class Recovery:
    """Finds the lost outputs of one pipeline, once for each stage.

    Args:
        loaded_ms: when the state of the earlier process was taken up; long ago if there was none.

    """

    def __init__(self, loaded_ms: float = -math.inf) -> None:
        self._loaded_ms = loaded_ms
        self._done: set[str] = set()
        """Stages that have reported a batch since."""
        self._counted: dict[TopicPartition, int] = {}
        """Up to where records are counted as output although nobody saw who wrote them."""

    def concerns(self, stage: StageSettings, started_ms: float) -> bool:
        """Return whether a batch that began then may have written what was not seen here."""
        return started_ms < self._loaded_ms and stage.name not in self._done

    def recover(
        self,
        stage: StageSettings,
        starts: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
        later: Iterable[TopicRange],
    ) -> tuple[TopicRange, ...]:
        """Return what the first batch of a stage is taken to have written.

        Args:
            stage: whose batch it is.
            starts: up to where it is known who wrote what.
            ends: of the logs.
            later: what the stage was seen writing since that batch.

        """
        self._done.add(stage.name)
        ends = dict(ends)
        for one in later:
            key = (one.topic, one.partition)
            ends[key] = min(ends.get(key, one.start), one.start)
        found = tuple(
            TopicRange(*key, starts[key], ends[key])
            for key in sorted(starts.keys() & ends.keys())
            if key[0] in stage.produces and starts[key] < ends[key]
        )
        self._counted |= {(one.topic, one.partition): one.end for one in found}
        return found

    def left_of(self, written: TopicRange, now_ms: float) -> TopicRange:
        """Return what of a range, seen being written now, was not counted by `recover`.

        Its response may come after the log's end was asked for.
        """
        if not self._counted or now_ms > self._loaded_ms + LATE_MS:
            return written
        counted = self._counted.get((written.topic, written.partition), 0)
        return replace(written, start=min(max(written.start, counted), written.end))
