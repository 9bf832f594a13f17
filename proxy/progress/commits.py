"""Which completed offsets are due to be committed to consumer groups, and what became of it."""

from collections.abc import Callable, Collection, Iterable, Mapping

from proxy.wire.topic_partition import TopicPartition

from .events import EventKind
from .query import GroupState, QueryProgress

MAX_ERROR_CHARS = 1000


class Commits:
    """What is due of the followed queries. A group goes back only where the query itself did."""

    def __init__(self, queries: Callable[[], Iterable[QueryProgress]]) -> None:
        self._queries = queries

    def drop(self, groups: Collection[str]) -> None:
        """Forget what is due to these groups: another member commits to them from now on."""
        for query in self._queries():
            if query.commit_group in groups:
                query.commit.due.clear()

    def due(self) -> dict[str, dict[TopicPartition, int]]:
        """Return by group the offset of the first record that is not complete."""
        by_group: dict[str, dict[TopicPartition, int]] = {}
        for query in self._queries():
            if query.commit_group is None:
                continue
            for key in list(query.commit.due):
                partition = query.partitions.get(key)
                if partition is None or (due := partition.due_to_commit) is None:
                    del query.commit.due[key]
                else:
                    by_group.setdefault(query.commit_group, {})[key] = due
        return by_group

    def group_has(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Record what a group had before the first commit to it. It is not moved back by that."""
        for query, _ in self._of_group(group):
            for key in offsets.keys() & query.partitions.keys():
                query.partitions[key].group_offset = offsets[key]

    def committed(self, group: str, offsets: Mapping[TopicPartition, int], now_ms: float) -> None:
        """Record that these offsets are in the group: they are due no more."""
        for query, state in self._of_group(group):
            state.last_ms, state.error = now_ms, None
            for key in offsets.keys() & query.partitions.keys():
                partition, offset = query.partitions[key], offsets[key]
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
        for _, state in self._of_group(group):
            state.error = message[:MAX_ERROR_CHARS]

    def _of_group(self, group: str) -> list[tuple[QueryProgress, GroupState]]:
        return [(each, each.commit) for each in self._queries() if each.commit_group == group]
