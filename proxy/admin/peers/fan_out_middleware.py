"""Answers for all members of a tier: who of them answers what, and what they know together."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, generate_latest
from structlog import get_logger

from metrics import MemberInstruments, join_scrapes
from metrics.member_names import machine_of
from proxy.admin.admin_parts import AdminParts
from proxy.admin.api import (
    ANY_NAME,
    CONNECTIONS_PATH,
    LOG_LEVEL_PATH,
    QUOTAS_PATH,
    THROTTLING_PATH,
    connection_page_request,
    path_suffix,
    report_body_in_turn,
)
from proxy.admin.document_models import MISREAD
from proxy.admin.pagination import LISTS, PageRequest, page_request_of
from proxy.admin.peers.members import (
    MEMBERS_FIX,
    FanOutAnswers,
    ForwardedRequest,
    PeerFanOut,
    forwarded_reply,
    member_lost_error,
    no_answer_error,
)
from proxy.admin.peers.merged_documents import TABLES, MemberDocuments, Part
from proxy.admin.peers.peer_routes import LEFT_CHANGES_PATH, OF_MEMBERS
from proxy.admin.port.guard import CHANGES, REPORT_PATH, SCOPE
from proxy.admin.replies import (
    JSON_HEADERS,
    SCRAPE_HEADERS,
    ApiError,
    json_text,
    long_reply,
    object_or_none,
    read_json_bytes,
    readiness_reply,
)
from proxy.progress.report import MAX_VALUES, count_values
from proxy.slices import LONG_ANSWERS
from proxy.state import Document
from proxy.tier.peer_client import PeerError, Reply
from proxy.tier.peers import MAX_PEER_ANSWER_BYTES
from proxy.tier.tier_member import TierMember

UNDONE, UNDONE_LIMIT_S = HTTPStatus.SERVICE_UNAVAILABLE, 8.0
"""What a member answers that has not taken yet what it is asked for, and how long it is asked."""

AWAY_LIMIT_S, AWAY_RETRY_S = 2.0, 0.1
"""For how long, and how often, a member is asked that is away."""

MAX_MEMBER_VALUES = 1_000_000
"""In one answer that is merged. A thousand rows have a tenth of that, and while more were read no
thread would go on for a second."""

_LEADER = "which keeps what concerns all"
_OWNER = "which owns the report's client"
_NOT_UNDERSTOOD = "its answer is not understood; is it of another version?"

_log = get_logger(__name__)


class FanOutMiddleware:
    """The handlers."""

    def __init__(self, tier: TierMember, parts: AdminParts) -> None:
        self._members = PeerFanOut(tier)
        self._tier, self._parts = tier, parts
        self._long_answers = asyncio.Semaphore(LONG_ANSWERS)
        """To be held while documents of megabytes are in memory."""
        self._up = MemberInstruments(CollectorRegistry()).member_up
        """Shown beside what members say themselves: only who asks knows it."""

        self._handlers: Mapping[tuple[str, str], Handler] = {
            # What all members of this machine say:
            ("GET", "/metrics"): self._get_metrics,
            ("GET", "/readyz"): self._get_readyz,
            # What all say, merged:
            **{("GET", path): partial(self._get_merged, path) for path in TABLES},
            # The leader, or another one that answers:
            ("GET", "/v1/quotas"): self._get_any,
            ("GET", THROTTLING_PATH): self._get_any,
            ("GET", "/v1/audit"): self._get_any,
            # The leader alone:
            ("PUT", QUOTAS_PATH + ANY_NAME): self._change,
            ("DELETE", QUOTAS_PATH + ANY_NAME): self._change,
            ("POST", THROTTLING_PATH): self._change,
            # The owner of the report's client:
            ("POST", REPORT_PATH): self._post_report,
            # All, or the one that has it:
            ("PUT", LOG_LEVEL_PATH): self._put_level,
            ("DELETE", CONNECTIONS_PATH + ANY_NAME): self._delete_connection,
        }
        """By method and path."""

    @web.middleware
    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer for all members; for this one alone what one of them asks, or if it is alone."""
        resource = request.match_info.route.resource
        if SCOPE in request.headers or resource is None:
            return await handler(request)
        path = resource.canonical.replace("{tail}", ANY_NAME)
        if path.startswith(OF_MEMBERS):
            raise web.HTTPNotFound
        if self._members.is_alone:
            return await handler(request)
        method = "GET" if request.method == "HEAD" else request.method
        return await self._handlers.get((method, path), handler)(request)

    async def _get_merged(self, path: str, request: web.Request) -> web.StreamResponse:
        """Answer with what the table of a path makes of the documents of all.

        What all refuse is refused as the first of them did.
        """
        page = PageRequest(0)
        if path == "/v1/connections":
            page = connection_page_request(request, in_tier=True)
        elif path in LISTS:
            page = page_request_of(request)
        asked = self._members.asked_for(request)
        known = self._tier.document() if path == "/v1/status" else None
        more = {} if known is None else {"tier": known}
        async with self._long_answers:
            answers = await self._members.ask_all(asked, ForwardedRequest.of(request))
            if answers.first.status == HTTPStatus.NOT_FOUND and answers.missing and not answers.ok:
                away = ", ".join(repr(each.member) for each in answers.missing)
                fix = f"ask again when all answer; without an answer: {away}"
                raise ApiError(404, "no member that answers knows it", fix)
            if not answers.ok:
                return forwarded_reply(answers.first)
            # A thread: what ten members have to say takes some milliseconds each.
            body = await asyncio.to_thread(
                _merged_body, answers, TABLES[path], page, more, self._tier.name
            )
        return long_reply(body, JSON_HEADERS)

    async def _get_any(self, request: web.Request) -> web.StreamResponse:
        """Answer what is the same at all members: from the leader, or another one that answers."""
        missing: list[PeerError] = []
        for each in self._members.asked_for(request):
            reply = await self._members.ask_one(each.name, ForwardedRequest.of(request))
            if isinstance(reply, Reply):
                return forwarded_reply(reply)
            missing.append(reply)
        raise no_answer_error(missing)

    async def _get_metrics(self, request: web.Request) -> web.Response:
        """Answer for the members of this machine, as it is scraped by itself."""
        asked = self._members.asked_here(request)
        async with self._long_answers:
            answers = await self._members.ask_all(asked, ForwardedRequest.of(request))
            if "member" in request.query:
                return forwarded_reply(answers.first)
            texts = {reply.member: reply.body for reply in answers.ok}
            self._up.clear()
            for each in asked:
                self._up.labels(each.name).set(each.name in texts)
            # A thread: four members with 10,000 clients each have tens of megabytes.
            scrapes = generate_latest(self._up), *texts.values()
            body = await asyncio.to_thread(lambda: b"".join(join_scrapes(scrapes)))
        return long_reply(body, SCRAPE_HEADERS)

    async def _get_readyz(self, request: web.Request) -> web.Response:
        """Answer that clients can be served when all members that run say so, of this machine.

        One whose process does not run is only named: it is started again, and the others serve.
        """
        asked = self._members.asked_here(request)
        answers = await self._members.ask_all(asked, ForwardedRequest.of(request))
        if not answers.replies:
            return readiness_reply(no_answer_error(answers.missing).what, None)
        reasons, warnings = [], []
        for reply in answers.replies:
            is_short = len(reply.body) <= MAX_PEER_ANSWER_BYTES  # it is read on the event loop
            document = object_or_none(reply.body) if is_short else None
            document = document or {"reason": "its answer is no JSON"}
            if not reply.is_ok:
                reasons.append(f"member {reply.member!r}: {document.get('reason')}")
            if warning := document.get("warning"):
                warnings.append(str(warning))
        for each in answers.missing:
            if each.alive:
                reasons.append(f"member {each.member!r} does not answer: {each.why}")
            else:
                warnings.append(f"member {each.member!r} does not run")
        return readiness_reply(
            "; ".join(reasons) or None, "; ".join(dict.fromkeys(warnings)) or None
        )

    async def _post_report(self, request: web.Request) -> web.StreamResponse:
        async with report_body_in_turn(request, self._parts) as body:
            clients = self._parts.reports.registry.clients
            client_id = await asyncio.to_thread(client_of_report, body, clients)
            return await self._pass_to(request, body, client_id)

    async def _change(self, request: web.Request) -> web.StreamResponse:
        """Have the leader make a change; what is to be deleted comes without a body."""
        body = None if request.method == "DELETE" else await read_json_bytes(request)
        return await self._pass_to(request, body)

    async def _pass_to(
        self, request: web.Request, body: bytes | None, client_id: str | None = None
    ) -> web.Response:
        """Answer as a client's owner does, or the leader. Raises ApiError, 502 or 503, if it fails.

        One that is away is waited for: a process that has ended is soon started again. So is one
        that has not taken yet what it is asked for.
        """
        loop = asyncio.get_running_loop()
        until_s, undone_until_s = loop.time() + AWAY_LIMIT_S, loop.time() + UNDONE_LIMIT_S
        question = ForwardedRequest.of(request, body)
        while True:
            name = self._tier.leader if client_id is None else self._tier.owner_of(client_id)
            if name is None:
                what = f"nobody owns the client {client_id!r} at this moment"
                raise ApiError(503, what, "send the report again in a second")
            reply = await self._members.ask_one(name, question)
            if isinstance(reply, PeerError):
                if reply.was_sent or loop.time() >= until_s:
                    raise member_lost_error(reply, _LEADER if client_id is None else _OWNER)
            elif reply.status != UNDONE or loop.time() >= undone_until_s:
                await self._record(request, reply)
                return forwarded_reply(reply)
            await asyncio.sleep(AWAY_RETRY_S)

    async def _put_level(self, request: web.Request) -> web.StreamResponse:
        """Set the level of all; the leader records it, and says what is wrong with it."""
        question = ForwardedRequest.of(request, await read_json_bytes(request))
        answers = await self._members.ask_all(self._members.asked_for(request), question)
        first = answers.first
        refused = [reply for reply in answers.replies if not reply.is_ok]
        if refused:
            return forwarded_reply(refused[0])
        if "member" in request.query:
            await self._record(request, first)
        if answers.missing:
            away = "; ".join(f"{each.member!r}: {each.why}" for each in answers.missing)
            have = ", ".join(repr(reply.member) for reply in answers.replies)
            text = f"not all members have the level: {away}; it is set at {have}"
            raise ApiError(502, text, "set it again when all answer; see members in GET /v1/status")
        return forwarded_reply(first)

    async def _delete_connection(self, request: web.Request) -> web.StreamResponse:
        """Close a connection at the member that has it, which is found by asking all."""
        name = path_suffix(request, CONNECTIONS_PATH)
        machine, _, number = name.rpartition("/")
        if not machine:
            fix = "write MACHINE/N; see GET /v1/connections for those that are open"
            what = f"no connection {name!r} is open: each machine has its own"
            raise ApiError(404, what, fix)
        asked = [
            each for each in self._members.asked_for(request) if machine_of(each.name) == machine
        ]
        if not asked:
            raise ApiError(404, f"there is no machine {machine!r}", MEMBERS_FIX)
        question = ForwardedRequest.of(request)
        _, question_mark, query = question.target.partition("?")
        target = f"{CONNECTIONS_PATH}{number}{question_mark}{query}"
        answers = await self._members.ask_all(asked, replace(question, target=target))
        if answers.ok:
            closed = answers.ok[0]
            await self._record(request, closed)
            return forwarded_reply(closed)
        if answers.missing:
            raise member_lost_error(answers.missing[0], "which may have the connection")
        return forwarded_reply(answers.replies[0])

    async def _record(self, request: web.Request, reply: Reply) -> None:
        """Have the leader record what another one left it. If it can't, the log says so."""
        if CHANGES not in reply.headers:
            return
        changes = unquote(reply.headers[CHANGES])
        question = ForwardedRequest(request, LEFT_CHANGES_PATH, "POST", changes.encode())
        kept = await self._members.ask_one(self._tier.leader, question)
        if isinstance(kept, PeerError) or not kept.is_ok:
            why = kept.why if isinstance(kept, PeerError) else kept.body.decode(errors="replace")
            _log.error("a change is not kept in the state's audit", problem=why, what=changes)


