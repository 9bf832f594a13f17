"""The progress of a query as JSON, for people and scripts."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from metrics.clock import MS_PER_SECOND
from proxy.state import Document

from .events import ProgressEvent
from .offset_ranges import OffsetRange
from .partition import PartitionProgress
from .query import QueryProgress
from .report import Refusal

MAX_RANGES_SHOWN = 20
"""Of one set of ranges; the records are those of all."""

EpochSeconds: TypeAlias = Callable[[float | None], float | None]
"""Returns a monotonic time in seconds of the Unix epoch, to the millisecond; None for None."""


def query_document(query: QueryProgress, now_ms: float, now_s: float) -> Iterator[Document | None]:
    """Yield all about a query, after a None for each partition, which is shown as it is by then.

    Offsets and counts are whole numbers, times seconds of the Unix epoch, durations end in `_s`.
    What is not known is null.
    """

    def at_s(at_ms: float | None) -> float | None:
        return None if at_ms is None else round(now_s - (now_ms - at_ms) / MS_PER_SECOND, 3)

    partitions: list[Document] = []
    for key in sorted(query.partitions):
        yield None
        partition = query.partitions.get(key)
        if partition is not None:  # it may be gone by now
            partitions.append(_partition(partition, now_ms, at_s))
    trigger, batch, commit = query.trigger_kind, query.last_batch, query.commit
    yield {
        "name": query.name,
        "query_id": query.query_id,
        "run_id": query.run_id,
        "client_id": query.client_id,
        "state": str(query.state(now_ms)),
        "ended": query.ended,
        "error": query.error,
        "trigger": trigger
        and {"kind": trigger, "interval_s": in_seconds(query.trigger_interval_ms)},
        "last_report": at_s(query.last_report_ms),
        "last_heard": at_s(query.last_heard_ms),
        "report_age_s": in_seconds(query.report_age_ms(now_ms)),
        "last_batch": query.last_batch_id,
        "batch": batch
        and {
            "id": batch.batch_id,
            "rows": batch.rows,
            "duration_s": in_seconds(batch.duration_ms),
            "ended": at_s(batch.ended_ms),
        },
        "run_batches": query.run_batches,
        "reports": {
            "received": query.received,
            "lost": query.lost_reports,
            "repeated": query.refused_reports[Refusal.REPEATED],
            "refused": {str(reason): n for reason, n in sorted(query.refused_reports.items())},
        },
        "commit": query.commit_group
        and {
            "group": query.commit_group,
            "last": at_s(commit.last_ms),
            "error": commit.error,
            "backwards": commit.backwards,
        },
        "advice": [_event(event, at_s) for event in query.advice.values()],
        "notes": [_event(event, at_s) for event in reversed(query.events)],
        "partitions": partitions,
    }


def _partition(partition: PartitionProgress, now_ms: float, at_s: EpochSeconds) -> Document:
    lag_ms, log = partition.lag_ms(now_ms), partition.log
    return {
        "topic": partition.topic,
        "partition": partition.partition,
        "topic_id": log.topic_id.hex() if log.topic_id is not None else None,
        "leader": partition.leader,
        "delivered_to": partition.position,
        "completed_to": partition.committed_to,
        "completed_at": partition.committed_at_s,
        "committed": partition.group_offset,
        "high_watermark": log.high_watermark,
        "log_start": log.log_start_offset,
        "lag_records": partition.lag_records(),
        "lag_s": round(lag_ms / MS_PER_SECOND, 3) if lag_ms is not None else None,
        "in_flight": _ranges(partition.pending),
        "failed": _ranges(partition.failed),
        "refetched": {
            "records": partition.refetched_records,
            "latest": partition.refetched and list(partition.refetched),
        },
        "skipped": [
            {
                "from": each.start,
                "to": each.end,
                "records": each.records,
                "reason": str(each.reason),
                "at": at_s(each.at_ms),
            }
            for each in partition.skipped.ranges
        ],
        "skipped_records": partition.skipped.records,
        "stuck_since": at_s(partition.stuck_since_ms) if partition.stuck else None,
    }


def _ranges(ranges: Iterable[OffsetRange]) -> Document:
    every = list(ranges)
    return {
        "records": sum(end - start for start, end in every),
        "ranges": [list(each) for each in every[:MAX_RANGES_SHOWN]],
        "ranges_left_off": max(len(every) - MAX_RANGES_SHOWN, 0),
    }


def _event(event: ProgressEvent, at_s: EpochSeconds) -> Document:
    return {
        "kind": str(event.kind),
        "topic": event.topic,
        "partition": event.partition,
        "text": event.text,
        "at": at_s(event.at_ms),
    }


def in_seconds(ms: float | None) -> float | None:
    """Return milliseconds in seconds; None for None."""
    return ms / MS_PER_SECOND if ms is not None else None
