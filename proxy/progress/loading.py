"""Takes up the progress that an earlier process kept."""

from collections.abc import Iterable

from proxy.state import Record

from .commits import Commits
from .progress_records import Journal, ProgressRecord, key_of, read_record
from .query import QueryProgress
from .query_clients import QueryClients


def load_records(
    records: Iterable[Record], clients: QueryClients, journal: Journal, commits: Commits
) -> list[str]:
    """Take records up into a clients that has no progress yet; return what was refused, and why.

    Of records with one label those of the query that was reported on last are taken: others were
    left by a query that it took over from. A configured query is found by its name, any other by
    its client id. Nothing is done to the state, but a record whose label changes is moved.
    """
    refused: list[str] = []
    by_label: dict[str, list[ProgressRecord]] = {}
    for record in records:
        try:
            kept = read_record(record)
        except ValueError as error:
            refused.append(f"progress record {record.key!r} is left out: {error}")
        else:
            by_label.setdefault(kept.label, []).append(kept)
    newest_first = sorted(by_label.items(), key=lambda item: -max(kept.at_s for kept in item[1]))
    for label, each in newest_first:
        latest = max(each, key=lambda kept: kept.at_s)
        query, problem = _query_for(latest, clients)
        for kept in each:
            key = key_of(label, kept.topic, kept.partition)
            if query is None:
                refused.append(f"progress record {key!r} is left out: {problem}")
            elif kept.query_id != latest.query_id:
                text = f"it is of query {kept.query_id}, {label!r} is {latest.query_id} now"
                refused.append(f"progress record {key!r} is left out: {text}")
            elif not _take_up(query, kept, commits, clients.now_ms):
                refused.append(f"progress record {key!r} is left out: too many partitions")
            elif query.name != label:
                journal.delete(key)
                journal.changed(query, query.partitions[kept.topic, kept.partition])
    return refused


def _query_for(kept: ProgressRecord, clients: QueryClients) -> tuple[QueryProgress | None, str]:
    query = clients.labelled(kept.label)
    if query is None or query.settings is None:
        query = clients.add(kept.client_id, make_room=False)
    if query is None:
        return None, "there are too many queries"
    if query.query_id is not None:
        return None, f"client {query.client_id!r} is of query {query.query_id}"
    query.query_id = query.progress_id = kept.query_id
    query.run_id = kept.run_id
    query.reported_name = kept.name
    clients.relabel(query)
    return query, ""


def _take_up(query: QueryProgress, kept: ProgressRecord, commits: Commits, now_ms: float) -> bool:
    partition = query.open(kept.topic, kept.partition, now_ms)
    if partition is None:
        return False
    partition.run_id = kept.run_id
    partition.committed_to = kept.completed
    partition.committed_at_s = kept.at_s
    partition.delivered.add(kept.completed, kept.delivered)
    partition.leader = kept.leader
    partition.may_go_back = kept.backwards
    if kept.topic_id is not None:
        partition.log.topic_id = bytes.fromhex(kept.topic_id)
    commits.changed(query, partition)
    return True
