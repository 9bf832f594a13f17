"""Which completed offsets are due to be committed to consumer groups, and what became of it."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from proxy.wire.topic_partition import TopicPartition

from .events import EventKind
from .query import QueryProgress

MAX_ERROR_CHARS = 1000


@dataclass(slots=True)
class GroupState:
    """How committing to one group goes: when it last did, and why the latest try failed, if so."""

    last_ms: float | None = None
    error: str | None = None
    backwards: int = 0
    """How many partitions were moved back, each for a reset of its query or a topic made anew."""


class Commits:
    """What is due of the followed queries. A group goes back only where the query itself did."""

    def __init__(self, queries: Callable[[], Iterable[QueryProgress]]) -> None:
        self._queries = queries
        self._due: dict[QueryProgress, dict[TopicPartition, None]] = {}
        self.states: defaultdict[str, GroupState] = defaultdict(GroupState)

    def changed(self, query: QueryProgress, key: TopicPartition) -> None:
        """Add a partition whose completed offset may have changed to what is due."""
        if query.commit_group is not None:
            self._due.setdefault(query, {})[key] = None

    def forget(self, query: QueryProgress) -> None:
        """Commit nothing more of a query."""
        self._due.pop(query, None)

    def drop(self, groups: Collection[str]) -> None:
        """Forget what is due to these groups: another member commits to them from now on."""
        for query in [each for each in self._due if each.commit_group in groups]:
            del self._due[query]

    def regroup(self, query: QueryProgress) -> None:
        """Begin anew for a query that has another group: nothing is known of what that has."""
        self._due.pop(query, None)
        for key, partition in query.partitions.items():
            partition.group_offset = None
            self.changed(query, key)

    def due(self) -> dict[str, dict[TopicPartition, int]]:
        """Return by group the offset of the first record that is not complete. O(due)."""
        by_group: dict[str, dict[TopicPartition, int]] = {}
        for query, keys in list(self._due.items()):
            offsets: dict[TopicPartition, int] = {}
            for key in list(keys):
                partition = query.partitions.get(key)
                if partition is None or (due := partition.due_to_commit) is None:
                    del keys[key]
                else:
                    offsets[key] = due
            if not keys:
                del self._due[query]
            elif query.commit_group is not None:
                by_group.setdefault(query.commit_group, {}).update(offsets)
        return by_group

    def group_has(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Record what a group had before the first commit to it. It is not moved back by that."""
        for query in self._of_group(group):
            for key in offsets.keys() & query.partitions.keys():
                query.partitions[key].group_offset = offsets[key]

    def committed(self, group: str, offsets: Mapping[TopicPartition, int], now_ms: float) -> None:
        """Record that these offsets are in the group: they are due no more."""
        for query in self._of_group(group):
            state = self.states[group]
            state.last_ms, state.error = now_ms, None
            for key, offset in offsets.items():
                partition = query.partitions.get(key)
                if partition is None:
                    continue
                before, partition.group_offset = partition.group_offset, offset
                if before is not None and offset < before:
                    state.backwards += 1
                    text = f"group {group} was moved back from {before} to {offset}"
                    query.changes.add_event(EventKind.COMMITTED_BACKWARDS, key, text, now_ms)
                if partition.may_go_back and offset == partition.committed_to:
                    partition.may_go_back = False
                    query.changes.changed(key)  # its record says so

    def failed(self, group: str, message: str) -> None:
        """Record why what is due could not be committed, all or some of it."""
        for _ in self._of_group(group):
            self.states[group].error = message[:MAX_ERROR_CHARS]

    def _of_group(self, group: str) -> list[QueryProgress]:
        return [query for query in self._queries() if query.commit_group == group]
