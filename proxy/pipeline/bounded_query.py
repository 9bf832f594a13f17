"""What pipelines need of a query whose rule is adaptive."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from proxy.wire.topic_partition import TopicPartition


class OfferedEnd(Protocol):
    """What a driver was told of the end of a partition."""

    @property
    def offset(self) -> int:
        """The end that it was told."""

    @property
    def idle_offset(self) -> int:
        """All below had been read when the query was idle."""


class BatchClamp(Protocol):
    """What bounds the batches of a query."""

    @property
    def advertised(self) -> Mapping[TopicPartition, OfferedEnd]:
        """What its drivers were told."""

    @property
    def offsets_per_record(self) -> float:
        """At least 1."""

    @property
    def least_offsets(self) -> int:
        """What a batch has at least."""


class BoundedQuery(Protocol):
    """A query whose batches can be held small. None: not known yet."""

    @property
    def clamp(self) -> BatchClamp:
        """What bounds its batches."""

    @property
    def processing_rate(self) -> float | None:
        """Records/s."""

    @property
    def batch_interval_ms(self) -> float | None:
        """Between two triggers."""

    @property
    def bytes_per_record(self) -> float | None:
        """Lately."""

    @property
    def ceiling(self) -> float | None:
        """Records/s that it is held to; None when it is not."""

    def set_ceiling(self, ceiling: float | None, why: str, now_ms: float) -> None:
        """Set the ceiling."""


QueriesOf = Callable[[str], Sequence[BoundedQuery]]
"""Returns the queries of a client id whose rules are adaptive."""
