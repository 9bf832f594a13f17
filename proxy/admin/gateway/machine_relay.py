"""Answers the gateway of another machine: asks the members of this one what it is asked itself."""

import asyncio
from collections.abc import Sequence

from aiohttp import web

from proxy.admin.gateway.bundles import BUNDLE_TYPE, pack_bundle
from proxy.admin.gateway.member_client import MemberClient, MemberEndpoint, NoReply, Reply
from proxy.admin.gateway.members import Members, target_of
from proxy.admin.port.guard import SAFE_METHODS, current_author
from proxy.admin.port.member_headers import FIRST_HEADER, ONLY, headers_of
from proxy.admin.replies import HEADERS, answer_in_pieces, json_body
from proxy.progress.report import MAX_REPORT_BYTES
from proxy.slices import LONG_ANSWERS

TIME_SHARE = 0.75
"""Of the time that the other gateway waits: it gets the rest when one member here hangs."""

MAX_RELAYED = 64
"""At a time of what is no long answer."""


class MachineRelay:
    """The handler. It asks members of this machine only, so that no request goes in a circle."""

    def __init__(self, members: Members, client: MemberClient) -> None:
        self._members = members
        self._client = client
        # Apart from those of our own long answers: these wait for machines that may wait for us.
        self._long_answers = asyncio.Semaphore(LONG_ANSWERS)
        self._changes = asyncio.Semaphore(MAX_RELAYED)

    async def answer(self, request: web.Request) -> web.Response:
        """Return what each member answers, or the one of the header ONLY, as a bundle."""
        own = self._members.own()
        if (only := request.headers.get(ONLY)) is not None:
            own = [each for each in own if each.name == only]
        body = None
        if request.content_type == "application/json":
            body = await json_body(request, MAX_REPORT_BYTES)
        is_safe = request.method in SAFE_METHODS
        async with self._long_answers if is_safe else self._changes:
            told: Sequence[Reply | NoReply] = await asyncio.gather(
                *(self._ask(each, request, body) for each in own)
            )
            if only is not None and not own:
                why = "there is no such member"
                told = [NoReply(only, why, was_sent=False, alive=False, is_known=False)]
            bundle = await asyncio.to_thread(pack_bundle, told)
        return answer_in_pieces(bundle, {**HEADERS, "Content-Type": BUNDLE_TYPE})

    async def _ask(
        self, endpoint: MemberEndpoint, request: web.Request, body: bytes | None
    ) -> Reply | NoReply:
        changes = request.method not in SAFE_METHODS
        leaves_audit = changes and endpoint.name != request.headers.get(FIRST_HEADER)
        headers = headers_of(current_author(), leaves_audit=leaves_audit)
        if body is not None:
            headers["Content-Type"] = "application/json"
        return await self._client.ask(
            endpoint,
            request.method,
            target_of(request),
            headers,
            body,
            has_time=changes,
            time_share=TIME_SHARE,
        )
