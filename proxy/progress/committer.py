"""Commits what queries have completed to their consumer groups, each group by itself."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kafka import errors
from kafka.protocol.consumer import OffsetCommitRequest, OffsetFetchRequest
from structlog import get_logger

from metrics.clock import clock_ms
from proxy.cluster.kafka_client import (
    GROUP_COORDINATOR,
    KafkaClient,
    chunks_by_topic,
    format_partitions,
)
from proxy.cluster.upstream import (
    NOT_READY,
    NonRetriableError,
    UpstreamError,
    error_name,
    misread_is_bad_response,
)
from proxy.wire.topic_partition import TopicPartition

from .query_registry import QueryRegistry

COMMIT_INTERVAL_S = 1.0
"""What came due in this time goes out in one request per group."""

MIN_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
"""Between two tries of a group, or of a partition that Kafka refuses; doubled from try to try."""

ROUND_TIMEOUT_S = 30.0
"""For everything that one commit of a group takes."""

READ_AGAIN_S = 3600.0
"""Between two looks at all that a group has: Kafka forgets what has not moved for a week, and what
was of a topic that is deleted."""

FLUSH_RETRY_S = 0.2
"""Between two tries when there is little time left."""

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
_NO_RIGHT = "the cluster does not let the proxy use this {0}; it needs the right Read on it"

_OF_GROUP = {
    errors.UnknownMemberIdError.errno: _LIVE,
    errors.IllegalGenerationError.errno: _LIVE,
    errors.RebalanceInProgressError.errno: _LIVE,
    errors.StaleMemberEpochError.errno: _LIVE,
    errors.GroupAuthorizationFailedError.errno: _NO_RIGHT.format("group"),
}
_OF_PARTITION = {
    errors.UnknownTopicOrPartitionError.errno: "there is no such topic or partition",
    errors.TopicAuthorizationFailedError.errno: _NO_RIGHT.format("topic"),
}

_log = get_logger(__name__)


class _RefusedCommit(NamedTuple):
    """Kafka does not take an offset for a partition."""

    offset: int
    reason: str
    backoff_s: float
    again_s: float
    """When to try again, unless another offset is due by then."""


@dataclass(slots=True, eq=False)
class Committer:
    """Keeps the consumer groups of queries where the queries are.

    A group has its own connection, a client of `new_client`, opened when something is due for the
    first time, and nothing that happens to one group holds up another. What could not be committed
    stays due.
    """

    _registry: QueryRegistry
    _new_client: Callable[[], KafkaClient]
    _groups: dict[str, "_GroupCommitter"] = field(default_factory=dict)

    async def run(self) -> None:
        """Commit what is due again and again, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    due = self._due()
                    for group in self._groups.values():
                        if group.may_try(due.get(group, {})):
                            group.task = tasks.create_task(group.commit())
                    await asyncio.sleep(COMMIT_INTERVAL_S)
        finally:
            self._close()

    async def revoke(self, names: Collection[str], timeout_s: float) -> bool:
        """Commit what is due to these groups, and nothing more; return whether all of it went out.

        Until something is due to one of them again: then it is read first where that one is.
        """
        due = [group for group in self._due() if group.name in names]
        groups = [self._groups[name] for name in names if name in self._groups]
        try:
            return await _commit_all(due, timeout_s)
        finally:
            self._registry.drop_commits(names)  # so that `run` begins no other commit
            for group in groups:
                await group.end()
                self._groups.pop(group.name, None)

    async def flush(self, timeout_s: float) -> bool:
        """Commit what is due now, then close the connections; return whether all of it went out."""
        try:
            is_done = await _commit_all(self._due(), timeout_s)
        finally:
            self._close()
        return is_done and not self._due()

    def _due(self) -> dict["_GroupCommitter", Mapping[TopicPartition, int]]:
        """Return each group that has something due, and that."""
        due = self._registry.due_commits()
        for name in due.keys() - self._groups.keys():
            self._groups[name] = _GroupCommitter(name, self._registry, self._new_client())
        return {self._groups[name]: offsets for name, offsets in due.items()}

    def _close(self) -> None:
        for group in self._groups.values():
            group.client.close()  # the next commit opens another connection


