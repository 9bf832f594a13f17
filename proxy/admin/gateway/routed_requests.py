"""Passes what changes something on to the member that it is for, or to all."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from aiohttp import web
from structlog import get_logger

from proxy.admin.api import (
    ANY_NAME,
    CONNECTIONS_PATH,
    MAX_CHANGE_BYTES,
    MAX_OVERRIDE_BYTES,
    QUOTAS_PATH,
    THROTTLING_PATH,
)
from proxy.admin.gateway.connection_ids import closed_at
from proxy.admin.gateway.member_client import NoReply, Reply
from proxy.admin.gateway.members import (
    MEMBERS_FIX,
    Members,
    lost,
    none_answers,
    passed_on,
    target_of,
)
from proxy.admin.gateway.merging.member_documents import OwnerOf
from proxy.admin.left_changes import LEFT_CHANGES_PATH
from proxy.admin.log_level import LOG_LEVEL_PATH, MAX_LEVEL_BYTES
from proxy.admin.port.guard import REPORT_PATH
from proxy.admin.port.member_headers import CHANGES
from proxy.admin.replies import ApiError, json_body
from proxy.admin.sliced_json import read_whole
from proxy.progress.report import MAX_REPORT_BYTES

_REPORT_DEPTH = 5
"""At which a report is read in one step: there are offsets of thousands of partitions in it."""

AWAY_LIMIT_S, AWAY_RETRY_S = 2.0, 0.1
"""For how long, and how often, a member is asked that is away."""

_FIRST = "which keeps what concerns all"
_OWNER = "which owns the report's client"

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RoutedRequests:
    """The handlers."""

    members: Members
    owner_of: OwnerOf
    client_of: Callable[[str], str]
    """Gives the client id of a query by its name, for reports that name no client."""
    is_tier: bool = False
    """Whether there are other machines."""

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers by method and path."""
        return [
            web.post(REPORT_PATH, self._post_report),
            web.put(QUOTAS_PATH + ANY_NAME, self._put_quota),
            web.delete(QUOTAS_PATH + ANY_NAME, self._delete_quota),
            web.post(THROTTLING_PATH, self._post_throttling),
            web.put(LOG_LEVEL_PATH, self._put_level),
            web.delete(CONNECTIONS_PATH + ANY_NAME, self._delete_connection),
        ]

    async def _post_report(self, request: web.Request) -> web.StreamResponse:
        body = await json_body(request, MAX_REPORT_BYTES)
        client_id = await asyncio.to_thread(peeked_client, body, self.client_of)
        if client_id is None:
            return await self._pass_to(self.members.first, request, body, _FIRST)
        owner = self.owner_of(client_id)
        if owner is None:
            what = f"nobody owns the client {client_id!r} at this moment"
            raise ApiError(503, what, "send the report again in a second")
        return await self._pass_to(owner, request, body, _OWNER)

    async def _put_quota(self, request: web.Request) -> web.StreamResponse:
        body = await json_body(request, MAX_OVERRIDE_BYTES)
        return await self._pass_to(self.members.first, request, body, _FIRST)

    async def _delete_quota(self, request: web.Request) -> web.StreamResponse:
        return await self._pass_to(self.members.first, request, None, _FIRST)

    async def _post_throttling(self, request: web.Request) -> web.StreamResponse:
        body = await json_body(request, MAX_CHANGE_BYTES)
        return await self._pass_to(self.members.first, request, body, _FIRST)

    async def _pass_to(
        self, name: str, request: web.Request, body: bytes | None, what: str
    ) -> web.Response:
        """Answer as the member of a name does. Raises ApiError with 502 or 503 if it does not.

        One that is away is waited for: a process that has ended is soon started again.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + AWAY_LIMIT_S
        while True:
            reply = await self.members.ask_one(name, request.method, target_of(request), body)
            if not isinstance(reply, NoReply):
                await self._record(reply)
                return passed_on(reply)
            if reply.was_sent or loop.time() >= until_s:
                raise lost(reply, what)
            await asyncio.sleep(AWAY_RETRY_S)

    async def _put_level(self, request: web.Request) -> web.StreamResponse:
        """Set the level of all; the first one records it, and says what is wrong with it."""
        body = await json_body(request, MAX_LEVEL_BYTES)
        asked = self.members.asked_for(request)
        answers = await self.members.ask_all(asked, "PUT", target_of(request), body)
        refused = [reply for reply in answers.replies if not reply.is_ok]
        if refused:
            return passed_on(refused[0])
        if not answers.replies:
            raise none_answers(answers.missing)
        if "member" in request.query and answers.replies[0].member != self.members.first:
            await self._record(answers.replies[0])
        if answers.missing:
            away = "; ".join(f"{each.member!r}: {each.why}" for each in answers.missing)
            have = ", ".join(repr(reply.member) for reply in answers.replies)
            text = f"not all members have the level: {away}; it is set at {have}"
            raise ApiError(502, text, "set it again when all answer; see members in GET /v1/status")
        return passed_on(answers.replies[0])

    async def _delete_connection(self, request: web.Request) -> web.StreamResponse:
        """Close a connection at the member that has it, which is found by asking all."""
        asked, target = self.members.asked_for(request), target_of(request)
        if self.is_tier:
            machine, target = closed_at(request)
            asked = [each for each in asked if each.machine == machine]
            if not asked:
                raise ApiError(404, f"there is no machine {machine!r}", MEMBERS_FIX)
        answers = await self.members.ask_all(asked, "DELETE", target)
        if answers.ok:
            closed = answers.ok[0]
            await self._record(closed)
            return passed_on(closed)
        if answers.missing:
            raise lost(answers.missing[0], "which may have the connection")
        if not answers.replies:
            raise none_answers(())
        return passed_on(answers.replies[0])

    async def _record(self, reply: Reply) -> None:
        """Have the first member record what another one left it. If it can't, the log says so."""
        if CHANGES not in reply.headers:
            return
        changes = unquote(reply.headers[CHANGES])
        body = changes.encode()
        told = await self.members.ask_one(self.members.first, "POST", LEFT_CHANGES_PATH, body)
        if isinstance(told, NoReply) or not told.is_ok:
            problem = told.why if isinstance(told, NoReply) else told.body.decode(errors="replace")
            _log.error("a change is not kept in the state's audit", problem=problem, what=changes)


def peeked_client(body: bytes, client_of: Callable[[str], str]) -> str | None:
    """Return the client id that a report is about, as far as it can be told; None if it cannot.

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
