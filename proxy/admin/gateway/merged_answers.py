"""Answers what all members know together: asks them, and merges the documents in a thread."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from proxy.admin.api import MAX_CONNECTION_NUMBER, filter_and_limit, is_by_client
from proxy.admin.gateway.connection_ids import after_at, show_machines
from proxy.admin.gateway.member_client import NoReply, Reply
from proxy.admin.gateway.members import Answers, Members, none_answers, passed_on, target_of
from proxy.admin.gateway.merging.lists import CONNECTIONS_IN_ORDER, CONNECTIONS_TABLE, TABLES
from proxy.admin.gateway.merging.member_documents import DocumentTable, MemberDocument, OwnerOf
from proxy.admin.gateway.merging.status_document import member_figures, merged_status
from proxy.admin.gateway.tier_document import TierOf, differing_rules
from proxy.admin.replies import JSON_HEADERS, ApiError, answer_in_pieces, whole_number
from proxy.admin.request_times import HISTOGRAMS
from proxy.admin.sliced_json import ROW_DEPTH, read_whole, written_pieces
from proxy.admin.status import NotReady
from proxy.tier.member_names import machine_of


class NoneFitError(Exception):
    """No member gave a document that is understood."""

    def __init__(self, missing: Sequence[NoReply]) -> None:
        super().__init__()
        self.missing = missing


Merge = Callable[[Sequence[MemberDocument]], dict[str, Any]]

SlotsOf = Callable[[], Mapping[str, Mapping[str, Any]]]
"""Gives what is known of members' slots, by their names, as the status shows it."""

