"""Passes what changes something on to the member that it is for, or to all."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from aiohttp import web
from aiohttp.typedefs import Handler
from structlog import get_logger

from metrics.member_names import machine_of
from proxy.admin.api import (
    ANY_NAME,
    CONNECTIONS_PATH,
    MAX_CHANGE_BYTES,
    MAX_OVERRIDE_BYTES,
    QUOTAS_PATH,
    THROTTLING_PATH,
    tail_of,
)
from proxy.admin.log_level import LOG_LEVEL_PATH, MAX_LEVEL_BYTES
from proxy.admin.peers.members import (
    MEMBERS_FIX,
    Members,
    NoReply,
    Question,
    Reply,
    lost,
    none_answers,
    passed_on,
    target_of,
)
from proxy.admin.peers.tier_routes import LEFT_CHANGES_PATH
from proxy.admin.port.guard import CHANGES, REPORT_PATH
from proxy.admin.replies import ApiError, json_body
from proxy.admin.sliced_json import read_whole
from proxy.progress.report import MAX_REPORT_BYTES

_REPORT_DEPTH = 5
"""At which a report is read in one step: there are offsets of thousands of partitions in it."""

UNDONE, UNDONE_LIMIT_S = HTTPStatus.SERVICE_UNAVAILABLE, 8.0
"""What a member answers that has not taken yet what it is asked for, and how long it is asked."""

AWAY_LIMIT_S, AWAY_RETRY_S = 2.0, 0.1
"""For how long, and how often, a member is asked that is away."""

_LEADER = "which keeps what concerns all"
_OWNER = "which owns the report's client"

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RoutedRequests:
    """The handlers."""

    members: Members
    client_of: Callable[[str], str]
    """Gives the client id of a query by its name, for reports that name no client."""

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers by method and path."""
        return [
            web.post(REPORT_PATH, self._post_report),
            web.put(QUOTAS_PATH + ANY_NAME, self._at_leader(MAX_OVERRIDE_BYTES)),
            web.delete(QUOTAS_PATH + ANY_NAME, self._at_leader(None)),
            web.post(THROTTLING_PATH, self._at_leader(MAX_CHANGE_BYTES)),
            web.put(LOG_LEVEL_PATH, self._put_level),
            web.delete(CONNECTIONS_PATH + ANY_NAME, self._delete_connection),
        ]

    async def _post_report(self, request: web.Request) -> web.StreamResponse:
        body = await json_body(request, MAX_REPORT_BYTES)
        client_id = await asyncio.to_thread(peeked_client, body, self.client_of)
        if client_id is None:
            return await self._pass_to(self._leader, request, body, _LEADER)

        def owner() -> str:
            name = self.members.tier.owner_of(client_id)
            if name is None:
                what = f"nobody owns the client {client_id!r} at this moment"
                raise ApiError(503, what, "send the report again in a second")
            return name

        return await self._pass_to(owner, request, body, _OWNER)

    def _at_leader(self, most_bytes: int | None) -> Handler:
        """Return the handler of what the leader does; with None the request has no body."""

        async def change(request: web.Request) -> web.StreamResponse:
            body = None if most_bytes is None else await json_body(request, most_bytes)
            return await self._pass_to(self._leader, request, body, _LEADER)

        return change

    def _leader(self) -> str:
        return self.members.tier.leader

    async def _pass_to(
        self, who: Callable[[], str], request: web.Request, body: bytes | None, what: str
    ) -> web.Response:
        """Answer as the member does that `who` names. Raises ApiError, 502 or 503, if it does not.

        One that is away is waited for: a process that has ended is soon started again. So is one
        that has not taken yet what it is asked for.
        """
        loop = asyncio.get_running_loop()
        until_s, undone_until_s = loop.time() + AWAY_LIMIT_S, loop.time() + UNDONE_LIMIT_S
        while True:
            question = Question(request, target_of(request), request.method, body)
            reply = await self.members.ask_one(who(), question)
            is_undone = not isinstance(reply, NoReply) and reply.status == UNDONE
            is_late = loop.time() >= (undone_until_s if is_undone else until_s)
            if not isinstance(reply, NoReply) and (is_late or not is_undone):
                await self._record(request, reply)
                return passed_on(reply)
            if isinstance(reply, NoReply) and (reply.was_sent or is_late):
                raise lost(reply, what)
            await asyncio.sleep(AWAY_RETRY_S)

    async def _put_level(self, request: web.Request) -> web.StreamResponse:
        """Set the level of all; the leader records it, and says what is wrong with it."""
        body = await json_body(request, MAX_LEVEL_BYTES)
        asked = self.members.asked_for(request)
        question = Question(request, target_of(request), "PUT", body)
        answers = await self.members.ask_all(asked, question)
        refused = [reply for reply in answers.replies if not reply.is_ok]
        if refused:
            return passed_on(refused[0])
        if not answers.replies:
            raise none_answers(answers.missing)
        if "member" in request.query:
            await self._record(request, answers.replies[0])
        if answers.missing:
            away = "; ".join(f"{each.member!r}: {each.why}" for each in answers.missing)
            have = ", ".join(repr(reply.member) for reply in answers.replies)
            text = f"not all members have the level: {away}; it is set at {have}"
            raise ApiError(502, text, "set it again when all answer; see members in GET /v1/status")
        return passed_on(answers.replies[0])

    async def _delete_connection(self, request: web.Request) -> web.StreamResponse:
        """Close a connection at the member that has it, which is found by asking all."""
        name = tail_of(request, CONNECTIONS_PATH)
        machine, _, number = name.rpartition("/")
        if not machine:
            fix = "write MACHINE/N; see GET /v1/connections for those that are open"
            what = f"no connection {name!r} is open: each machine has its own"
            raise ApiError(404, what, fix)
        asked = [
            each for each in self.members.asked_for(request) if machine_of(each.name) == machine
        ]
        if not asked:
            raise ApiError(404, f"there is no machine {machine!r}", MEMBERS_FIX)
        _, question_mark, query = target_of(request).partition("?")
        target = f"{CONNECTIONS_PATH}{number}{question_mark}{query}"
        answers = await self.members.ask_all(asked, Question(request, target, "DELETE"))
        if answers.ok:
            closed = answers.ok[0]
            await self._record(request, closed)
            return passed_on(closed)
        if answers.missing:
            raise lost(answers.missing[0], "which may have the connection")
        return passed_on(answers.replies[0])

    async def _record(self, request: web.Request, reply: Reply) -> None:
        """Have the leader record what another one left it. If it can't, the log says so."""
        if CHANGES not in reply.headers:
            return
        changes = unquote(reply.headers[CHANGES])
        question = Question(request, LEFT_CHANGES_PATH, "POST", changes.encode())
        kept = await self.members.ask_one(self._leader(), question)
        if isinstance(kept, NoReply) or not kept.is_ok:
            problem = kept.why if isinstance(kept, NoReply) else kept.body.decode(errors="replace")
            _log.error("a change is not kept in the state's audit", problem=problem, what=changes)


def peeked_client(body: bytes, client_of: Callable[[str], str]) -> str | None:
    """Return the client id that a report is about, as far as it can be kept; None if it cannot.

    Nothing else of the body is looked at: the member that gets it reads it with all care.
    """
    try:
        document: Any = read_whole(body, _REPORT_DEPTH)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    client_id, name = document.get("client_id"), document.get("name")
    if client_id and isinstance(client_id, str):
        return client_id
    return client_of(name) if name and isinstance(name, str) else None
