"""What a batch completed, by partition, whatever number of sources it read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proxy.wire.topic_partition import TopicPartition

from .report import SourceProgress

"""Topic and partition."""


@dataclass(frozen=True, slots=True)
class BatchRange:
    """What a batch completed of a partition."""

    start: int | None
    """None when the batch says nothing of it: the first one of a query, or a new partition."""
    end: int
    """The offset behind the last one."""


def ranges_of(sources: Iterable[SourceProgress]) -> dict[TopicPartition, BatchRange]:
    """Return what a batch completed of each partition that it read to somewhere.

    A query may read one topic by several sources, each at its own offsets. What all of them have
    read counts: the lowest start (None when one has none) and the lowest end.
    """
    ranges: dict[TopicPartition, BatchRange] = {}
    for source in sources:
        starts: Mapping[str, Mapping[int, int]] = source.start or {}
        for topic, ends in source.end.items():
            of_topic = starts.get(topic, {})
            for partition, end in ends.items():
                key, span = (topic, partition), BatchRange(of_topic.get(partition), end)
                other = ranges.get(key)
                ranges[key] = span if other is None else _both(span, other)
    return ranges


def _both(one: BatchRange, other: BatchRange) -> BatchRange:
    start = None
    if one.start is not None and other.start is not None:
        start = min(one.start, other.start)
    return BatchRange(start, min(one.end, other.end))
