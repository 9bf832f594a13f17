"""The paths of Spark jobs: reports come in, progress and pipelines go out."""

import asyncio
from collections.abc import Sequence

from aiohttp import web

from proxy.admin.bodies import json_body, number
from proxy.admin.errors import HEADERS, ApiError, answer
from proxy.admin.pipelines import Pipelines
from proxy.admin.queries import Document, Queries, Reports, limited, written
from proxy.progress.query import MAX_PARTITIONS
from proxy.progress.report import MAX_REPORT_BYTES, ReportRefused

DEFAULT_PARTITIONS = 1_000
"""How many partitions of a query one answer holds, unless the request says."""


class SparkApi:
    """The handlers.

    Args:
        reports: takes reports in.
        queries: describes what is known of queries.
        pipelines: describes what is known of pipelines.

    """

    def __init__(self, reports: Reports, queries: Queries, pipelines: Pipelines) -> None:
        self._reports = reports
        self._queries = queries
        self._pipelines = pipelines

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post("/v1/spark/batches", self._post_report),
            web.get("/v1/progress", self._get_progress),
            web.get("/v1/pipelines", self._get_pipelines),
        ]

    async def _post_report(self, request: web.Request) -> web.Response:
        raw = await json_body(request, MAX_REPORT_BYTES)
        try:
            return answer(await self._reports.accept(raw))
        except ReportRefused as error:
            raise ApiError(
                error.status, error.message, error.fix, reason=str(error.reason)
            ) from None

    async def _get_progress(self, request: web.Request) -> web.Response:
        limit = number(request, "limit", DEFAULT_PARTITIONS, MAX_PARTITIONS)
        name = request.query.get("query")
        documents = _named(
            name,
            self._queries.documents(),
            f"no query {name!r} is followed",
            "see GET /v1/progress for those that are; name it under queries, or let "
            "QuotaListener report it",
        )
        shown = [limited(document, limit) for document in documents]
        body = await asyncio.to_thread(written, shown)
        return web.Response(
            body=body, content_type="application/json", charset="utf-8", headers=HEADERS
        )

    async def _get_pipelines(self, request: web.Request) -> web.Response:
        name = request.query.get("pipeline")
        documents = _named(
            name,
            self._pipelines.documents(),
            f"there is no pipeline {name!r}",
            "see GET /v1/pipelines for those that there are; name it under pipelines in the "
            "configuration",
        )
        return answer({"pipelines": documents})


def _named(
    name: str | None, documents: Sequence[Document], unknown: str, fix: str
) -> Sequence[Document]:
    """Return those of this name, or all when none is asked for.

    Raises ApiError with status 404, `unknown` and `fix` when there is none.
    """
    if name is None:
        return documents
    found = [document for document in documents if document["name"] == name]
    if not found:
        raise ApiError(404, unknown, fix)
    return found
