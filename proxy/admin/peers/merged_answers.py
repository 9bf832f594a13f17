"""Answers what all members know together: asks them, and merges the documents in a thread."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from metrics.member_names import machine_of
from proxy.admin.api import THROTTLING_PATH, filter_and_limit, is_by_client
from proxy.admin.log_level import LOG_LEVEL_PATH
from proxy.admin.peers.connection_ids import after_at, show_machines
from proxy.admin.peers.member_client import NoReply, Reply
from proxy.admin.peers.member_requests import (
    Answers,
    MemberRequests,
    lost,
    none_answers,
    passed_on,
    target_of,
)
from proxy.admin.peers.merging.lists import CONNECTIONS_IN_ORDER, CONNECTIONS_TABLE, TABLES
from proxy.admin.peers.merging.member_documents import (
    DocumentTable,
    MemberDocument,
    MemberDocuments,
)
from proxy.admin.peers.merging.status_document import member_figures, merged_status
from proxy.admin.replies import JSON_HEADERS, ApiError, answer_in_pieces
from proxy.admin.request_times import HISTOGRAMS
from proxy.admin.sliced_json import ROW_DEPTH, read_whole, written_pieces
from proxy.admin.suggestion_routes import OBSERVED_PATH, SERIES_DEPTH, SUGGESTIONS_PATH

Merge = Callable[[MemberDocuments], dict[str, Any]]

FiguresOf = Callable[[MemberDocument], dict[str, Any]]
"""Makes the row of a member that answered in the table of members."""

_MISFITS = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""What merging raises for a document that has not what it should."""

_REFUSALS = range(401, 600)
"""Of a member while others answer; but for 404, which says that it has not what is asked for."""

_NOT_UNDERSTOOD = "its answer is not understood; is it of another version?"


