"""Partitions in the shape that requests have, and in messages for people."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TypeAlias, TypeVar

MAX_REQUEST_PARTITIONS = 1000
"""In one request. Kafka writes a commit as one record batch of at most 1 MiB, and an offset takes
600 bytes when group and topic have the longest names; nor may decoding hold up the event loop."""

MAX_NAMED = 3
"""So many partitions are named in a message."""

Partition: TypeAlias = tuple[str, int]
"""Topic name and partition number."""

Item = TypeVar("Item")
Value = TypeVar("Value")


def parts(items: Iterable[Item]) -> Iterator[tuple[Item, ...]]:
    """Yield the items, at most MAX_REQUEST_PARTITIONS at a time."""
    left = iter(items)
    while part := tuple(islice(left, MAX_REQUEST_PARTITIONS)):
        yield part


def requests_by_topic(
    partitions: Mapping[Partition, Value],
) -> Iterator[dict[str, list[tuple[int, Value]]]]:
    """Yield partitions in the shape of requests, at most MAX_REQUEST_PARTITIONS at a time."""
    for part in parts(partitions.items()):
        topics: dict[str, list[tuple[int, Value]]] = {}
        for (topic, number), value in part:
            topics.setdefault(topic, []).append((number, value))
        yield topics


def named(partitions: Iterable[Partition]) -> str:
    """Return the names of the first few, and how many more there are."""
    ordered = sorted(partitions)
    text = ", ".join(f"{topic}-{number}" for topic, number in ordered[:MAX_NAMED])
    more = len(ordered) - MAX_NAMED
    return f"{text} and {more} more" if more > 0 else text
