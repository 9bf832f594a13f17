"""How far Spark queries are, as documents: each query and each of its partitions."""

from collections.abc import Iterable, Iterator

from metrics.clock import in_seconds
from proxy.admin.document_models import Column, Model, Moment
from proxy.admin.written_values import picked, rounded
from proxy.progress.events import ProgressEvent
from proxy.progress.offset_ranges import OffsetRange
from proxy.progress.partition import PartitionProgress
from proxy.progress.query import QueryProgress
from proxy.progress.report import Refusal
from proxy.state import Document

MAX_RANGES_SHOWN = 20
"""Of one set of ranges; the records are those of all."""


def progress_documents(
    queries: Iterable[QueryProgress], now_ms: float, now_s: float
) -> Iterator[Document | None]:
    """Yield each query by its name, after a None for each partition, which is as it is by then."""
    now = Moment(now_s, now_ms)
    for query in sorted(queries, key=lambda query: query.name):
        partitions: list[Document] = []
        for key in sorted(query.partitions):
            yield None
            partition = query.partitions.get(key)
            if partition is not None:  # it may be gone by now
                partitions.append(PARTITION.document(partition, now))
        yield {**QUERY.document(query, now), "partitions": partitions}


def _trigger(query: QueryProgress, _: Moment) -> Document | None:
    if query.trigger_kind is None:
        return None
    return {"kind": query.trigger_kind, "interval_s": in_seconds(query.trigger_interval_ms)}


def _batch(query: QueryProgress, now: Moment) -> Document | None:
    if (batch := query.last_batch) is None:
        return None
    times = {"duration_s": in_seconds(batch.duration_ms), "ended": now.at_s(batch.ended_ms)}
    return {"id": batch.batch_id, "rows": batch.rows, **times}


def _reports(query: QueryProgress, _: Moment) -> Document:
    refused = {str(reason): number for reason, number in sorted(query.refused_reports.items())}
    counts = {"received": query.received, "lost": query.lost_reports}
    return {**counts, "repeated": query.refused_reports[Refusal.REPEATED], "refused": refused}


def _commit(query: QueryProgress, now: Moment) -> Document | None:
    if not query.commit_group:
        return None
    state = query.commit
    return {
        "group": query.commit_group,
        "last": now.at_s(state.last_ms),
        **picked(state, "error", "backwards"),
    }


def _event(event: ProgressEvent, now: Moment) -> Document:
    about = picked(event, "topic", "partition", "text")
    return {"kind": str(event.kind), **about, "at": now.at_s(event.at_ms)}


def _ranges(ranges: Iterable[OffsetRange]) -> Document:
    every = list(ranges)
    return {
        "records": sum(end - start for start, end in every),
        "ranges": [list(each) for each in every[:MAX_RANGES_SHOWN]],
        "ranges_left_off": max(len(every) - MAX_RANGES_SHOWN, 0),
    }


def _skipped(partition: PartitionProgress, now: Moment) -> list[Document]:
    return [
        {
            **{"from": each.start, "to": each.end, "records": each.records},
            **{"reason": str(each.reason), "at": now.at_s(each.at_ms)},
        }
        for each in partition.skipped.ranges
    ]