class MergedAnswers:
    """The handlers.

    `long_answers` is to be held while documents of megabytes are in memory.
    """

    def __init__(self, members: MemberRequests, long_answers: asyncio.Semaphore) -> None:
        self._members = members
        self._tier = members.tier
        self._long_answers = long_answers

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers by method and path."""
        return [
            web.get("/v1/status", self._get_status),
            web.get("/v1/connections", self._get_connections),
            web.get("/v1/quotas", self._get_any),
            web.get(THROTTLING_PATH, self._get_any),
            web.get("/v1/audit", self._get_any),
            web.get(LOG_LEVEL_PATH, self._get_log_level),
            web.get(SUGGESTIONS_PATH, self._get_suggestions),
            *(web.get(path, self._get_by(table)) for path, table in TABLES.items()),
        ]

    async def _get_status(self, request: web.Request) -> web.StreamResponse:
        _, limit = filter_and_limit(request)
        is_by_client(request)  # refuses what is neither
        separator = "&" if "?" in request.raw_path else "?"
        target = f"{target_of(request)}{separator}{HISTOGRAMS}"
        merge = partial(
            merged_status, limit=limit, owner_of=self._tier.owner_of, tier=self._tier.document()
        )
        return await self._merged(request, merge, target=target, figures=member_figures)

    async def _get_connections(self, request: web.Request) -> web.StreamResponse:
        _, limit = filter_and_limit(request)
        table, target = CONNECTIONS_TABLE, None
        if "after" in request.query:
            table, target = CONNECTIONS_IN_ORDER, partial(after_at, request)
            target("")  # refuses what is no id

        def merge(documents: MemberDocuments) -> dict[str, Any]:
            return show_machines(table.merged(documents, limit))

        return await self._merged(request, merge, target=target)

    def _get_by(self, table: DocumentTable) -> Handler:
        """Return the handler of a path whose documents are merged by the table alone."""

        async def get(request: web.Request) -> web.StreamResponse:
            takes_limit = any(each.takes_limit for each in table.lists)
            limit = filter_and_limit(request)[1] if takes_limit else None
            merge = partial(table.merged, limit=limit, owner_of=self._tier.owner_of)
            return await self._merged(request, merge, depth=table.depth)

        return get

    async def _get_any(self, request: web.Request) -> web.StreamResponse:
        """Answer what is the same at all members: from the leader, or another one that answers."""
        missing: list[NoReply] = []
        for each in self._members.asked_for(request):
            answers = await self._members.ask_all(request, [each], "GET", target_of(request))
            if answers.replies:
                return passed_on(answers.replies[0])
            missing += answers.missing
        raise none_answers(missing)

    async def _get_log_level(self, request: web.Request) -> web.StreamResponse:
        def merge(documents: MemberDocuments) -> dict[str, Any]:
            levels = [{"name": each.member, "level": each.document["level"]} for each in documents]
            return {**documents[0].document, "levels": levels}

        return await self._merged(request, merge)

    async def _get_suggestions(self, request: web.Request) -> web.StreamResponse:
        """Answer by the rules of one member, this one if it is asked, of what all have seen.

        A client is at its owner, and what it had before is where it was; sketches of both are
        added, as quantiles could not be.
        """
        asked = self._members.asked_for(request)
        query = f"?{request.query_string}" if request.query_string else ""
        target = f"{OBSERVED_PATH}{query}"
        async with self._long_answers:
            answers = await self._members.ask_all(request, asked, "GET", target)
            if not answers.ok:
                if not answers.replies:
                    raise none_answers(answers.missing)
                return passed_on(answers.replies[0])
            # What others have seen comes to megabytes, and what this one has stays here.
            host, *others = sorted(answers.ok, key=lambda each: each.member != self._tier.name)
            body = await asyncio.to_thread(_joined_observations, others)
            reply = await self._members.ask_one(request, host.member, "POST", target, body)
        if isinstance(reply, NoReply):
            raise lost(reply, "which puts together what all have seen")
        return passed_on(reply)

    async def _merged(
        self,
        request: web.Request,
        merge: Merge,
        *,
        target: str | Callable[[str], str] | None = None,
        depth: int = ROW_DEPTH,
        figures: FiguresOf | None = None,
    ) -> web.StreamResponse:
        """Ask the members, and answer with what `merge` makes of their documents.

        What all refuse is refused as the first of them did.
        """
        asked = self._members.asked_for(request)
        async with self._long_answers:
            answers = await self._members.ask_all(
                request, asked, "GET", target or target_of(request)
            )
            if not answers.replies:
                raise none_answers(answers.missing)
            if not answers.ok:
                if answers.missing and answers.replies[0].status == HTTPStatus.NOT_FOUND:
                    raise _not_found(answers)
                return passed_on(answers.replies[0])
            body = await asyncio.to_thread(_merged_body, answers, merge, depth, figures)
        return answer_in_pieces(body, JSON_HEADERS)


def _not_found(answers: Answers) -> ApiError:
    """Return the error for what is at no member that answers, while others do not."""
    away = ", ".join(repr(each.member) for each in answers.missing)
    fix = f"ask again when all answer; without an answer: {away}"
    return ApiError(404, "no member that answers knows it", fix)


def _merged_body(
    answers: Answers, merge: Merge, depth: int, figures: FiguresOf | None
) -> bytearray:
    """Return the merged document as JSON. Raises ApiError with 503 when none is understood.

    For a thread: all of it is Python in small steps, between which the event loop runs.
    """
    documents = [read for reply in answers.ok if (read := _read(reply, depth)) is not None]
    try:
        merged = merge(documents)
    except _MISFITS:  # of another version
        documents = [each for each in documents if _fits(merge, each)]
        merged = merge(documents) if documents else {}
    understood = {each.member for each in documents}
    missing = [*answers.missing]
    for reply in answers.replies:
        if (why := _trouble(reply, understood)) is not None:
            missing.append(NoReply(reply.member, why))
    if not documents:
        raise none_answers(missing)
    missing.sort(key=lambda each: _in_order(each.member))
    rows = {each.member: _row(each.member) for each in answers.replies}
    if figures is not None:
        rows |= {each.member: _row(each.member) | figures(each) for each in documents}
    for each in missing:
        trouble = {"alive": each.alive, "answers": False, "problem": each.why}
        rows[each.member] = _row(each.member) | trouble
    merged["members"] = [rows[name] for name in sorted(rows, key=_in_order)]
    merged["unreachable"] = [{"name": each.member, "why": each.why} for each in missing]
    body = bytearray()
    for piece in written_pieces(merged, depth):
        body += piece.encode()
    return body


def _row(name: str) -> dict[str, Any]:
    return {"name": name, "machine": machine_of(name), "alive": True, "answers": True}


def _trouble(reply: Reply, understood: Collection[str]) -> str | None:
    """Return why what a member knows is missing although it answered; None: it is not."""
    if reply.is_ok:
        return None if reply.member in understood else _NOT_UNDERSTOOD
    is_refusal = reply.status in _REFUSALS and reply.status != HTTPStatus.NOT_FOUND
    return f"it refuses to answer with {reply.status}" if is_refusal else None


def _read(reply: Reply, depth: int) -> MemberDocument | None:
    """Return what a member said; None for what is no document."""
    try:
        document = read_whole(reply.body, depth)
    except (ValueError, RecursionError):
        return None
    return MemberDocument(reply.member, document) if isinstance(document, dict) else None


def _fits(merge: Merge, document: MemberDocument) -> bool:
    try:
        merge([document])
    except _MISFITS:
        return False
    return True


def _joined_observations(replies: Sequence[Reply]) -> bytes:
    """Return the body that says what several members have seen."""
    documents = [read_whole(reply.body, SERIES_DEPTH) for reply in replies]
    joined = {
        "left_out": sum(each["left_out"] for each in documents),
        "observed": [row for each in documents for row in each["observed"]],
    }
    return "".join(written_pieces(joined, SERIES_DEPTH)).encode()


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a key by which member 2 comes before member 10."""
    parts = name.split("/")
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
