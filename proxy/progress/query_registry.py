"""The progress of all followed queries: the one part of this room that the others talk to.

Sans-I/O and for one thread. `now_ms` is monotonic, `now_s` the same moment on the wall clock.
"""

from collections.abc import Iterable, Iterator, Mapping

from proxy.state import Journal, Record
from proxy.wire.topic_partition import TopicPartition

from .commits import Commits
from .documents import Document, Times, query_document
from .events import OnEvent
from .log_edges import end_age_ms
from .partition import PartitionProgress
from .progress_records import FORMAT, key_of, load_records, record_of
from .query import STUCK_AFTER_MS, ProgressSettings, QueryProgress
from .query_clients import QueryClients
from .report_handler import KnowsClient, ReportHandler

MAX_RECORDS_PER_WRITE = 1000
"""Making them takes some 10 ms."""


class QueryRegistry(QueryClients):
    """Who is followed, what they were given and have completed, and what is to be kept of it.

    Args:
        settings: the configured queries, and how many there may be.
        knows_client: returns whether a client id has ever connected through the proxy.
        on_event: is called with what somebody should know; each query keeps its latest events.

    """

    def __init__(
        self, settings: ProgressSettings, knows_client: KnowsClient, on_event: OnEvent
    ) -> None:
        super().__init__(on_event)
        self.reports = ReportHandler(self, knows_client)
        self._journal = Journal(record_of, key_of)
        self._commits = Commits()
        self._readers: dict[TopicPartition, set[PartitionProgress]] = {}
        """Of the partitions that the cluster is asked for; those since gone are still there."""
        self.update(settings)

    def update(self, settings: ProgressSettings) -> None:
        """Set the configuration's queries."""
        groups = {query: query.commit_group for query in self.queries}
        self.configure(settings)
        for query in self.queries:
            if query.commit_group != groups.get(query):
                self._commits.regroup(query)
        self._commits.keep_only(
            each.commit_group for each in settings.queries if each.commit_group is not None
        )

    def sweep(self, now_ms: float) -> None:
        """Raise alarms for stuck partitions, and forget what is long gone; every second or so."""
        self.forget_gone(now_ms)
        for query in self.queries:
            settings = query.settings
            stuck_after_ms = settings.stuck_after_ms if settings is not None else STUCK_AFTER_MS
            query.sweep(now_ms, stuck_after_ms)

    # What is shown

    def documents(self, now_ms: float, now_s: float) -> list[Document]:
        """Return each query as JSON, sorted by name."""
        times = Times(now_ms, now_s)
        return [
            query_document(
                query,
                self._commits.state(query.commit_group) if query.commit_group else None,
                times,
            )
            for query in sorted(self.queries, key=lambda query: query.name)
        ]

    def rows(self) -> Iterator[tuple[str, PartitionProgress]]:
        """Yield each partition with its query's label: those of one query together."""
        for query in self.queries:
            for partition in query.partitions.values():
                yield query.name, partition

    # Where logs begin and end

    def partitions(self) -> set[TopicPartition]:
        """Return the partitions whose log ends are worth asking for."""
        self._readers = {}
        return self._seek(partition for _, partition in self.rows())

    def stale(self, now_ms: float) -> set[TopicPartition]:
        """Return those of them that a query at work reads, and whose end was not learned lately."""
        stale: list[PartitionProgress] = []
        for query in self.queries:
            seen_ms = query.last_seen_ms
            if query.ended or seen_ms is None:
                continue
            due_ms = now_ms - end_age_ms(now_ms - seen_ms)
            stale += [each for each in query.partitions.values() if each.log.end_ms <= due_ms]
        return self._seek(stale)

    def log_end(self, topic: str, partition: int, offset: int, now_ms: float) -> None:
        """Record a log end (read_uncommitted) that the proxy has looked up."""
        for each in self._each(topic, partition):
            each.record_lookup_end(offset, now_ms, client_saw_it=False)

    def appended(self, topic: str, partition: int, end: int, now_ms: float) -> None:
        """Record up to where a client has written; a lower end than is known is left out."""
        for each in self._each(topic, partition):
            each.record_high_watermark(end, now_ms)

    def log_start(self, topic: str, partition: int, offset: int, now_ms: float) -> None:
        """Record a log start that the proxy has looked up."""
        for each in self._each(topic, partition):
            each.record_log_start(offset, now_ms)

    # What is kept

    def changes(self) -> tuple[list[Record], list[str]]:
        """Return records to write and keys to delete since the last call, until there are none.

        At most MAX_RECORDS_PER_WRITE records, so that the event loop does not stand still. A
        partition has a record once a batch has completed something of it. What is delivered alone
        makes no record due: it is written with what is completed.
        """
        return self._journal.take(MAX_RECORDS_PER_WRITE)

    def changes_failed(self) -> None:
        """Return with the next `changes` what the last one did as well: it was not written."""
        self._journal.give_back()

    def load(self, records: Iterable[Record]) -> list[str]:
        """Restore what an earlier process kept; return which records were not, and why.

        Call it once, before anything is reported. Refused ones stay in the state, untouched.
        """
        return load_records(records, self, self._journal, self._commits)

    # What is committed to consumer groups

    def commits(self) -> dict[str, dict[TopicPartition, int]]:
        """Return what is due by group: the offset of the first record that is not complete."""
        return self._commits.due()

    def group_has(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Record what a group had before the first commit to it. It is not moved back by that."""
        for query in self._of_group(group):
            self._commits.group_has(query, offsets)

    def committed(self, group: str, offsets: Mapping[TopicPartition, int], now_ms: float) -> None:
        """Record that these offsets are in the group: they are due no more."""
        for query in self._of_group(group):
            self._commits.committed(query, offsets, now_ms)

    def commit_failed(self, group: str, message: str) -> None:
        """Record that what is due could not be committed, all or some of it, and why."""
        for query in self._of_group(group):
            self._commits.failed(query, message)

    # What happens to queries

    def changed(self, query: QueryProgress, partition: PartitionProgress) -> None:
        """See QueryClients."""
        self._journal.mark_changed((query, partition.key))
        self._commits.changed(query, partition)

    def removed(self, query: QueryProgress, partition: PartitionProgress) -> None:
        """See QueryClients."""
        self._journal.mark_removed((query, partition.key))
        self._commits.removed(query, partition)

    def relabelled(self, query: QueryProgress, old_label: str) -> None:
        """See QueryClients."""
        for key in query.partitions:
            self._journal.mark_deleted(FORMAT.key(old_label, *key))
            self._journal.mark_changed((query, key))

    def _seek(self, partitions: Iterable[PartitionProgress]) -> set[TopicPartition]:
        """Return their keys; keep who reads them, so that what is learned finds them at once."""
        keys: set[TopicPartition] = set()
        for each in partitions:
            keys.add(each.key)
            self._readers.setdefault(each.key, set()).add(each)
        return keys

    def _each(self, topic: str, partition: int) -> list[PartitionProgress]:
        key = (topic, partition)
        readers = self._readers.get(key)
        if readers is None:
            return [query.partitions[key] for query in self.queries if key in query.partitions]
        return [each for each in readers if not each.is_dropped]

    def _of_group(self, group: str) -> list[QueryProgress]:
        return [query for query in self.queries if query.commit_group == group]
