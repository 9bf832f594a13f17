"""Answers what all members know together: asks them, and merges the documents in a thread."""

import asyncio
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, generate_latest

from metrics import MemberInstruments, join_scrapes
from metrics.member_names import machine_of
from proxy.admin.api import MAX_CONNECTION_NUMBER, THROTTLING_PATH, filter_and_limit
from proxy.admin.peers.document_tables import TABLES, member_figures, merged_connections
from proxy.admin.peers.member_documents import MemberDocuments, Part
from proxy.admin.peers.members import (
    Answers,
    Members,
    NoReply,
    Question,
    Reply,
    none_answers,
    passed_on,
    target_of,
)
from proxy.admin.query_documents import PARTITION_DEPTH
from proxy.admin.rates.suggestions import OBSERVED_PATH, SUGGESTIONS_PATH, SuggestionRoutes
from proxy.admin.replies import (
    CONTENT_TYPE,
    JSON_HEADERS,
    ApiError,
    answer_in_pieces,
    parse_number,
    readiness_answer,
)
from proxy.admin.request_times import HISTOGRAMS
from proxy.admin.sliced_json import ROW_DEPTH, read_whole, written_pieces
from proxy.slices import LONG_ANSWERS
from proxy.state import Document

_MISFITS = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""What merging raises for a document that has not what it should."""

_REFUSALS = range(401, 600)
"""Of a member while others answer; but for 404, which says that it has not what is asked for."""

_NOT_UNDERSTOOD = "its answer is not understood; is it of another version?"


class MergedAnswers:
    """The handlers."""

    def __init__(self, members: Members, suggestions: SuggestionRoutes) -> None:
        self._members = members
        self._suggestions = suggestions
        self._tier = members.tier
        self._long_answers = asyncio.Semaphore(LONG_ANSWERS)
        """To be held while documents of megabytes are in memory."""
        self._up = MemberInstruments(CollectorRegistry()).member_up
        """Shown beside what members say themselves: only who asks knows it."""

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers by method and path."""
        same = ("/v1/quotas", THROTTLING_PATH, "/v1/audit")
        return [
            web.get("/metrics", self._get_metrics),
            web.get("/readyz", self._get_readyz),
            web.get("/v1/connections", self._get_connections),
            web.get(SUGGESTIONS_PATH, self._get_suggestions),
            *(web.get(path, self._get_any) for path in same),
            *(web.get(path, self._get_by(path)) for path in TABLES),
        ]

    def _get_by(self, path: str) -> Handler:
        """Return the handler of a path whose documents are merged by its table alone."""
        is_status = path == "/v1/status"
        depth = PARTITION_DEPTH if path == "/v1/progress" else ROW_DEPTH

        async def get(request: web.Request) -> web.StreamResponse:
            told = MemberDocuments({}, None, self._tier.owner_of)
            target = target_of(request)
            if is_status or path == "/v1/clients":
                told = replace(told, limit=filter_and_limit(request)[1])
            if is_status:
                told = replace(told, tier=self._tier.document())
                target += f"{'&' if '?' in target else '?'}{HISTOGRAMS}"
            question = Question(request, target)
            return await self._merged(question, told, TABLES[path], depth, with_figures=is_status)

        return get

    async def _get_connections(self, request: web.Request) -> web.StreamResponse:
        told = MemberDocuments({}, filter_and_limit(request)[1])
        by_number = "after" in request.query
        target = _after_at(request) if by_number else target_of(request)
        table = (partial(merged_connections, by_number=by_number),)
        return await self._merged(Question(request, target), told, table)

    async def _get_any(self, request: web.Request) -> web.StreamResponse:
        """Answer what is the same at all members: from the leader, or another one that answers."""
        missing: list[NoReply] = []
        for each in self._members.asked_for(request):
            answers = await self._members.ask_all([each], Question(request, target_of(request)))
            if answers.replies:
                return passed_on(answers.replies[0])
            missing += answers.missing
        raise none_answers(missing)

    async def _get_suggestions(self, request: web.Request) -> web.StreamResponse:
        """Answer by the rules in force here, of what all have seen.

        A client is at its owner, and what it had before is where it was; sketches of both are
        added, as quantiles could not be.
        """
        asked = self._members.asked_for(request)
        # What others have seen comes to megabytes, and what this one has stays here.
        others = [each for each in asked if each.name != self._tier.name]
        with_own = len(others) < len(asked)
        query = f"?{request.query_string}" if request.query_string else ""
        async with self._long_answers:
            answers = await self._members.ask_all(others, Question(request, OBSERVED_PATH + query))
            if not answers.ok and not with_own:
                if not answers.replies:
                    raise none_answers(answers.missing)
                return passed_on(answers.replies[0])
            try:
                observed = await self._suggestions.read(reply.body for reply in answers.ok)
            except ValueError:
                unread = [NoReply(reply.member, _NOT_UNDERSTOOD) for reply in answers.ok]
                raise none_answers(unread) from None
            return await self._suggestions.suggested(request, observed, with_own=with_own)

    async def _get_metrics(self, request: web.Request) -> web.Response:
        """Answer for the members of this machine, as it is scraped by itself."""
        asked = self._members.asked_here(request)
        async with self._long_answers:
            answers = await self._members.ask_all(asked, Question(request, target_of(request)))
            if "member" in request.query:
                if not answers.replies:
                    raise none_answers(answers.missing)
                return passed_on(answers.replies[0])
            texts = {reply.member: reply.body for reply in answers.ok}
            self._up.clear()
            for each in asked:
                self._up.labels(each.name).set(each.name in texts)
            up = generate_latest(self._up)
            # A thread: four members with 10,000 clients each have tens of megabytes.
            parts = await asyncio.to_thread(join_scrapes, (up, *texts.values()))
        return answer_in_pieces(parts, {"Content-Type": CONTENT_TYPE})

    async def _get_readyz(self, request: web.Request) -> web.Response:
        """Answer that clients can be served when all members that run say so, of this machine.

        One whose process does not run is only named: it is started again, and the others serve.
        """
        asked = self._members.asked_here(request)
        answers = await self._members.ask_all(asked, Question(request, "/readyz"))
        if not answers.replies:
            return readiness_answer(none_answers(answers.missing).what, None)
        reasons, warnings = [], []
        for reply in answers.replies:
            document = _readiness_of(reply.body)
            if not reply.is_ok:
                reasons.append(f"member {reply.member!r}: {document.get('reason')}")
            if warning := document.get("warning"):
                warnings.append(warning)
        for each in answers.missing:
            if each.alive:
                reasons.append(f"member {each.member!r} does not answer: {each.why}")
            else:
                warnings.append(f"member {each.member!r} does not run")
        return readiness_answer(
            "; ".join(reasons) or None, "; ".join(dict.fromkeys(warnings)) or None
        )

    async def _merged(
        self,
        question: Question,
        told: MemberDocuments,
        table: Sequence[Part],
        depth: int = ROW_DEPTH,
        *,
        with_figures: bool = False,
    ) -> web.StreamResponse:
        """Ask the members, and answer with what the table makes of their documents.

        `told` has all but these, which are read and written in steps of values at `depth`. What all
        refuse is refused as the first of them did. `with_figures`: the table of members has some.
        """
        asked = self._members.asked_for(question.request)
        async with self._long_answers:
            answers = await self._members.ask_all(asked, question)
            if not answers.replies:
                raise none_answers(answers.missing)
            if not answers.ok:
                if answers.missing and answers.replies[0].status == HTTPStatus.NOT_FOUND:
                    raise _not_found(answers)
                return passed_on(answers.replies[0])
            figures = member_figures if with_figures else _no_figures
            body = await asyncio.to_thread(_merged_body, answers, told, table, depth, figures)
        return answer_in_pieces(body, JSON_HEADERS)


