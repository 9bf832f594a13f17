"""Asks all members at once, or one of them, in the name of who asks the gateway."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web

from proxy.admin.gateway.bundles import BUNDLE_TYPE, unpack_bundle
from proxy.admin.gateway.member_client import MemberClient, MemberEndpoint, NoReply, Reply
from proxy.admin.port.guard import SAFE_METHODS, current_author
from proxy.admin.port.member_headers import FIRST_HEADER, ONE_MACHINE, ONLY, SCOPE, headers_of
from proxy.admin.replies import ApiError
from proxy.tier.member_names import machine_of

MEMBERS_FIX = "see members in GET /v1/status for which there are"

MAX_SAID_BYTES = 300
"""Of a refusal that is shown."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Who is asked: a member of this machine, or members of another one."""

    endpoint: MemberEndpoint
    only: str | None = None
    """The one member of another machine that is meant; None: all of them."""

    @property
    def machine(self) -> str:
        """The name of its machine."""
        name = self.endpoint.name
        return machine_of(name) if self.endpoint.path is not None else name


@dataclass(frozen=True, slots=True)
class Answers:
    """What came of asking several members."""

    replies: Sequence[Reply]
    """The first member's comes first, if it answered."""
    missing: Sequence[NoReply]
    """Members that did not answer, or whole machines."""

    @property
    def ok(self) -> list[Reply]:
        """Those that did what they were asked for."""
        return [reply for reply in self.replies if reply.is_ok]

    def unreachable(self) -> list[dict[str, str]]:
        """Return who did not answer and why, for JSON."""
        return [{"name": each.member, "why": each.why} for each in self.missing]


class Members:
    """Who there is to be asked.

    `endpoints` gives all members of this machine, and the other machines of a tier by their names;
    there members are called MACHINE/N. `first` is the name of the member that writes what
    concerns all.
    """

    def __init__(
        self,
        endpoints: Callable[[], Sequence[MemberEndpoint]],
        first: Callable[[], str],
        client: MemberClient,
    ) -> None:
        self._endpoints = endpoints
        self._first = first
        self._client = client

    @property
    def first(self) -> str:
        """The name of the member that writes what concerns all."""
        return self._first()

    def own(self) -> list[MemberEndpoint]:
        """Return the members of this machine."""
        return [each for each in self._endpoints() if each.path is not None]

    def asked_for(self, request: web.Request) -> list[Asked]:
        """Return whom a request is about, those with the first member first.

        They are all, or those of `?member=NAME` with the name of a member or of a machine. Raises
        ApiError with 404 for a name that nobody has.
        """
        name = request.query.get("member")
        found = [Asked(each) for each in self._endpoints()] if name is None else self.named(name)
        if not found:
            raise ApiError(404, f"there is no member {name!r}", MEMBERS_FIX)
        first = self.first
        return sorted(found, key=lambda each: not _has(each.endpoint, first))

    def asked_here(self, request: web.Request) -> list[MemberEndpoint]:
        """Return the members of this machine that a request is about, as `asked_for`."""
        asked = self.asked_for(request)
        found = [each.endpoint for each in asked if each.endpoint.path is not None]
        if not found:
            fix = "ask the admin port of that machine"
            raise ApiError(404, f"{request.path} is of this machine alone", fix)
        return found

    def named(self, name: str) -> list[Asked]:
        """Return the member of a name, or all of a machine; none for a name that nobody has."""
        found = []
        for each in self._endpoints():
            machine = Asked(each).machine
            if name == each.name or name == machine != "":
                found.append(Asked(each))
            elif each.path is None and machine_of(name) == machine:
                found.append(Asked(each, only=name))
        return found

    async def ask_all(
        self,
        asked: Sequence[Asked],
        method: str,
        target: str | Callable[[str], str],
        body: bytes | None = None,
    ) -> Answers:
        """Ask some members at once. No other than the first one records what it changes.

        `target` may differ by machine.
        """
        at = target if callable(target) else lambda _: target
        await self._client.keep_only(frozenset(self._endpoints()))
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._ask(each, method, at(each.machine), body)) for each in asked
            ]
        told = [each for task in tasks for each in task.result()]
        first = self.first
        replies = [each for each in told if isinstance(each, Reply)]
        return Answers(
            sorted(replies, key=lambda each: each.member != first),
            [each for each in told if isinstance(each, NoReply)],
        )

    async def ask_one(
        self, name: str, method: str, target: str, body: bytes | None = None
    ) -> Reply | NoReply:
        """Ask the member of a name, wherever it is."""
        found = self.named(name)
        if len(found) != 1:
            return NoReply(name, "it is no member any more", was_sent=False)
        told = await self._ask(found[0], method, target, body)
        return told[0] if told else NoReply(name, "it is no member any more", was_sent=False)

    async def _ask(
        self, asked: Asked, method: str, target: str, body: bytes | None
    ) -> Sequence[Reply | NoReply]:
        endpoint, changes = asked.endpoint, method not in SAFE_METHODS
        is_elsewhere = endpoint.path is None
        leaves_audit = changes and not is_elsewhere and endpoint.name != self.first
        headers = headers_of(current_author(), leaves_audit=leaves_audit)
        if is_elsewhere:
            headers |= {SCOPE: ONE_MACHINE, FIRST_HEADER: self.first}
            if asked.only is not None:
                headers[ONLY] = asked.only
        if body is not None:
            headers["Content-Type"] = "application/json"
        told = await self._client.ask(endpoint, method, target, headers, body, has_time=changes)
        if is_elsewhere and isinstance(told, Reply):
            return await asyncio.to_thread(_unpacked, told)
        return [told]


def _has(endpoint: MemberEndpoint, name: str) -> bool:
    """Return whether a member is the endpoint's, or on its machine."""
    return name == endpoint.name or (endpoint.path is None and machine_of(name) == endpoint.name)


def _unpacked(reply: Reply) -> Sequence[Reply | NoReply]:
    """Return what the members of another machine answered to its gateway."""
    if reply.headers.get("Content-Type") == BUNDLE_TYPE:
        try:
            return unpack_bundle(reply.body)
        except ValueError as error:
            return [NoReply(reply.member, f"its answer is not understood: {error}", alive=None)]
    said = reply.body[:MAX_SAID_BYTES].decode(errors="replace")
    why = f"it refuses to answer with {reply.status}: {said}"
    is_refused = HTTPStatus.BAD_REQUEST <= reply.status < HTTPStatus.INTERNAL_SERVER_ERROR
    return [NoReply(reply.member, why, was_sent=not is_refused, alive=None)]


def target_of(request: web.Request) -> str:
    """Return path and query as they came. Raises ApiError with 404 for the URL of a whole."""
    if not request.raw_path.startswith("/"):
        raise ApiError(404, "there is nothing here", "see docs/api.md for the paths")
    return request.raw_path


def passed_on(reply: Reply) -> web.Response:
    """Return a member's answer unchanged."""
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return web.Response(
        body=reply.body, status=reply.status, headers={**headers, **reply.passed_headers()}
    )


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
    if missing and not any(each.is_known for each in missing):
        return ApiError(404, f"there is no member {missing[0].member!r}", MEMBERS_FIX)
    told = "; ".join(f"{each.member!r}: {each.why}" for each in missing) or "there is none"
    return ApiError(503, f"no member answers: {told}", "look at the proxy's log; send it again")
