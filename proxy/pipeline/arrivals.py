"""What arrives in topics, and waits for queries, by the progress of all of them."""

from collections import defaultdict

from proxy.progress.query_registry import QueryRegistry
from proxy.wire.topic_partition import TopicPartition


class Arrivals:
    """Counts the records that arrive in topics, by the progress of all queries."""

    def __init__(self, registry: QueryRegistry) -> None:
        self._registry = registry
        self._ends: dict[TopicPartition, int] = {}
        """The log end of each partition that was known at the last time."""
        self._arrived: dict[str, int] = {}

    def measure(self) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
        """Return by topic what arrived since it became known, and by client and topic the lag."""
        ends: dict[TopicPartition, int] = {}
        lags: dict[tuple[str, str], int] = defaultdict(int)
        for query in self._registry.queries:
            for key, partition in query.partitions.items():
                end = partition.log.high_watermark
                if end is not None:
                    ends[key] = max(ends.get(key, 0), end)
                lag = partition.lag_records()
                if lag is not None:
                    lags[query.client_id, key[0]] += lag
        arrived: dict[str, int] = {}
        for key, end in ends.items():
            # What was there when a partition became known has not arrived just now.
            new = max(0, end - self._ends.get(key, end))
            arrived[key[0]] = arrived.get(key[0], self._arrived.get(key[0], 0)) + new
        self._ends, self._arrived = ends, arrived
        return arrived, lags
