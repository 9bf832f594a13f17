"""Describes Structured Streaming queries and pipelines: in full, and briefly for the status."""

import asyncio
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import nlargest
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeVar

from proxy.admin.document_models import Moment
from proxy.admin.pages import Key, Page, PagedRows
from proxy.admin.pipeline_documents import (
    MAX_PIPELINE_SUMMARIES,
    PIPELINE_ROW,
    pipeline_summary,
    pipeline_urgency,
)
from proxy.admin.progress_documents import progress_documents
from proxy.admin.written_values import cut, picked
from proxy.pipeline.running_pipeline import RunningPipeline
from proxy.progress.query import QueryProgress
from proxy.progress.report import QueryScope
from proxy.slices import Slices
from proxy.state import Document

COST_FACTOR = 20.0
"""So many times as long as it took to make a thing is it shown again: many may be looking, and no
client's traffic moves in that time."""

MAX_QUERY_SUMMARIES = 100  # queries in the status document

T = TypeVar("T")


class Reports(Protocol):
    """What the rest of the program does with reports, and knows of queries."""

    async def accept(self, raw: bytes, scope: QueryScope) -> Document:
        """Apply a report on a query of a scope; return what came of it. Raises ReportRefused."""

    def progress(self) -> Iterable[QueryProgress]:
        """Return the queries that are followed."""

    def pressure(self) -> Mapping[str, Document]:
        """Return what backpressure does to the queries that have it, by their names."""

    def pipelines(self) -> Iterable[RunningPipeline]:
        """Return the pipelines that are at work."""


class Cached(Generic[T]):
    """What a walk has found, by what it was asked; found again when it is no longer fresh.

    `fresh_ms` says for how long it is, by what it took to make. The walk is taken a slice at a
    time, its steps without a find are None; who asks while it is made waits for it.
    """

    def __init__(
        self,
        walk: Callable[..., Iterable[T | None]],
        slices: Slices,
        clock_ms: Callable[[], float],
        fresh_ms: Callable[[float], float],
    ) -> None:
        self._walk, self._slices = walk, slices
        self._clock_ms, self._fresh_ms = clock_ms, fresh_ms
        self._making = asyncio.Lock()
        self._found: dict[tuple[Hashable, ...], tuple[float, Sequence[T]]] = {}
        """With the time until which it is fresh."""
        self._cost_ms = 0.0
        """Without what others did between two steps."""

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
        started_ms = self._clock_ms()
        for step in self._walk(*asked):
            self._cost_ms += self._clock_ms() - started_ms
            yield step
            started_ms = self._clock_ms()
        self._cost_ms += self._clock_ms() - started_ms


class QueryDocuments:
    """All queries and pipelines as documents, made again as rarely as their size demands.

    With 10,000 partitions it takes 0.1 to 0.25 s to make them.
    """

    def __init__(self, reports: Reports, slices: Slices, clock_ms: Callable[[], float]) -> None:
        how = slices, clock_ms, lambda cost_ms: COST_FACTOR * cost_ms
        self.documents = Cached(partial(_documents, reports, clock_ms), *how).get
        """Returns each query with its partitions, what backpressure does to it, and totals."""
        self.pipelines = Cached(
            lambda: (
                PIPELINE_ROW.document(each, Moment(0.0, clock_ms())) for each in reports.pipelines()
            ),
            *how,
        ).get
        """Returns each pipeline."""
        self._pressure = Cached(lambda: reports.pressure().values(), *how).get

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


def _documents(reports: Reports, clock_ms: Callable[[], float]) -> Iterator[Document | None]:
    adaptive = reports.pressure()
    for each in progress_documents(reports.progress(), clock_ms(), time.time()):
        yield None
        if each is not None:
            totals = yield from _totals(each["partitions"])
            yield {**each, "adaptive": adaptive.get(each["name"]), "totals": totals}


ListedPartition = tuple[Document, Document | None]
"""A query, and one of its partitions; None: it has none yet."""


def partitions_of(documents: Iterable[Document]) -> Iterator[ListedPartition]:
    """Yield the partitions of queries, each with its query."""
    return ((query, each) for query in documents for each in query["partitions"] or (None,))


def paged_partitions(
    page: Page, rows: Iterable[ListedPartition] = ()
) -> PagedRows[ListedPartition]:
    """Return what chooses the partitions of a page: the stuck come first, then by their lag."""
    return PagedRows(page, _partition_key, _partition_urgency, rows)


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
        "error": cut(document["error"]),
        "advice": [cut(note["text"]) for note in document["advice"]],
        "batch": batch
        and {
            **picked(batch, "id", "rows", "duration_s"),
            "ended_ago_s": _ago(batch["ended"], now_s),
        },
        **document["totals"],
        "commit": commit
        and {
            "group": commit["group"],
            "ok": commit["error"] is None,
            "error": cut(commit["error"]),
            "ago_s": _ago(commit["last"], now_s),
        },
        "adaptive": adaptive
        and {
            **picked(adaptive, "rate", "bound", "static_bound"),
            "reason": cut(adaptive["reason"]),
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


def _ago(at_s: float | None, now_s: float) -> float | None:
    return None if at_s is None else round(max(now_s - at_s, 0.0), 1)
