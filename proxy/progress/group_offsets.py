"""Reads and writes the offsets of one consumer group, at its coordinator and without joining it."""

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from kafka import errors
from kafka.protocol.consumer import OffsetCommitRequest, OffsetFetchRequest

from proxy.cluster.kafka_client import GROUP_COORDINATOR, KafkaClient
from proxy.cluster.partitions import requests_by_topic
from proxy.cluster.upstream import NOT_READY, RefusedError, UpstreamError, name_of
from proxy.wire.topic_partition import TopicPartition

VERSION = 3
"""Of both requests, since Kafka 0.11; a simple consumer needs nothing of what came later."""

_NO_OFFSET = -1
_NO_METADATA = ""

_MOVED = frozenset(
    {
        errors.CoordinatorNotAvailableError.errno,
        errors.CoordinatorLoadInProgressError.errno,
        errors.NotCoordinatorError.errno,
        errors.RequestTimedOutError.errno,
    }
)
"""The coordinator may be another broker by now."""

_LIVE = (
    "the group has live members: consumers that subscribe to topics use it, and Kafka lets nobody "
    "else commit; give the query a commit_group of its own"
)

_OF_GROUP = {
    errors.UnknownMemberIdError.errno: _LIVE,
    errors.IllegalGenerationError.errno: _LIVE,
    errors.RebalanceInProgressError.errno: _LIVE,
    errors.StaleMemberEpochError.errno: _LIVE,
    errors.GroupAuthorizationFailedError.errno: (
        "the cluster does not let the proxy use this group; it needs the right Read on it"
    ),
}

_OF_PARTITION = {
    errors.UnknownTopicOrPartitionError.errno: "there is no such topic or partition",
    errors.TopicAuthorizationFailedError.errno: (
        "the cluster does not let the proxy use this topic; it needs the right Read on it"
    ),
}

Refused: TypeAlias = dict[TopicPartition, str]
"""Why, by partition."""


class GroupOffsets:
    """Offsets of a group without live members: only then Kafka takes commits of a non-member."""

    def __init__(self, group: str, client: KafkaClient) -> None:
        self._group = group
        self._client = client
        self._key = GROUP_COORDINATOR, group

    async def read(
        self, partitions: Collection[TopicPartition]
    ) -> tuple[dict[TopicPartition, int], Refused]:
        """Return the group's offsets, where it has one. Raises UpstreamError, RefusedError."""
        offsets: dict[TopicPartition, int] = {}
        refused: Refused = {}
        for topics in requests_by_topic(dict.fromkeys(partitions)):
            request = OffsetFetchRequest[VERSION](
                group_id=self._group,
                topics=[(topic, [number for number, _ in rows]) for topic, rows in topics.items()],
            )
            response = await self._ask(request)
            self._require(response.error_code)
            for topic in response.topics:
                for row in topic.partitions:
                    if row.error_code:
                        refused[topic.name, row.partition_index] = self._check(row.error_code)
                    elif row.committed_offset != _NO_OFFSET:
                        offsets[topic.name, row.partition_index] = row.committed_offset
        return offsets, refused

    async def write(self, offsets: Mapping[TopicPartition, int]) -> Refused:
        """Commit offsets; return those that were refused.

        Raises UpstreamError or RefusedError when none was taken, or that is not known of some.
        """
        refused: Refused = {}
        for topics in requests_by_topic(offsets):
            request = OffsetCommitRequest[VERSION](
                group_id=self._group,
                topics=[
                    (topic, [(number, offset, _NO_METADATA) for number, offset in rows])
                    for topic, rows in topics.items()
                ],
            )
            for topic in (await self._ask(request)).topics:
                for row in topic.partitions:
                    if row.error_code:
                        refused[topic.name, row.partition_index] = self._check(row.error_code)
        return refused

    async def _ask(self, request: Any) -> Any:
        coordinator = await self._client.coordinator(self._key, self._require)
        return await self._client.ask(request, coordinator)

    def _require(self, error_code: int) -> None:
        if error_code:
            raise RefusedError(self._check(error_code), error_code)

    def _check(self, error_code: int) -> str:
        """Return what a partition's error means. Raise what one of the whole group means."""
        if error_code in _MOVED:
            self._client.forget(self._key)
            text = f"the group's coordinator is not ready: {name_of(error_code)}"
            raise UpstreamError(NOT_READY, text)
        if error_code in _OF_GROUP:
            raise RefusedError(_OF_GROUP[error_code], error_code)
        return _OF_PARTITION.get(error_code) or name_of(error_code)
