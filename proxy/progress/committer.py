"""Commits what queries have completed to their consumer groups, each group by itself."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from structlog import get_logger

from proxy.cluster.kafka_client import KafkaClient
from proxy.cluster.partitions import named
from proxy.cluster.upstream import RefusedError, UpstreamError
from proxy.wire.topic_partition import TopicPartition

from .commits import Commits
from .group_offsets import GroupOffsets, Refused

COMMIT_INTERVAL_S = 1.0
"""What came due in this time goes out in one request per group."""

MIN_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
"""Between two tries of a group, or of a partition that Kafka refuses; doubled from try to try."""

ROUND_TIMEOUT_S = 30.0
"""For everything that one commit of a group takes."""

FLUSH_RETRY_S = 0.2
"""Between two tries when there is little time left."""

_log = get_logger(__name__)


class _RefusedCommit(NamedTuple):
    """Kafka does not take an offset for a partition."""

    offset: int
    reason: str
    backoff_s: float
    again_s: float
    """When to try again, unless another offset is due by then."""


class Committer:
    """Keeps the consumer groups of queries where the queries are.

    A group has its own connection, a client of `new_client`, opened when something is due for the
    first time, and nothing that happens to one group holds up another. What could not be committed
    stays due. `clock_ms` is monotonic.
    """

    def __init__(
        self, commits: Commits, new_client: Callable[[], KafkaClient], clock_ms: Callable[[], float]
    ) -> None:
        self._commits = commits
        self._new_client = new_client
        self._clock_ms = clock_ms
        self._groups: dict[str, _GroupCommitter] = {}

    async def run(self) -> None:
        """Commit what is due again and again, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    for group, due in self._due():
                        if group.may_try(due):
                            group.task = tasks.create_task(group.commit())
                    await asyncio.sleep(COMMIT_INTERVAL_S)
        finally:
            self._close()

    async def let_go(self, names: Collection[str], timeout_s: float) -> bool:
        """Commit what is due to these groups, and nothing more; return whether all of it went out.

        Until something is due to one of them again: then it is read first where that one is.
        """
        due = [group for group, _ in self._due() if group.name in names]
        groups = [self._groups[name] for name in names if name in self._groups]
        try:
            return await _commit_all(due, timeout_s)
        finally:
            self._commits.drop(names)  # so that `run` begins no other commit
            for group in groups:
                await group.end()
                self._groups.pop(group.name, None)

    async def flush(self, timeout_s: float) -> bool:
        """Commit what is due now, then close the connections; return whether all of it went out."""
        try:
            is_done = await _commit_all([group for group, _ in self._due()], timeout_s)
        finally:
            self._close()
        return is_done and not self._due()

    def _due(self) -> list[tuple["_GroupCommitter", Mapping[TopicPartition, int]]]:
        """Return each group that has something due, and that."""
        due = {name: offsets for name, offsets in self._commits.due().items() if offsets}
        for name in due.keys() - self._groups.keys():
            client = self._new_client()
            self._groups[name] = _GroupCommitter(name, self._commits, client, self._clock_ms)
        return [(self._groups[name], offsets) for name, offsets in due.items()]

    def _close(self) -> None:
        for group in self._groups.values():
            group.client.close()  # the next commit opens another connection


class _GroupCommitter:
    """Commits to one group: what of it was read, what is refused, and when to try again."""

    def __init__(
        self, name: str, commits: Commits, client: KafkaClient, clock_ms: Callable[[], float]
    ) -> None:
        self.client = client
        self.name = name
        self.task: asyncio.Task[None] | None = None
        """The latest commit of `Committer.run`."""
        self._commits = commits
        self._clock_ms = clock_ms
        self._offsets = GroupOffsets(name, client)
        self._read: set[TopicPartition] = set()
        """It is known what the group had committed of these before our first commit."""
        self._refused: dict[TopicPartition, _RefusedCommit] = {}
        self._backoff_s = 0.0
        self._again_s = 0.0
        self._logged_problem: str | None = None
        self._lock = asyncio.Lock()

    def may_try(self, due: Mapping[TopicPartition, int]) -> bool:
        """Return whether there is something to do, and it is time for it."""
        is_time = not self._lock.locked() and _now_s() >= self._again_s
        return is_time and bool(self._to_try(due))

    async def commit(self) -> None:
        """Try once to commit what is due, and report how it went."""
        async with self._lock:
            try:
                async with asyncio.timeout(ROUND_TIMEOUT_S):
                    await self._try()
            except TimeoutError:
                self._failed(f"not done in {ROUND_TIMEOUT_S:g} s")
            except (UpstreamError, RefusedError) as error:
                self._failed(str(error))
            else:
                self._backoff_s = self._again_s = 0.0
                self._report_refused()

    async def end(self) -> None:
        """Commit no more: what is under way is given up."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait((self.task,))
        self.client.close()

    async def commit_all(self) -> None:
        """Commit until nothing is due that Kafka would take. Without limit of time."""
        self._refused.clear()
        await self.commit()
        while self._to_try(self._due()):
            await asyncio.sleep(FLUSH_RETRY_S)
            await self.commit()

    def _due(self) -> Mapping[TopicPartition, int]:
        return self._commits.due().get(self.name, {})

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
        if new := tried.keys() - self._read:
            offsets, refused = await self._offsets.read(new)
            self._refuse(tried, refused)
            self._read |= new - refused.keys()
            self._commits.group_has(self.name, offsets)
            tried = self._to_try(self._due())
        tried = {part: offset for part, offset in tried.items() if part in self._read}
        if not tried:
            return
        refused = await self._offsets.write(tried)
        self._refuse(tried, refused)
        taken = {part: offset for part, offset in tried.items() if part not in refused}
        for partition in taken:
            self._refused.pop(partition, None)
        if taken:
            self._commits.committed(self.name, taken, self._clock_ms())

    def _refuse(self, tried: Mapping[TopicPartition, int], refused: Refused) -> None:
        for part, reason in refused.items():
            before = self._refused.get(part)
            pause_s = _longer(before.backoff_s if before else 0.0)
            self._refused[part] = _RefusedCommit(tried[part], reason, pause_s, _now_s() + pause_s)

    def _failed(self, reason: str) -> None:
        again = self._backoff_s > 0.0
        self._backoff_s = _longer(self._backoff_s)
        self._again_s = _now_s() + self._backoff_s
        self._commits.failed(self.name, reason)
        if again:  # one try that fails is no problem: a coordinator moves, a connection breaks
            self._log_problem(reason)

    def _report_refused(self) -> None:
        """Report the partitions that are due and refused; the others do not wait for them."""
        if self._refused:
            due = self._due()
            self._refused = {part: why for part, why in self._refused.items() if part in due}
        partitions: defaultdict[str, list[TopicPartition]] = defaultdict(list)
        for partition, refusal in self._refused.items():
            partitions[refusal.reason].append(partition)
        message = "; ".join(f"{named(parts)}: {why}" for why, parts in sorted(partitions.items()))
        if message:
            self._commits.failed(self.name, message)
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