QUERY = Model[QueryProgress](
    """
    name, client_id, query_id, run_id: whose it is; the ids are Spark's
    state, ended, error: `running`, `idle`, `ended`, `failed`, or `silent`: neither ended nor heard
        of for a minute; when it ended, and with which exception
    trigger: of the present run; `null` when not known. `kind` is `processing_time`,
        `available_now`, `once`, `continuous`, `real_time`, or `other`; `interval_s` is 0 for as
        fast as it can, `null` for the second and third
    last_report, last_heard: when its listener last reported an event, and when it last said
        anything of the present run
    report_age_s: for how long no report has said what the run has completed, and so how old
        `completed_to` and `lag` may be. A heartbeat of a listener that knows of no further batch
        counts; `null` when nothing has yet, or the run has ended
    batch, last_batch, run_batches: the last one that was reported: `id`, `rows`, `duration_s`
        (Spark's `triggerExecution`) and `ended`; its number, and how many this run has had
    reports: `received`, `lost`, `repeated`, and how many were `refused`, by reason
    commit: `null` when the query has no `commit_group`; else the `group`, when it was committed
        `last`, the last `error`, and how often a commit would have gone `backwards`
    advice: what to mend in its configuration or job: [the
        kinds](spark.md#what-the-proxy-says-to-mend)
    notes: what happened lately, the newest first, each with its `text`
    adaptive: `null` when no adaptive rule bounds its client; else `entity`, `client_id`, `query`,
        `state`, `rate` (records/s), `ceiling`, `bound` and `static_bound` (bytes/s),
        `bytes_per_record`, `offsets_per_record`, `batch_interval_ms` as the rule says or as learnt,
        `waiting_ms`, `bound_age_s`, `report_age_s`, `reason`; and of the log's end that the driver
        was told `clamp`: `on`, `why`, `offsets`, and the records
        [`withheld`](spark.md#the-signal-for-autoscalers)
    totals: of all partitions, shown or not: `partitions`, `lag_records`, `lag_s` (the longest),
        `in_flight_records`, `failed_records`, `skipped_records`, `stuck_partitions`
    partitions: those of the page
    """,
    {
        "state": lambda query, now: str(query.state(now.now_ms)),
        "trigger": _trigger,
        "last_report": lambda query, now: now.at_s(query.last_report_ms),
        "last_heard": lambda query, now: now.at_s(query.last_heard_ms),
        "report_age_s": lambda query, now: in_seconds(query.report_age_ms(now.now_ms)),
        "batch": _batch,
        "last_batch": lambda query, _: query.last_batch_id,
        "reports": _reports,
        "commit": _commit,
        "advice": lambda query, now: [_event(each, now) for each in query.advice.values()],
        "notes": lambda query, now: [_event(each, now) for each in reversed(query.events)],
    },
)

PARTITION = Model[PartitionProgress](
    """
    topic, partition, topic_id, leader: which it is, and the node id of the broker that leads it
    completed_to, delivered_to, completed_at: all below was completed by batches, was given to the
        query; when the first was so
    committed: to the group
    high_watermark, log_start, lag_records, lag_s: the log's end is that of what the query is
        answered; when nothing passes, the proxy asks: while the query is at work each 0.2 to 4 s
        (of 10,000 partitions), else in a sixtieth of the time without a sign of it, 10 s at most
    in_flight, failed: given and not completed; of that, what will be read again: `records`, and the
        `ranges` of offsets, of which 20 are shown and `ranges_left_off` not
    refetched: given again: `records`, and the `latest`
    skipped, skipped_records: ranges that the query does not read, each `from` an offset `to` before
        another, with its reason. What the broker has removed counts when a reader is told so, and
        at the latest with the report of the batch that should have had it
    stuck_since: since when nothing completes although there is lag
    """,
    {
        "topic_id": lambda each, _: each.log.topic_id and each.log.topic_id.hex(),
        "completed_to": lambda each, _: each.committed_to,
        "delivered_to": lambda each, _: each.position,
        "completed_at": lambda each, _: each.committed_at_s,
        "committed": lambda each, _: each.group_offset,
        "high_watermark": lambda each, _: each.log.high_watermark,
        "log_start": lambda each, _: each.log.log_start_offset,
        "lag_records": lambda each, _: each.lag_records(),
        "lag_s": lambda each, now: rounded(in_seconds(each.lag_ms(now.now_ms)), 3),
        "in_flight": lambda each, _: _ranges(each.pending),
        "failed": lambda each, _: _ranges(each.failed),
        "refetched": lambda each, _: {
            "records": each.refetched_records,
            "latest": each.refetched and list(each.refetched),
        },
        "skipped": _skipped,
        "skipped_records": lambda each, _: each.skipped.records,
        "stuck_since": lambda each, now: now.at_s(each.stuck_since_ms) if each.stuck else None,
    },
    columns=(
        Column("completed", "completed_to", "count", page="Completed to"),
        Column("end", "high_watermark", "count", page="Log end"),
        Column("lag", "lag_records", "count", page="Lag"),
        Column("oldest", "lag_s", "seconds", page="Oldest"),
        Column("in flight", "in_flight.records", "count", page="In flight"),
    ),
)