def _no_figures(_: Document) -> Document:
    return {}


def _not_found(answers: Answers) -> ApiError:
    """Return the error for what is at no member that answers, while others do not."""
    away = ", ".join(repr(each.member) for each in answers.missing)
    fix = f"ask again when all answer; without an answer: {away}"
    return ApiError(404, "no member that answers knows it", fix)


def _merged_body(
    answers: Answers,
    told: MemberDocuments,
    table: Sequence[Part],
    depth: int,
    figures: Callable[[Document], Document],
) -> bytearray:
    """Return the merged document as JSON. Raises ApiError with 503 when none is understood.

    For a thread: all of it is Python in small steps, between which the event loop runs.
    """
    read = {reply.member: _read(reply, depth) for reply in answers.ok}
    told = replace(told, by_member={name: each for name, each in read.items() if each is not None})
    try:
        merged = told.merged(table)
    except _MISFITS:  # of another version
        told = replace(told, by_member=dict(_fitting(told, table)))
        merged = told.merged(table) if told.by_member else {}
    missing = [*answers.missing]
    for reply in answers.replies:
        if (why := _trouble(reply, told.by_member)) is not None:
            missing.append(NoReply(reply.member, why))
    if not told.by_member:
        raise none_answers(missing)
    missing.sort(key=lambda each: _in_order(each.member))
    rows = {each.member: _row(each.member) for each in answers.replies}
    for name, document in told.by_member.items():
        rows[name] |= figures(document)
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


def _read(reply: Reply, depth: int) -> Document | None:
    """Return what a member said; None for what is no document."""
    try:
        document = read_whole(reply.body, depth)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _fitting(told: MemberDocuments, table: Sequence[Part]) -> Iterator[tuple[str, Document]]:
    """Yield the documents that can be merged, with the names of their members."""
    for name, document in told.by_member.items():
        with suppress(*_MISFITS):
            replace(told, by_member={name: document}).merged(table)
            yield name, document


def _readiness_of(body: bytes) -> Mapping[str, str]:
    """Return what a member says of its readiness, a short document."""
    try:
        document = json.loads(body)
    except ValueError:
        return {"reason": "its answer is no JSON"}
    return document if isinstance(document, dict) else {}


def _after_at(request: web.Request) -> Callable[[str], str]:
    """Return what gives path and query for a machine, with an `after` of its own.

    Raises ApiError with 400 for an `after` that is no id.
    """
    text = request.query["after"]
    of, _, digits = text.rpartition("/")
    number = parse_number(digits)
    if number is None:
        fix = f"write MACHINE/N, or 0 to {MAX_CONNECTION_NUMBER}"
        raise ApiError(400, f"after: {text!r} is no id of a connection", fix)

    def target(machine: str) -> str:
        # With the same number the connection of a later machine comes behind.
        after = max(number - 1, 0) if of and machine > of else number
        return str(request.rel_url.update_query(after=str(after)))

    return target


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a key by which member 2 comes before member 10."""
    parts = name.split("/")
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
