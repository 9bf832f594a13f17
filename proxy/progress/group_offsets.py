"""Reads and writes the offsets of one consumer group, at its coordinator and without joining it."""

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from aiokafka.errors import (
    GroupAuthorizationFailedError,
    GroupCoordinatorNotAvailableError,
    GroupLoadInProgressError,
    IllegalGenerationError,
    NotCoordinatorForGroupError,
    RebalanceInProgressError,
    RequestTimedOutError,
    TopicAuthorizationFailedError,
    UnknownMemberIdError,
    UnknownTopicOrPartitionError,
)
from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest
from aiokafka.protocol.coordination import FindCoordinatorRequest

from proxy.progress.link import Address, Link, LinkError, by_topic, name_of
from proxy.wire.topic_partition import TopicPartition

_GROUP = 0
"""FindCoordinator's kind of key."""

_NO_MEMBER = ""

_NO_OFFSET = -1

_STALE_MEMBER_EPOCH = 113
"""Not known to aiokafka."""

_MOVED = frozenset(
    {
        GroupCoordinatorNotAvailableError.errno,
        GroupLoadInProgressError.errno,
        NotCoordinatorForGroupError.errno,
        RequestTimedOutError.errno,
    }
)
"""The coordinator may be another broker by now."""

_LIVE = (
    "the group has live members: consumers that subscribe to topics use it, and Kafka lets nobody "
    "else commit; give the query a commit_group of its own"
)

_OF_GROUP = {
    UnknownMemberIdError.errno: _LIVE,
    IllegalGenerationError.errno: _LIVE,
    RebalanceInProgressError.errno: _LIVE,
    _STALE_MEMBER_EPOCH: _LIVE,
    GroupAuthorizationFailedError.errno: (
        "the cluster does not let the proxy use this group; it needs the right Read on it"
    ),
}
"""Errors that hold for all partitions."""

_OF_PARTITION = {
    UnknownTopicOrPartitionError.errno: "there is no such topic or partition",
    TopicAuthorizationFailedError.errno: (
        "the cluster does not let the proxy use this topic; it needs the right Read on it"
    ),
}

Refused: TypeAlias = dict[TopicPartition, str]
"""Why, by partition."""


class GroupOffsets:
    """What a consumer group has committed.

    Groups must have no live members: then Kafka takes commits from a client that never joined.
    """

    def __init__(self, group: str, link: Link) -> None:
        self.group = group
        self._link = link
        self._coordinator: Address | None = None

    async def read(
        self, partitions: Collection[TopicPartition]
    ) -> tuple[dict[TopicPartition, int], Refused]:
        """Return the offsets that the group has, by partition; without those that have none.

        Raises LinkError when that could not be found out for any of them.
        """
        offsets: dict[TopicPartition, int] = {}
        refused: Refused = {}
        for topics in by_topic(dict.fromkeys(partitions)):
            asked = [(topic, [number for number, _ in rows]) for topic, rows in topics.items()]
            response = await self._ask(OffsetFetchRequest(self.group, asked))
            self._require(getattr(response, "error_code", 0))  # version 1 has none
            for topic, rows in response.topics:
                for number, offset, _metadata, error_code in rows:
                    if error_code:
                        refused[topic, number] = self._check(error_code)
                    elif offset != _NO_OFFSET:
                        offsets[topic, number] = offset
        return offsets, refused

    async def write(self, offsets: Mapping[TopicPartition, int]) -> Refused:
        """Commit offsets. All but those that are returned are in the group from now on.

        Raises LinkError when it is not known of some whether they were taken, or none was.
        """
        refused: Refused = {}
        for topics in by_topic({part: (offset, "") for part, offset in offsets.items()}):
            request = OffsetCommitRequest(
                self.group,
                OffsetCommitRequest.DEFAULT_GENERATION_ID,
                _NO_MEMBER,
                OffsetCommitRequest.DEFAULT_RETENTION_TIME,
                [
                    (topic, [(number, *value) for number, value in rows])
                    for topic, rows in topics.items()
                ],
            )
            response = await self._ask(request)
            for topic, rows in response.topics:
                for number, error_code in rows:
                    if error_code:
                        refused[topic, number] = self._check(error_code)
        return refused

    async def _ask(self, request: OffsetFetchRequest | OffsetCommitRequest) -> Any:
        if self._coordinator is None:
            self._coordinator = await self._find_coordinator()
        try:
            return await self._link.ask(request, self._coordinator)
        except LinkError:
            self._coordinator = None
            raise

    async def _find_coordinator(self) -> Address:
        found = await self._link.ask(FindCoordinatorRequest(self.group, _GROUP))
        self._require(found.error_code)
        return found.host, found.port

    def _require(self, error_code: int) -> None:
        if error_code:
            raise LinkError(self._check(error_code))

    def _check(self, error_code: int) -> str:
        """Return what a partition's error means. Raises LinkError for one of the whole group."""
        if error_code in _MOVED:
            self._coordinator = None
            raise LinkError(f"the group's coordinator is not ready: {name_of(error_code)}")
        if error_code in _OF_GROUP:
            raise LinkError(_OF_GROUP[error_code])
        return _OF_PARTITION.get(error_code) or name_of(error_code)
