"""Requests name so many partitions, and messages so few."""

from collections import Counter

import pytest

from proxy.cluster.kafka_client import MAX_REQUEST_PARTITIONS, chunks_by_topic, format_partitions


@pytest.mark.parametrize("count", [0, 1, MAX_REQUEST_PARTITIONS, 2 * MAX_REQUEST_PARTITIONS + 1])
def test_requests_are_bounded(count: int) -> None:
    partitions = {(f"t{number % 3}", number): number for number in range(count)}
    parts = list(chunks_by_topic(partitions))
    sizes = [sum(map(len, topics.values())) for topics in parts]
    assert sum(sizes) == count
    assert all(size == MAX_REQUEST_PARTITIONS for size in sizes[:-1])
    rows = Counter(
        ((topic, number), value)
        for topics in parts
        for topic, rows in topics.items()
        for number, value in rows
    )
    assert rows == Counter(partitions.items())


@pytest.mark.parametrize(
    ("count", "text"),
    [(1, "t-0"), (3, "t-0, t-1, t-2"), (4, "t-0, t-1, t-2 and 1 more")],
)
def test_few_partitions_are_named(count: int, text: str) -> None:
    assert format_partitions({("t", number) for number in range(count)}) == text