_MISFITS = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""What merging raises for a document that has not what it should."""

_REFUSALS = range(401, 600)
"""Of a member while others answer; but for 404, which says that it has not what is asked for."""

_NOT_UNDERSTOOD = "its answer is not understood; is it of another version?"


@dataclass(frozen=True, slots=True)
class MergedAnswers:
    """The handlers."""

    members: Members
    owner_of: OwnerOf
    not_ready: NotReady
    warning: NotReady
    slots: SlotsOf
    long_answers: asyncio.Semaphore
    """To be held while documents of megabytes are in memory."""
    tier: TierOf | None = None
    """None: this machine is alone."""

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers by method and path."""
        return [
            web.get("/v1/status", self._get_status),
            web.get("/v1/connections", self._get_connections),
            web.get("/v1/quotas", self._get_first),
            web.get("/v1/throttling", self._get_first),
            web.get("/v1/audit", self._get_first),
            web.get("/v1/log_level", self._get_log_level),
            *(web.get(path, self._get_by(table)) for path, table in TABLES.items()),
        ]

    async def _get_status(self, request: web.Request) -> web.StreamResponse:
        _, limit = filter_and_limit(request)
        is_by_client(request)  # refuses what is neither
        separator = "&" if "?" in request.raw_path else "?"
        target = f"{target_of(request)}{separator}{HISTOGRAMS}"

        def merge(told: Sequence[MemberDocument]) -> dict[str, Any]:
            tier = self.tier() if self.tier is not None else None
            problems = self.warning(), None if tier is None else differing_rules(tier)
            warning = "; ".join(each for each in problems if each) or None
            document = merged_status(told, limit, self.owner_of, self.not_ready(), warning)
            return document if tier is None else {**document, "tier": tier}

        return await self._merged(request, merge, target=target, slots=self.slots())

    async def _get_connections(self, request: web.Request) -> web.StreamResponse:
        _, limit = filter_and_limit(request)
        in_order, target = "after" in request.query, None
        if in_order and self.tier is not None:
            after_at(request, "")  # refuses what is no id
            target = partial(after_at, request)
        elif in_order:
            whole_number(request, "after", 0, MAX_CONNECTION_NUMBER)

        def merge(told: Sequence[MemberDocument]) -> dict[str, Any]:
            document = (CONNECTIONS_IN_ORDER if in_order else CONNECTIONS_TABLE).merged(told, limit)
            if self.tier is not None:
                show_machines(document["connections"])
            return document

        return await self._merged(request, merge, target=target)

    def _get_by(self, table: DocumentTable) -> Handler:
        """Return the handler of a path whose documents are merged by the table alone."""

        async def get(request: web.Request) -> web.StreamResponse:
            takes_limit = any(each.takes_limit for each in table.lists)
            limit = filter_and_limit(request)[1] if takes_limit else None

            merge = partial(table.merged, limit=limit, owner_of=self.owner_of)
            return await self._merged(request, merge, depth=table.depth)

        return get

    async def _get_first(self, request: web.Request) -> web.StreamResponse:
        """Answer what is the same at all members: from the first one that answers."""
        missing: list[NoReply] = []
        asked = self.members.asked_for(request)
        if "member" not in request.query:  # of the first one's machine no other one
            asked = [*self.members.named(self.members.first), *asked[1:]]
        for each in asked:
            answers = await self.members.ask_all([each], "GET", target_of(request))
            if answers.replies:
                return passed_on(answers.replies[0])
            missing += answers.missing
        raise none_answers(missing)

    async def _get_log_level(self, request: web.Request) -> web.StreamResponse:
        def merge(told: Sequence[MemberDocument]) -> dict[str, Any]:
            levels = [{"name": each.member, "level": each.document["level"]} for each in told]
            return {**told[0].document, "levels": levels}

        return await self._merged(request, merge)

    async def _merged(
        self,
        request: web.Request,
        merge: Merge,
        *,
        target: str | Callable[[str], str] | None = None,
        depth: int = ROW_DEPTH,
        slots: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> web.StreamResponse:
        """Ask the members, and answer with what `merge` makes of their documents.

        With `slots`, which may be empty, members have figures. What all refuse is refused as the
        first of them did.
        """
        asked, is_tier = self.members.asked_for(request), self.tier is not None
        async with self.long_answers:
            answers = await self.members.ask_all(asked, "GET", target or target_of(request))
            if not answers.replies:
                raise none_answers(answers.missing)
            if not answers.ok:
                if answers.missing and answers.replies[0].status == HTTPStatus.NOT_FOUND:
                    raise _not_found(answers)
                return passed_on(answers.replies[0])
            try:
                body = await asyncio.to_thread(
                    _merged_body, answers, merge, depth, slots, is_tier=is_tier
                )
            except NoneFitError as error:
                raise none_answers(error.missing) from error
        return answer_in_pieces(body, JSON_HEADERS)


def _not_found(answers: Answers) -> ApiError:
    """Return the error for what is at no member that answers, while others do not."""
    away = ", ".join(repr(each.member) for each in answers.missing)
    fix = f"ask again when all answer; without an answer: {away}"
    return ApiError(404, "no member that answers knows it", fix)


def _merged_body(
    answers: Answers,
    merge: Merge,
    depth: int,
    slots: Mapping[str, Mapping[str, Any]] | None,
    *,
    is_tier: bool,
) -> bytearray:
    """Return the merged document as JSON.

    For a thread: all of it is Python in small steps, between which the event loop runs.
    """
    told, bad = _read(answers.ok, depth)
    try:
        document = merge(told)
    except _MISFITS:  # of another version
        fit = [each for each in told if _fits(merge, each)]
        bad += [NoReply(each.member, _NOT_UNDERSTOOD) for each in told if each not in fit]
        told = fit
        document = merge(told) if told else {}
    if not told:
        raise NoneFitError([*answers.missing, *bad])
    bad += [
        NoReply(each.member, f"it refuses to answer with {each.status}")
        for each in answers.replies
        if each.status in _REFUSALS and each.status != HTTPStatus.NOT_FOUND
    ]
    answers = Answers(answers.replies, [*answers.missing, *bad])
    members = _members(told, answers, slots)
    if is_tier:
        members = [{**row, "machine": machine_of(row["name"]) or row["name"]} for row in members]
    document["members"] = members
    document["unreachable"] = sorted(
        answers.unreachable(), key=lambda each: _in_order(each["name"])
    )
    body = bytearray()
    for piece in written_pieces(document, depth):
        body += piece.encode()
    return body


def _read(replies: Sequence[Reply], depth: int) -> tuple[list[MemberDocument], list[NoReply]]:
    """Return what members said, and those who said what is no document."""
    told: list[MemberDocument] = []
    bad: list[NoReply] = []
    for reply in replies:
        try:
            document = read_whole(reply.body, depth)
        except (ValueError, RecursionError):
            document = None
        if isinstance(document, dict):
            told.append(MemberDocument(reply.member, document))
        else:
            bad.append(NoReply(reply.member, _NOT_UNDERSTOOD))
    return told, bad


def _fits(merge: Merge, told: MemberDocument) -> bool:
    try:
        merge([told])
    except _MISFITS:
        return False
    return True


def _members(
    told: Sequence[MemberDocument],
    answers: Answers,
    slots: Mapping[str, Mapping[str, Any]] | None,
) -> list[dict[str, Any]]:
    """Return every member in the order of their names, with what is known of it.

    A machine that does not answer stands for its members.
    """
    rows: list[dict[str, Any]] = [
        _answers(each.member) if slots is None else member_figures(each, slots.get(each.member))
        for each in told
    ]
    rows += [
        {"name": each.member, "alive": each.alive, "answers": False, "problem": each.why}
        for each in answers.missing
    ]
    known_names = {row["name"] for row in rows}
    rows += [_answers(each.member) for each in answers.replies if each.member not in known_names]
    return sorted(rows, key=lambda row: _in_order(row["name"]))


def _answers(name: str) -> dict[str, Any]:
    return {"name": name, "alive": True, "answers": True}


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a key by which worker 2 comes before worker 10."""
    parts = name.split("/")
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
