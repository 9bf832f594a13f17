"""The public admin port of many members: asks those that know, and answers as one."""

import asyncio
import json
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence

from aiohttp import web
from prometheus_client import generate_latest

from metrics import MemberInstruments, join_scrapes
from proxy.admin.gateway.machine_relay import MachineRelay
from proxy.admin.gateway.member_client import MEMBER_TIMEOUT_S, MemberClient, MemberEndpoint
from proxy.admin.gateway.members import Asked, Members, none_answers, passed_on, target_of
from proxy.admin.gateway.merged_answers import MergedAnswers, SlotsOf
from proxy.admin.gateway.merged_suggestions import MergedSuggestions
from proxy.admin.gateway.routed_requests import RoutedRequests
from proxy.admin.gateway.tier_document import TierOf
from proxy.admin.gateway.tier_routes import TierRoutes
from proxy.admin.page_files import page_routes
from proxy.admin.port.access import Access
from proxy.admin.port.admin_port import DEFAULT_LIMITS, PortLimits
from proxy.admin.port.tier_guard import TierGuard
from proxy.admin.replies import CONTENT_TYPE, answer, answer_in_pieces, readiness_answer
from proxy.admin.site import AdminSite
from proxy.admin.status import NotReady
from proxy.slices import LONG_ANSWERS


class Gateway(AdminSite):
    """Serves operators on one address what `AdminServer` does for one process.

    `members` gives who there is now, `owner_of` the name of the member that owns a client id
    (None while nobody does), and `first` that of the member that writes what concerns all.
    `metrics` are shown before those of the members.
    `client_of` gives the client id that a query's name stands for. `not_ready` and `warning` are
    what is wrong beside what members say themselves; `slots` what is known of members' slots, by
    their names. `timeout_s` is for one member's answer.
    `tier_routes` answer the other machines of a tier, and `tier` gives what is known of it, once
    it is; `members` has those machines as well, by their URLs.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        members: Callable[[], Sequence[MemberEndpoint]],
        owner_of: Callable[[str], str | None],
        first: Callable[[], str],
        metrics: MemberInstruments,
        access: Access,
        not_ready: NotReady = lambda: None,
        warning: NotReady = lambda: None,
        slots: SlotsOf = dict,
        client_of: Callable[[str], str] = lambda name: name,
        limits: PortLimits = DEFAULT_LIMITS,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = MEMBER_TIMEOUT_S,
        tier_routes: TierRoutes | None = None,
        tier: TierOf = lambda: None,
    ) -> None:
        self._not_ready = not_ready
        self._warning = warning
        self._metrics = metrics
        self._client = MemberClient(timeout_s)
        self._members = Members(members, first, self._client)
        guard = None
        if tier_routes is not None:
            guard = TierGuard(access, MachineRelay(self._members, self._client).answer)
        super().__init__(host, port, access, limits, tls, guard)
        self._long_answers = asyncio.Semaphore(LONG_ANSWERS)
        is_tier = tier_routes is not None
        self._merged = MergedAnswers(
            self._members,
            owner_of,
            not_ready,
            warning,
            slots,
            self._long_answers,
            tier if is_tier else None,
        )
        self._suggestions = MergedSuggestions(self._members, self._long_answers)
        self._routed = RoutedRequests(self._members, owner_of, client_of, is_tier=is_tier)
        self._tier_routes = tier_routes

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers by method and path."""
        return [
            web.get("/metrics", self._get_metrics),
            web.get("/healthz", self._get_healthz),
            web.get("/readyz", self._get_readyz),
            *self._merged.routes(),
            *self._suggestions.routes(),
            *self._routed.routes(),
            *(self._tier_routes.routes() if self._tier_routes is not None else ()),
            *page_routes(),
        ]

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """Open the port, or accept on sockets that have it already. Raises AdminError."""
        if self._tier_routes is not None:
            self._tier_routes.begin()
        await super().start(sockets)

    async def stop(self) -> None:
        """Close the port and every connection, those to members too."""
        if self._tier_routes is not None:
            self._tier_routes.end()
        await super().stop()
        await self._client.close()

    async def _get_metrics(self, request: web.Request) -> web.Response:
        endpoints = self._members.asked_here(request)
        asked = list(map(Asked, endpoints))
        target = target_of(request)
        async with self._long_answers:
            answers = await self._members.ask_all(asked, "GET", target)
            if "member" in request.query:
                if not answers.replies:
                    raise none_answers(answers.missing)
                return passed_on(answers.replies[0])
            texts = {reply.member: reply.body for reply in answers.ok}
            for each in endpoints:
                self._metrics.member_up.labels(each.name).set(each.name in texts)
            own = generate_latest(self._metrics.registry)
            # A thread: four members with 10,000 clients each have tens of megabytes.
            body = await asyncio.to_thread(join_scrapes, (own, *texts.values()))
        return answer_in_pieces(body, {"Content-Type": CONTENT_TYPE})

    async def _get_healthz(self, _: web.Request) -> web.Response:
        return answer({"status": "up"})

    async def _get_readyz(self, request: web.Request) -> web.Response:
        """Answer that clients can be served when all members that run say so.

        One whose process does not run is only named: it is started again, and the others serve.
        """
        reason, warnings = self._not_ready(), [self._warning()]
        endpoints = self._members.asked_here(request)
        answers = await self._members.ask_all(list(map(Asked, endpoints)), "GET", "/readyz")
        if not answers.replies:
            return readiness_answer(reason or none_answers(answers.missing).what, None)
        down = {each.name for each in endpoints if not each.alive}
        silent = [each for each in answers.missing if each.member not in down]
        reasons = [reason] if reason else []
        reasons += [f"member {each.member!r} does not answer: {each.why}" for each in silent]
        for reply in answers.replies:
            said = _said(reply.body)
            if not reply.is_ok:
                reasons.append(f"member {reply.member!r}: {said.get('reason')}")
            warnings.append(said.get("warning"))
        warnings += [f"member {name!r} does not run" for name in sorted(down)]
        told = "; ".join(dict.fromkeys(each for each in warnings if each))
        return readiness_answer("; ".join(reasons) or None, told or None)


def _said(body: bytes) -> Mapping[str, str]:
    """Return what a member says of its readiness, a short document."""
    try:
        document = json.loads(body)
    except ValueError:
        return {"reason": "its answer is no JSON"}
    return document if isinstance(document, dict) else {}
