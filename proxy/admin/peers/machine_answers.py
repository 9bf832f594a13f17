"""Answers for the members of this machine alone, as it is scraped and watched by itself."""

import asyncio
import json
from collections.abc import Mapping

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from metrics import MemberInstruments, join_scrapes
from proxy.admin.peers.member_requests import MemberRequests, none_answers, passed_on, target_of
from proxy.admin.replies import CONTENT_TYPE, answer_in_pieces, readiness_answer


class MachineAnswers:
    """The handlers."""

    def __init__(self, members: MemberRequests, long_answers: asyncio.Semaphore) -> None:
        self._members = members
        self._long_answers = long_answers
        self._up = MemberInstruments(CollectorRegistry()).member_up
        """Shown beside what members say themselves: only who asks knows it."""

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers by method and path."""
        return [web.get("/metrics", self._get_metrics), web.get("/readyz", self._get_readyz)]

    async def _get_metrics(self, request: web.Request) -> web.Response:
        asked = self._members.asked_here(request)
        async with self._long_answers:
            answers = await self._members.ask_all(request, asked, "GET", target_of(request))
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
        """Answer that clients can be served when all members that run say so.

        One whose process does not run is only named: it is started again, and the others serve.
        """
        asked = self._members.asked_here(request)
        answers = await self._members.ask_all(request, asked, "GET", "/readyz")
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


def _readiness_of(body: bytes) -> Mapping[str, str]:
    """Return what a member says of its readiness, a short document."""
    try:
        document = json.loads(body)
    except ValueError:
        return {"reason": "its answer is no JSON"}
    return document if isinstance(document, dict) else {}
