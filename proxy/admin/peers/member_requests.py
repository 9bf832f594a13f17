"""Asks all members at once, or one of them, in the name of who asks this one."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from metrics.member_names import machine_of
from proxy.admin.peers.member_client import MemberClient, NoReply, Reply
from proxy.admin.peers.own_handlers import ask_own_handlers
from proxy.admin.port.guard import SAFE_METHODS, current_author
from proxy.admin.port.member_headers import headers_of
from proxy.admin.replies import HEADERS, ApiError, answer_in_pieces
from proxy.admin.tier_protocol import MemberEndpoint, Tier

MEMBERS_FIX = "see members in GET /v1/status for which there are"


@dataclass(frozen=True, slots=True)
class Answers:
    """What came of asking several members."""

    replies: Sequence[Reply]
    """The leader's comes first, if it answered."""
    missing: Sequence[NoReply]
    """Members that did not answer."""

    @property
    def ok(self) -> list[Reply]:
        """Those that did what they were asked for."""
        return [reply for reply in self.replies if reply.is_ok]


@dataclass(frozen=True, slots=True)
class MemberRequests:
    """Asks the members of a tier: this one directly, the others by HTTP.

    All are asked for themselves alone, so that no request goes in a circle.
    """

    tier: Tier
    client: MemberClient

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody else, nor a tier that is known as such."""
        return len(self.tier.members()) < 2 and self.tier.document() is None  # noqa: PLR2004

    def asked_for(self, request: web.Request) -> list[MemberEndpoint]:
        """Return whom a request is about, the leader before the others.

        They are all, or those of `?member=NAME` with the name of a member or of a machine. Raises
        ApiError with 404 for a name that nobody has.
        """
        name = request.query.get("member")
        members = self.tier.members()
        found = [each for each in members if name in (None, each.name, machine_of(each.name))]
        if not found or name == "":
            raise ApiError(404, f"there is no member {name!r}", MEMBERS_FIX)
        leader = self.tier.leader
        return sorted(found, key=lambda each: each.name != leader)

    def asked_here(self, request: web.Request) -> list[MemberEndpoint]:
        """Return the members of this machine that a request is about, as `asked_for`."""
        here = machine_of(self.tier.name)
        found = [each for each in self.asked_for(request) if machine_of(each.name) == here]
        if not found:
            fix = "ask the admin port of that machine"
            raise ApiError(404, f"{request.path} is of this machine alone", fix)
        return found

    async def ask_all(
        self,
        request: web.Request,
        asked: Sequence[MemberEndpoint],
        method: str,
        target: str | Callable[[str], str],
        body: bytes | None = None,
    ) -> Answers:
        """Ask some members at once. No other than the leader records what it changes.

        `target` may differ by machine.
        """
        at = target if callable(target) else lambda _: target
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._ask(request, each, method, at(machine_of(each.name)), body))
                for each in asked
            ]
        results, leader = [task.result() for task in tasks], self.tier.leader
        replies = [each for each in results if isinstance(each, Reply)]
        return Answers(
            sorted(replies, key=lambda each: each.member != leader),
            [each for each in results if isinstance(each, NoReply)],
        )

    async def ask_one(
        self, request: web.Request, name: str, method: str, target: str, body: bytes | None = None
    ) -> Reply | NoReply:
        """Ask the member of a name."""
        for each in self.tier.members():
            if each.name == name:
                return await self._ask(request, each, method, target, body)
        return NoReply(name, "it is no member any more", was_sent=False)

    async def _ask(
        self,
        request: web.Request,
        endpoint: MemberEndpoint,
        method: str,
        target: str,
        body: bytes | None,
    ) -> Reply | NoReply:
        name, changes = endpoint.name, method not in SAFE_METHODS
        leaves_audit = changes and name != self.tier.leader
        headers = headers_of(current_author(), leaves_audit=leaves_audit)
        if body is not None:
            headers["Content-Type"] = "application/json"
        if name == self.tier.name:
            return await ask_own_handlers(request, name, method, target, headers, body)
        return await self.client.ask(endpoint, method, target, headers, body, has_time=changes)


def target_of(request: web.Request) -> str:
    """Return path and query as they came. Raises ApiError with 404 for the URL of a whole."""
    if not request.raw_path.startswith("/"):
        raise ApiError(404, "there is nothing here", "see docs/api.md for the paths")
    return request.raw_path


def passed_on(reply: Reply) -> web.Response:
    """Return a member's answer unchanged."""
    response = answer_in_pieces(reply.body, {**HEADERS, **reply.passed_headers()})
    response.set_status(reply.status)
    return response


def lost(missing: NoReply, what: str) -> ApiError:
    """Return the error for a request to one member that did not answer.

    503: nothing was done. 502: it may have been done.
    """
    fix = f"send it again; {MEMBERS_FIX} and answer"
    if not missing.was_sent:
        return ApiError(503, f"member {missing.member!r}, {what}, is away: {missing.why}", fix)
    text = f"member {missing.member!r}, {what}, did not answer: {missing.why}"
    return ApiError(502, text, f"see whether it was done, and else {fix}")


def none_answers(missing: Sequence[NoReply]) -> ApiError:
    """Return the error for a request that no member answered."""
    reasons = "; ".join(f"{each.member!r}: {each.why}" for each in missing) or "there is none"
    return ApiError(503, f"no member answers: {reasons}", "look at the proxy's log; send it again")
