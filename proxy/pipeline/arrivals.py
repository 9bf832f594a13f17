"""What pipelines measure of Kafka's logs: how much arrives in topics, and how much waits."""

from collections import defaultdict

from proxy.progress.query_registry import QueryRegistry
from proxy.wire.topic_partition import TopicPartition

Arrived = dict[str, int]
"""By topic, how many records have arrived since its partitions became known."""

Lags = dict[tuple[str, str], int]
"""By client and topic, how many records wait for it."""


class Arrivals:
    """Counts arrivals by the progress of all queries.

    Args:
        registry: knows log ends and lag.

    """

    def __init__(self, registry: QueryRegistry) -> None:
        self._registry = registry
        self._ends: dict[TopicPartition, int] = {}
        """The log end of each partition that was known at the last time."""
        self._arrived: Arrived = {}

    def measure(self) -> tuple[Arrived, Lags]:
        """Return how much has arrived so far, and the lag as it is now."""
        ends: dict[TopicPartition, int] = {}
        lags: Lags = defaultdict(int)
        for query in self._registry.queries:
            for key, partition in query.partitions.items():
                end = partition.log.high_watermark
                if end is not None:
                    ends[key] = max(ends.get(key, 0), end)
                lag = partition.lag_records()
                if lag is not None:
                    lags[query.client_id, key[0]] += lag
        arrived: Arrived = {}
        for key, end in ends.items():
            # What was there when a partition became known has not arrived just now.
            new = max(0, end - self._ends.get(key, end))
            total = arrived.get(key[0], self._arrived.get(key[0], 0))
            arrived[key[0]] = total + new
        self._ends, self._arrived = ends, arrived
        return arrived, lags
