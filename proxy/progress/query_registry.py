"""The progress of all followed queries: the one part of this room that the others talk to.

Sans-I/O and for one thread. `now_ms` is monotonic, `now_s` the same moment on the wall clock.
"""

from collections.abc import Iterable, Iterator

from proxy.state import Document, Record
from proxy.wire.topic_partition import TopicPartition

from .documents import query_document
from .events import OnEvent
from .log_edges import end_age_ms
from .partition import PartitionProgress
from .progress_records import FORMAT, ProgressRecord, ReadRecords, read_records, restore
from .query import STUCK_AFTER_MS, ProgressSettings
from .query_clients import QueryClients
from .report_handler import KnowsClient, ReportHandler

MAX_RECORDS_PER_WRITE = 250
"""Making them takes some 4 ms."""


class QueryRegistry(QueryClients):
    """Who is followed, what they were given and have completed, and what is to be kept of it."""

    def __init__(
        self, settings: ProgressSettings, knows_client: KnowsClient, on_event: OnEvent
    ) -> None:
        super().__init__(settings, on_event)
        self.reports = ReportHandler(self, knows_client)
        self._readers: dict[TopicPartition, set[PartitionProgress]] = {}
        """Of the partitions that the cluster is asked for; those since gone are still there."""

    def sweeping(self, now_ms: float) -> Iterator[None]:
        """Raise alarms and forget what is long gone, every second or so; yield between two steps.

        Between two steps, here and below, other calls may come.
        """
        self.forget_gone(now_ms)
        for query in self.queries:
            settings = query.settings
            stuck_after_ms = settings.stuck_after_ms if settings else STUCK_AFTER_MS
            yield from query.sweeping(now_ms, stuck_after_ms)

    def documents(self, now_ms: float, now_s: float) -> Iterator[Document | None]:
        """Yield each query as JSON, sorted by name; None for a step without one."""
        for query in sorted(self.queries, key=lambda query: query.name):
            yield from query_document(query, now_ms, now_s)

    def by_label(self) -> list[tuple[str, tuple[PartitionProgress, ...]]]:
        """Return the partitions of each query, with its label."""
        return [(query.name, tuple(query.partitions.values())) for query in self.queries]

    def partitions(self) -> Iterator[TopicPartition]:
        """Yield the partitions whose log ends are worth asking for: of each query that reads it."""
        self._readers = {}
        for _, partitions in self.by_label():
            yield from map(self._seek, partitions)

    def stale(self, now_ms: float) -> Iterator[TopicPartition]:
        """Yield those of them that a query at work reads, and whose end was not learned lately."""
        for query in self.queries:
            seen_ms = query.last_seen_ms
            if query.ended or seen_ms is None:
                continue
            due_ms = now_ms - end_age_ms(now_ms - seen_ms)
            for each in tuple(query.partitions.values()):
                if each.log.end_ms <= due_ms:
                    yield self._seek(each)

    def log_end(self, topic: str, partition: int, offset: int, now_ms: float) -> None:
        """Record a log end (read_uncommitted) that the proxy has looked up."""
        for each in self._each(topic, partition):
            each.record_lookup_end(offset, now_ms, client_saw_it=False)

    def appended(self, topic: str, partition: int, end: int, now_ms: float) -> None:
        """Record up to where a client has written; a lower end than is known is left out."""
        for each in self._each(topic, partition):
            each.record_high_watermark(end, now_ms)

    def log_start(self, topic: str, partition: int, offset: int, _now_ms: float) -> None:
        """Record a log start that the proxy has looked up."""
        for each in self._each(topic, partition):
            each.log.record_start(offset)

    def _seek(self, partition: PartitionProgress) -> TopicPartition:
        """Return its key; keep who reads it, so that what is learned finds it at once."""
        self._readers.setdefault(partition.key, set()).add(partition)
        return partition.key

    def _each(self, topic: str, partition: int) -> list[PartitionProgress]:
        key = (topic, partition)
        readers = self._readers.get(key)
        if readers is None:
            return [query.partitions[key] for query in self.queries if key in query.partitions]
        return [each for each in readers if not each.is_dropped]

    def changes(self) -> tuple[list[Record], list[str]]:
        """Return at most MAX_RECORDS_PER_WRITE records to write, and keys to delete; none: done.

        What is delivered makes no record due: it is written with what is completed.
        """
        return self.journal.take(MAX_RECORDS_PER_WRITE)

    def changes_failed(self) -> None:
        """Return with the next `changes` what the last one did as well: it was not written."""
        self.journal.give_back()

    def load(self, records: Iterable[Record] | ReadRecords) -> list[str]:
        """Restore what an earlier process kept, or another member; return which were not, and why.

        Call it before anything is known of their queries. Refused ones stay in the state. Of one
        query what was reported last is taken: others were left by one that it took over from. A
        configured query is found by its name, any other by its client id. A record that has another
        key by that is moved.
        """
        read = records if isinstance(records, ReadRecords) else read_records(records)
        refused = read.refused
        latest: dict[str, ProgressRecord] = {}
        """By client id: whoever reported last has it."""
        for _, entry in sorted(read.entries, key=lambda item: -item[1].at_s):
            client_id = self.client_of_record(entry.label, entry.client_id)
            latest.setdefault(client_id, entry)
        problems = {
            client_id: self._begin_with(client_id, latest[client_id]) for client_id in latest
        }
        for key, entry in sorted(read.entries, key=lambda item: item[1].at_s):
            client_id = self.client_of_record(entry.label, entry.client_id)
            query, query_id = self.query_of(client_id), latest[client_id].query_id
            if problems[client_id] is not None or query is None:
                refused[key] = problems[client_id] or ""
            elif entry.query_id != query_id:
                refused[key] = f"it is of query {entry.query_id}, {entry.label!r} is {query_id} now"
            elif (partition := restore(query, entry, self.now_ms)) is None:
                refused[key] = "too many partitions"
            else:
                self._commit_later(query, partition.key)
                is_moved = key != FORMAT.key(query.client_id, *partition.key)
                if is_moved:
                    self.journal.mark_deleted(key)
                if is_moved or query.name != entry.label:
                    self.journal.mark_changed((query, partition.key))
        return [f"progress record {key!r} is left out: {why}" for key, why in refused.items()]

    def _begin_with(self, client_id: str, entry: ProgressRecord) -> str | None:
        """Make the query that its latest record is of; return why that can't be, if so."""
        query = self.follow(client_id, make_room=False)
        if query is None:
            return "there are too many queries"
        if query.query_id is not None:
            return f"client {client_id!r} is of query {query.query_id}"
        query.query_id = query.progress_id = entry.query_id
        query.run_id, query.reported_name = entry.run_id, entry.name
        self.relabel(query)
        return None
