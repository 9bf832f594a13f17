"""Describes Structured Streaming queries and pipelines: in full, and briefly for the status."""

import asyncio
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import chain
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from metrics.clock import ms_to_s
from proxy.admin.document_models import (
    Column,
    DocumentModel,
    RowContext,
    between_s,
    clipped,
    picked,
    rounded,
)
from proxy.admin.pagination import Key, PageBuilder, PageRequest
from proxy.admin.pipeline_documents import (
    MAX_PIPELINE_SUMMARIES,
    PIPELINE_ROW,
    pipeline_summary,
    pipeline_urgency,
)
from proxy.progress.events import ProgressEvent
from proxy.progress.offset_ranges import OffsetRange
from proxy.progress.partition import PartitionProgress
from proxy.progress.query import FollowedQuery
from proxy.progress.report import RefusalReason
from proxy.queries.queries import Queries
from proxy.quota.meters import Clock
from proxy.slices import TimeSlicer
from proxy.state import Document

MAX_RANGES_SHOWN = 20
"""Of one set of ranges; the records are those of all."""


def progress_documents(
    queries: Iterable[FollowedQuery],
    now: RowContext,
    adaptive: Mapping[str, Document] = MappingProxyType({}),
) -> Iterator[Document | None]:
    """Yield each query by its name, after a None for each partition, which is as it is by then.

    `adaptive` is what backpressure does to queries, by their names.
    """
    for query in sorted(queries, key=lambda query: query.name):
        partitions: list[Document] = []
        for key in sorted(query.partitions):
            yield None
            partition = query.partitions.get(key)
            if partition is not None:  # it may be gone by now
                partitions.append(PARTITION.document(partition, now))
        about = {"partitions": partitions, "adaptive": adaptive.get(query.name)}
        totals = yield from _totals(partitions)
        yield {**QUERY.document(query, now), **about, "totals": totals}


def _trigger(query: FollowedQuery, _: RowContext) -> Document | None:
    if query.trigger_kind is None:
        return None
    return {"kind": query.trigger_kind, "interval_s": ms_to_s(query.trigger_interval_ms)}


def _batch(query: FollowedQuery, now: RowContext) -> Document | None:
    if (batch := query.last_batch) is None:
        return None
    times = {"duration_s": ms_to_s(batch.duration_ms), "ended": now.at_s(batch.ended_ms)}
    return {"id": batch.batch_id, "rows": batch.rows, **times}


def _reports(query: FollowedQuery, _: RowContext) -> Document:
    refused = {str(reason): number for reason, number in sorted(query.refused_reports.items())}
    counts = {"received": query.received, "lost": query.lost_reports}
    return {**counts, "repeated": query.refused_reports[RefusalReason.REPEATED], "refused": refused}


def _commit(query: FollowedQuery, now: RowContext) -> Document | None:
    if not query.commit_group:
        return None
    state = query.commit
    return {
        "group": query.commit_group,
        "last": now.at_s(state.last_ms),
        **picked(state, "error", "backwards"),
    }


def _event(event: ProgressEvent, now: RowContext) -> Document:
    about = picked(event, "topic", "partition", "text")
    return {"kind": str(event.kind), **about, "at": now.at_s(event.at_ms)}


def _ranges(ranges: Iterable[OffsetRange]) -> Document:
    every = list(ranges)
    return {
        "records": sum(end - start for start, end in every),
        "ranges": [list(each) for each in every[:MAX_RANGES_SHOWN]],
        "ranges_left_off": max(len(every) - MAX_RANGES_SHOWN, 0),
    }


def _skipped(partition: PartitionProgress, now: RowContext) -> list[Document]:
    return [
        {
            **{"from": each.start, "to": each.end, "records": each.records},
            **{"reason": str(each.reason), "at": now.at_s(each.at_ms)},
        }
        for each in partition.skipped.ranges
    ]


QUERY = DocumentModel[FollowedQuery](
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
        "report_age_s": lambda query, now: ms_to_s(query.report_age_ms(now.now_ms)),
        "batch": _batch,
        "last_batch": "last_batch_id",
        "reports": _reports,
        "commit": _commit,
        "advice": lambda query, now: [_event(each, now) for each in query.advice.values()],
        "notes": lambda query, now: [_event(each, now) for each in reversed(query.events)],
    },
)