def _merged_body(
    answers: FanOutAnswers, table: Sequence[Part], page: PageRequest, more: Document, own: str
) -> bytes:
    """Return the merged document, and more fields, as JSON; this member is `own`.

    Raises ApiError with 503 when no member is understood.
    """

    def merge(documents: Mapping[str, Document]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the document, and what it shows of each member. Raises one of MISREAD."""
        merged = MemberDocuments(documents, page).merged(table)
        figures = merged.pop("members", {})
        return merged, {name: dict(figures[name]) for name in documents if name in figures}

    def fits(documents: Mapping[str, Document]) -> bool:
        try:
            merge(documents)
        except MISREAD:
            return False
        return True

    documents: dict[str, Document] = {}
    missing = [*answers.missing]
    for reply in answers.replies:
        is_read = reply.is_ok and count_values(reply.body) <= MAX_MEMBER_VALUES
        document = object_or_none(reply.body) if is_read else None
        if document and fits({reply.member: document}):
            documents[reply.member] = document
        elif reply.is_ok:
            missing.append(PeerError(reply.member, _NOT_UNDERSTOOD))
        elif reply.status != HTTPStatus.NOT_FOUND:  # which says that it has not what is asked for
            missing.append(PeerError(reply.member, f"it refuses to answer with {reply.status}"))
    if not documents:
        raise no_answer_error(missing)
    try:
        merged, figures = merge(documents)
    except MISREAD:  # each makes sense by itself alone; it is this member that is to be believed
        fitting: dict[str, Document] = {}
        for name in sorted(documents, key=lambda name: name != own):
            if fits({**fitting, name: documents[name]}):
                fitting[name] = documents[name]
            else:
                missing.append(PeerError(name, _NOT_UNDERSTOOD))
        merged, figures = merge(fitting)
    merged |= more
    about: dict[str, dict[str, Any]] = {
        reply.member: {"alive": True, "answers": True} for reply in answers.replies
    }
    for name, of_member in figures.items():
        about[name] |= of_member
    for each in missing:
        about[each.member] = {"alive": each.alive, "answers": False, "problem": each.why}
    names = sorted(about, key=_in_order)
    merged["members"] = [
        {"name": name, "machine": machine_of(name), **about[name]} for name in names
    ]
    silent = (each for each in merged["members"] if not each["answers"])
    merged["unreachable"] = [{"name": each["name"], "why": each["problem"]} for each in silent]
    return json_text(merged)


def client_of_report(body: bytes, clients: Mapping[str, str]) -> str | None:
    """Return the client id that a report is about, as far as it can be kept; None if it cannot.

    `clients` are those of configured queries, by the queries' names.

    Nothing else of the body is looked at: the member that gets it reads it with all care.
    """
    if count_values(body) > MAX_VALUES:
        return None
    if (document := object_or_none(body)) is None:
        return None
    client_id, name = document.get("client_id"), document.get("name")
    if client_id and isinstance(client_id, str):
        return client_id
    return clients.get(name, name) if name and isinstance(name, str) else None


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a key by which member 2 comes before member 10."""
    parts = name.split("/")
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