@dataclass(slots=True, eq=False)
class _GroupCommitter:
    """Commits to one group, at its coordinator and without joining it.

    Kafka takes commits of who is no member only to a group without live members.
    """

    name: str
    _registry: QueryRegistry
    client: KafkaClient
    task: asyncio.Task[None] | None = None
    """The latest commit of `Committer.run`."""
    _read: set[TopicPartition] = field(default_factory=set)
    """It is known what the group had committed of these before our first commit, or lately."""
    _read_again_s: float = math.inf
    _refused: dict[TopicPartition, _RefusedCommit] = field(default_factory=dict)
    _backoff_s: float = 0.0
    _again_s: float = 0.0
    _logged_problem: str | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def may_try(self, due: Mapping[TopicPartition, int]) -> bool:
        """Return whether there is something to do, and it is time for it."""
        is_time = not self._lock.locked() and _now_s() >= self._again_s
        return is_time and (bool(self._to_try(due)) or _now_s() >= self._read_again_s)

    async def commit(self) -> None:
        """Try once to commit what is due, and report how it went."""
        async with self._lock:
            try:
                async with asyncio.timeout(ROUND_TIMEOUT_S):
                    with misread_is_bad_response():
                        await self._try()
            except TimeoutError:
                self._failed(f"not done in {ROUND_TIMEOUT_S:g} s")
            except (UpstreamError, NonRetriableError) as error:
                self._failed(str(error))
            else:
                self._backoff_s = self._again_s = 0.0
                self._report_refused()

    async def commit_all(self) -> None:
        """Commit until nothing is due that Kafka would take. Without limit of time."""
        self._refused.clear()
        await self.commit()
        while self._to_try(self._due()):
            await asyncio.sleep(FLUSH_RETRY_S)
            await self.commit()

    async def end(self) -> None:
        """Commit no more: what is under way is given up."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait((self.task,))
        self.client.close()

    def _due(self) -> Mapping[TopicPartition, int]:
        return self._registry.due_to(self.name)

    def _to_try(self, due: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Return what of it is not refused just now."""
        refused, now_s = self._refused, _now_s()
        return {
            part: offset
            for part, offset in due.items()
            if (why := refused.get(part)) is None or why.offset != offset or why.again_s <= now_s
        }

    async def _try(self) -> None:
        """Commit what is due. First read where the group is: what moves it back is due no more."""
        tried = self._to_try(self._due())  # what was due before may be behind by now
        again = self._read if _now_s() >= self._read_again_s else ()
        if asked := {*again, *(tried.keys() - self._read)}:
            offsets = await self._read_offsets(asked, tried)
            self._read |= offsets.keys()
            self._registry.group_has(self.name, offsets)
            if again or math.isinf(self._read_again_s):
                self._read_again_s = _now_s() + READ_AGAIN_S
            tried = self._to_try(self._due())
        tried = {part: offset for part, offset in tried.items() if part in self._read}
        taken: dict[TopicPartition, int] = {}
        for topics in chunks_by_topic(tried):
            rows = {
                topic: [(number, offset, _NO_METADATA) for number, offset in of_topic]
                for topic, of_topic in topics.items()
            }
            request = OffsetCommitRequest[VERSION](group_id=self.name, topics=list(rows.items()))
            for part, _ in self._taken((await self._ask(request)).topics, tried):
                taken[part] = tried[part]
                self._refused.pop(part, None)
        if taken:
            self._registry.committed(self.name, taken, clock_ms())

    async def _read_offsets(
        self, partitions: Collection[TopicPartition], tried: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int | None]:
        """Return the group's offsets, None where it has none."""
        offsets: dict[TopicPartition, int | None] = {}
        for topics in chunks_by_topic(dict.fromkeys(partitions)):
            numbers = [(topic, [number for number, _ in rows]) for topic, rows in topics.items()]
            request = OffsetFetchRequest[VERSION](group_id=self.name, topics=numbers)
            response = await self._ask(request)
            self._require(response.error_code)
            for part, row in self._taken(response.topics, tried):
                at = row.committed_offset
                if part in partitions:  # no others are kept
                    offsets[part] = None if at == _NO_OFFSET else at
        return offsets

    def _taken(
        self, topics: Iterable[Any], tried: Mapping[TopicPartition, int]
    ) -> list[tuple[TopicPartition, Any]]:
        """Return the rows of an answer without an error; record which were refused."""
        rows = [
            ((topic.name, row.partition_index), row) for topic in topics for row in topic.partitions
        ]
        for part, row in rows:
            if row.error_code and part in tried:
                reason = self._check(row.error_code)
                before = self._refused.get(part)
                pause_s = _longer(before.backoff_s if before else 0.0)
                again_s = _now_s() + pause_s
                self._refused[part] = _RefusedCommit(tried[part], reason, pause_s, again_s)
        return [(part, row) for part, row in rows if not row.error_code]

    async def _ask(self, request: Any) -> Any:
        coordinator = await self.client.coordinator((GROUP_COORDINATOR, self.name), self._require)
        return await self.client.ask(request, coordinator)

    def _require(self, error_code: int) -> None:
        if error_code:
            raise NonRetriableError(self._check(error_code), error_code)

    def _check(self, error_code: int) -> str:
        """Return what a partition's error means. Raise what one of the whole group means."""
        if error_code in _MOVED:
            self.client.forget((GROUP_COORDINATOR, self.name))
            text = f"the group's coordinator is not ready: {error_name(error_code)}"
            raise UpstreamError(NOT_READY, text)
        if error_code in _OF_GROUP:
            raise NonRetriableError(_OF_GROUP[error_code], error_code)
        return _OF_PARTITION.get(error_code) or error_name(error_code)

    def _failed(self, reason: str) -> None:
        again = self._backoff_s > 0.0
        self._backoff_s = _longer(self._backoff_s)
        self._again_s = _now_s() + self._backoff_s
        self._registry.commit_failed(self.name, reason)
        if again:  # one try that fails is no problem: a coordinator moves, a connection breaks
            self._log_problem(reason)

    def _report_refused(self) -> None:
        """Report the partitions that are due and refused; the others do not wait for them."""
        due = self._due() if self._refused else {}
        self._refused = {part: why for part, why in self._refused.items() if part in due}
        partitions: defaultdict[str, list[TopicPartition]] = defaultdict(list)
        for partition, refusal in self._refused.items():
            partitions[refusal.reason].append(partition)
        message = "; ".join(
            f"{format_partitions(parts)}: {why}" for why, parts in sorted(partitions.items())
        )
        if message:
            self._registry.commit_failed(self.name, message)
        self._log_problem(message or None)

    def _log_problem(self, problem: str | None) -> None:
        """Log each problem once, and when it is over."""
        if problem is None and self._logged_problem is not None:
            _log.info("offsets committed again", group=self.name)
        elif problem != self._logged_problem:
            _log.warning("offsets not committed, they stay due", group=self.name, error=problem)
        self._logged_problem = problem


async def _commit_all(groups: Iterable[_GroupCommitter], timeout_s: float) -> bool:
    """Commit all that is due to these groups; return whether that was done in time."""
    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
            for group in groups:
                tasks.create_task(group.commit_all())
    except TimeoutError:
        return False
    return True


def _longer(backoff_s: float) -> float:
    return min(max(MIN_BACKOFF_S, 2 * backoff_s), MAX_BACKOFF_S)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
