"""Asks the members of a tier in the name of who asks this one: itself directly, others by HTTP."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self

from aiohttp import Payload, web
from yarl import URL

from metrics.member_names import machine_of
from proxy.admin.audit import current_author
from proxy.admin.port.guard import ONE_MEMBER, SAFE_METHODS, SCOPE, answer_member, identity_headers
from proxy.admin.replies import HEADERS, OWN_BODY, ApiError, long_reply
from proxy.tier.peer_client import PeerError, Reply, Target
from proxy.tier.tier_member import TierMember

MEMBER_TIMEOUT_S = 2.0
"""For one answer as a whole. A member that is at work answers in milliseconds."""

CHANGE_TIMEOUT_S = 15.0
"""For what changes something: it is done when the state has it, and 10,000 rules are put in order
anew."""

SPARED_S = 2.0
"""For so long nobody waits again for a member that did not answer in time: who looks each second
would have the answers of all others held up."""

ASKED_AT_ONCE = 16  # of one member; further requests wait, within their time
MAX_REFUSAL_BYTES = 300  # of a refusal that is shown

MEMBERS_FIX = "see members in GET /v1/status for which there are"

_SILENT = "it is silent: it has not answered for a while"


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """What members are asked in the name of who sent a request."""

    request: web.Request
    target: str
    """Path and query, sent as they are."""
    method: str
    body: bytes | None = None
    """As JSON."""

    @classmethod
    def of(cls, request: web.Request, body: bytes | None = None) -> Self:
        """Return what a request asks, with its body. Raises HTTPNotFound for the URL of a whole."""
        if not request.raw_path.startswith("/"):
            raise web.HTTPNotFound
        method = "GET" if request.method == "HEAD" else request.method
        return cls(request, request.raw_path, method, body)

    @property
    def may_change(self) -> bool:
        """Whether it is not for looking only."""
        return self.method not in SAFE_METHODS


@dataclass(frozen=True, slots=True)
class FanOutAnswers:
    """What came of asking several members."""

    replies: Sequence[Reply]
    """In the order in which they were asked, so that of the leader first."""
    missing: Sequence[PeerError]
    """Members that did not answer."""

    @property
    def ok(self) -> list[Reply]:
        """Those that did what they were asked for."""
        return [reply for reply in self.replies if reply.is_ok]

    @property
    def first(self) -> Reply:
        """The first one, also if it refuses. Raises ApiError with 503 when none answers."""
        if not self.replies:
            raise no_answer_error(self.missing)
        return self.replies[0]


class PeerFanOut:
    """Asks the members: all at once, or one of them.

    All are asked for themselves alone, so that no request goes in a circle; with bounds on time,
    size and how many at once: what members ask each other by themselves waits for none of these.
    """

    def __init__(self, tier: TierMember) -> None:
        self.tier = tier
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(ASKED_AT_ONCE))
        self._spared: dict[str, float] = {}
        """Until when members are not asked, by their names; in the time of the event loop."""

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody else, nor a tier that is known as such."""
        return len(self.tier.members()) < 2 and self.tier.document() is None  # noqa: PLR2004

    def asked_for(self, request: web.Request) -> list[Target]:
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

    def asked_here(self, request: web.Request) -> list[Target]:
        """Return the members of this machine that a request is about, as `asked_for`."""
        here = machine_of(self.tier.name)
        found = [each for each in self.asked_for(request) if machine_of(each.name) == here]
        if not found:
            fix = "ask the admin port of that machine"
            raise ApiError(404, f"{request.path} is of this machine alone", fix)
        return found

    async def ask_all(self, asked: Sequence[Target], question: ForwardedRequest) -> FanOutAnswers:
        """Ask some members at once. No other than the leader records what it changes."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._ask(each, question)) for each in asked]
        results = [task.result() for task in tasks]
        return FanOutAnswers(
            [each for each in results if isinstance(each, Reply)],
            [each for each in results if isinstance(each, PeerError)],
        )

    async def ask_one(self, name: str, question: ForwardedRequest) -> Reply | PeerError:
        """Ask the member of a name."""
        for each in self.tier.members():
            if each.name == name:
                return await self._ask(each, question)
        return PeerError(name, "it is no member any more", was_sent=False)

    async def _ask(self, endpoint: Target, question: ForwardedRequest) -> Reply | PeerError:
        leaves_audit = question.may_change and endpoint.name != self.tier.leader
        headers = identity_headers(current_author(), leaves_audit=leaves_audit)
        if endpoint.name == self.tier.name:
            return await _ask_own_handlers(endpoint.name, question, headers)
        try:
            return await self._ask_other(endpoint, question, headers)
        except PeerError as error:
            return error

    async def _ask_other(
        self, endpoint: Target, question: ForwardedRequest, headers: Mapping[str, str]
    ) -> Reply:
        """Return what another member says, as a member. Raises PeerError."""
        name = endpoint.name
        limit_s = CHANGE_TIMEOUT_S if question.may_change else MEMBER_TIMEOUT_S
        time_s = asyncio.get_running_loop().time
        if not endpoint.alive:
            raise PeerError(name, _SILENT, was_sent=False, alive=False)
        if not question.may_change and time_s() < self._spared.get(name, 0.0):
            why = f"it did not answer within {limit_s:g} s, a moment ago"
            raise PeerError(name, why, was_sent=False)
        try:
            async with asyncio.timeout(limit_s), self._turns[name]:
                reply = await self.tier.client.send(
                    endpoint, question.method, question.target, headers, question.body
                )
        except TimeoutError:
            self._spared[name] = time_s() + SPARED_S
            raise PeerError(name, f"it did not answer within {limit_s:g} s") from None
        self._spared.pop(name, None)
        if reply.headers.get(SCOPE) != ONE_MEMBER:  # it was not let in, or not by a member
            text = reply.body[:MAX_REFUSAL_BYTES].decode(errors="replace")
            why = f"it refuses to answer with {reply.status}: {text}"
            is_refusal = HTTPStatus.BAD_REQUEST <= reply.status < HTTPStatus.INTERNAL_SERVER_ERROR
            raise PeerError(name, why, was_sent=not is_refusal)
        return reply


async def _ask_own_handlers(
    member: str, question: ForwardedRequest, headers: Mapping[str, str]
) -> Reply:
    """Return what this process, which is `member`, answers to a request of its own.

    It takes as long as it takes: a change that is under way must not be cut off.
    """
    outer, url = question.request, URL(question.target, encoded=True)
    inner = outer.clone(method=question.method, rel_url=url, headers=headers)
    inner[OWN_BODY] = question.body or b""
    match = await outer.app.router.resolve(inner)
    response = await answer_member(inner, match.handler)
    assert isinstance(response, web.Response)
    body = response.body or b""
    body = await body.as_bytes() if isinstance(body, Payload) else bytes(body)
    return Reply(member, response.status, response.headers, body)


def forwarded_reply(reply: Reply) -> web.Response:
    """Return a member's answer unchanged."""
    headers = {**HEADERS, "Content-Type": reply.headers.get("Content-Type", "")}
    return long_reply(reply.body, headers, reply.status)


def member_lost_error(missing: PeerError, what: str) -> ApiError:
    """Return the error for a request to one member that did not answer.

    503: nothing was done. 502: it may have been done.
    """
    fix = f"send it again; {MEMBERS_FIX} and answer"
    if not missing.was_sent:
        return ApiError(503, f"member {missing.member!r}, {what}, is away: {missing.why}", fix)
    text = f"member {missing.member!r}, {what}, did not answer: {missing.why}"
    return ApiError(502, text, f"see whether it was done, and else {fix}")


def no_answer_error(missing: Sequence[PeerError]) -> ApiError:
    """Return the error for a request that no member answered."""
    reasons = "; ".join(f"{each.member!r}: {each.why}" for each in missing) or "there is none"
    return ApiError(503, f"no member answers: {reasons}", "look at the proxy's log; send it again")