PARTITION = DocumentModel[PartitionProgress](
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
        "completed_to": "committed_to",
        "delivered_to": "position",
        "completed_at": "committed_at_s",
        "committed": "group_offset",
        "high_watermark": "log.high_watermark",
        "log_start": "log.log_start_offset",
        "lag_records": lambda each, _: each.lag_records(),
        "lag_s": lambda each, now: rounded(ms_to_s(each.lag_ms(now.now_ms)), 3),
        "in_flight": lambda each, _: _ranges(each.pending),
        "failed": lambda each, _: _ranges(each.failed),
        "refetched": lambda each, _: {
            "records": each.refetched_records,
            "latest": each.refetched and list(each.refetched),
        },
        "skipped": _skipped,
        "skipped_records": "skipped.records",
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

COST_FACTOR = 20.0
"""So many times the CPU time that a thing took to make is it shown again: many may be looking, and
no client's traffic moves in that time."""

MAX_QUERY_SUMMARIES = 100  # queries in the status document

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class CachedWalk(Generic[T]):
    """What a walk has found, by what it was asked; found again when it is no longer fresh.

    The walk is taken a slice at a time, its steps without a find are None; who asks while it is
    made waits for it.
    """

    _walk: Callable[..., Iterable[T | None]]
    _slices: TimeSlicer
    _clock_ms: Clock
    _cpu_ms: Clock
    _fresh_ms: Callable[[float], float]
    """Returns for how long it is fresh, by what it took to make."""
    _making: asyncio.Lock = field(default_factory=asyncio.Lock)
    _found: dict[tuple[Hashable, ...], tuple[float, Sequence[T]]] = field(default_factory=dict)
    """With the time until which it is fresh."""
    _cost_ms: float = 0.0
    """In CPU time, without what others did between two steps."""

    async def get(self, *asked: Hashable) -> Sequence[T]:
        """Return what was found last, or is found now."""
        async with self._making:
            now_ms = self._clock_ms()
            self._found = {key: each for key, each in self._found.items() if now_ms < each[0]}
            if asked not in self._found:
                self._cost_ms = 0.0
                steps = await self._slices.collect(self._timed(asked))
                found = [step for step in steps if step is not None]
                until_ms = self._clock_ms() + self._fresh_ms(self._cost_ms)
                self._found[asked] = until_ms, found
                return found
            return self._found[asked][1]

    def _timed(self, asked: tuple[Hashable, ...]) -> Iterator[T | None]:
        started_ms = self._cpu_ms()
        for step in chain(self._walk(*asked), (None,)):
            self._cost_ms += self._cpu_ms() - started_ms
            yield step
            started_ms = self._cpu_ms()


class QueryDocuments:
    """All queries and pipelines as documents, made again as rarely as their size demands.

    With 10,000 partitions it takes 0.1 to 0.25 s to make them.
    """

    def __init__(
        self, reports: Queries, slices: TimeSlicer, clock_ms: Clock, cpu_ms: Clock
    ) -> None:
        how = slices, clock_ms, cpu_ms, lambda cost_ms: COST_FACTOR * cost_ms

        def progress() -> Iterator[Document | None]:
            now = RowContext(time.time(), clock_ms())
            return progress_documents(reports.progress(), now, reports.pressure())

        def pipelines() -> Iterator[Document]:
            for each in reports.pipelines():
                yield PIPELINE_ROW.document(each, RowContext(0.0, clock_ms()))

        self.documents = CachedWalk(progress, *how).get
        """Returns each query with its partitions, what backpressure does to it, and totals."""
        self.pipelines = CachedWalk(pipelines, *how).get
        """Returns each pipeline."""
        self._pressure = CachedWalk(lambda: reports.pressure().values(), *how).get

    async def adaptive(self) -> Mapping[str, Document]:
        """Return what backpressure does, by the entity whose reading is bounded."""
        return {document["entity"]: document for document in await self._pressure()}

    async def summaries(self, now_s: float) -> list[Document]:
        """Return the queries briefly: those that need somebody first, then those with most lag.

        At most MAX_QUERY_SUMMARIES. `now_s` is the time in seconds of the Unix epoch.
        """
        documents = nlargest(MAX_QUERY_SUMMARIES, await self.documents(), key=query_urgency)
        return [_query_summary(document, now_s) for document in documents]

    async def pipeline_summaries(self) -> list[Document]:
        """Return the pipelines briefly: the full first, then those with most that is held.

        At most MAX_PIPELINE_SUMMARIES.
        """
        documents = map(pipeline_summary, await self.pipelines())
        return nlargest(MAX_PIPELINE_SUMMARIES, documents, key=pipeline_urgency)


ListedPartition = tuple[Document, Document | None]
"""A query, and one of its partitions; None: it has none yet."""


def partitions_of(documents: Iterable[Document]) -> Iterator[ListedPartition]:
    """Yield the partitions of queries, each with its query."""
    return ((query, each) for query in documents for each in query["partitions"] or (None,))


def partition_page_builder(
    page: PageRequest, rows: Iterable[ListedPartition] = ()
) -> PageBuilder[ListedPartition]:
    """Return what chooses the partitions of a page: the stuck come first, then by their lag."""
    return PageBuilder(page, _partition_key, _partition_urgency, rows)


def _partition_key(row: ListedPartition) -> Key:
    query, each = row
    return (query["name"], *((each["topic"], each["partition"]) if each else ("", -1)))


def _partition_urgency(row: ListedPartition) -> tuple[bool, int]:
    each = row[1]
    return each is not None and each["stuck_since"] is not None, (each and each["lag_records"]) or 0


def grouped_by_query(rows: Iterable[ListedPartition]) -> list[Document]:
    """Return the queries of some partitions, each with those of them that are its own."""
    queries: dict[int, dict[str, Any]] = {}
    for query, each in sorted(rows, key=_partition_key):
        shown = queries.setdefault(id(query), {**query, "partitions": []})
        shown["partitions"] += () if each is None else (each,)
    return list(queries.values())


_TOTALS: Mapping[str, tuple[Callable[[Document], Any], Callable[[list[Any]], Any]]] = {
    "lag_records": (itemgetter("lag_records"), lambda known: sum(known) if known else None),
    "lag_s": (itemgetter("lag_s"), lambda known: max(known, default=None)),
    "in_flight_records": (lambda each: each["in_flight"]["records"], sum),
    "failed_records": (lambda each: each["failed"]["records"], sum),
    "skipped_records": (itemgetter("skipped_records"), sum),
    "stuck_partitions": (itemgetter("stuck_since"), len),
}
"""Of what of each partition they are made, and how of those that have it."""


def _totals(partitions: Sequence[Document]) -> Generator[None, None, Document]:
    """Add partitions up, a figure in a step: of 10,000 each takes about a millisecond."""
    totals: dict[str, Any] = {"partitions": len(partitions)}
    for name, (value, combine) in _TOTALS.items():
        totals[name] = combine([each for each in map(value, partitions) if each is not None])
        yield
    return totals


def _query_summary(document: Document, now_s: float) -> Document:
    commit, batch, adaptive = document["commit"], document["batch"], document["adaptive"]
    return {
        **picked(document, "name", "client_id", "state"),
        "error": clipped(document["error"]),
        "advice": [clipped(note["text"]) for note in document["advice"]],
        "batch": batch
        and {
            **picked(batch, "id", "rows", "duration_s"),
            "ended_ago_s": between_s(batch["ended"], now_s),
        },
        **document["totals"],
        "commit": commit
        and {
            "group": commit["group"],
            "ok": commit["error"] is None,
            "error": clipped(commit["error"]),
            "ago_s": between_s(commit["last"], now_s),
        },
        "adaptive": adaptive
        and {
            **picked(adaptive, "rate", "bound", "static_bound"),
            "reason": clipped(adaptive["reason"]),
        },
    }


def query_urgency(query: Document) -> tuple[bool, bool, bool, int]:
    """Return what puts a query, in full or briefly, before others: trouble, then its lag."""
    commit, totals = query["commit"], query.get("totals", query)
    return (
        totals["stuck_partitions"] > 0,
        query["state"] == "failed",
        commit is not None and commit["error"] is not None,
        totals["lag_records"] or 0,
    )
