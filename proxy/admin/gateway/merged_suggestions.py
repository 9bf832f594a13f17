"""Answers `/v1/suggestions` of what all members have seen."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from proxy.admin.gateway.member_client import NoReply, Reply
from proxy.admin.gateway.members import Members, lost, none_answers, passed_on
from proxy.admin.rates.suggestion_routes import OBSERVED_PATH, SERIES_DEPTH, SUGGESTIONS_PATH
from proxy.admin.sliced_json import read_whole, written_pieces


@dataclass(frozen=True, slots=True)
class MergedSuggestions:
    """The handler. One member gets what the others have seen, and suggests by its own rules.

    A client is at its owner, and what it had before is where it was; sketches of both are added,
    as quantiles could not be.
    """

    members: Members
    long_answers: asyncio.Semaphore

    def routes(self) -> list[web.RouteDef]:
        """Return the handler by method and path."""
        return [web.get(SUGGESTIONS_PATH, self._get_suggestions)]

    async def _get_suggestions(self, request: web.Request) -> web.StreamResponse:
        asked = self.members.asked_for(request)
        query = f"?{request.query_string}" if request.query_string else ""
        target = f"{OBSERVED_PATH}{query}"
        async with self.long_answers:
            answers = await self.members.ask_all(asked, "GET", target)
            if not answers.ok:
                if not answers.replies:
                    raise none_answers(answers.missing)
                return passed_on(answers.replies[0])
            here = {each.name for each in self.members.own()}
            # What others have seen comes to megabytes, and stays on this machine.
            host, *others = sorted(answers.ok, key=lambda each: each.member not in here)
            body = await asyncio.to_thread(_put_together, others)
            told = await self.members.ask_one(host.member, "POST", target, body)
        if isinstance(told, NoReply):
            raise lost(told, "which puts together what all have seen")
        return passed_on(told)


def _put_together(replies: Sequence[Reply]) -> bytes:
    """Return the body that says what several have seen."""
    left_out, observed = 0, []
    for reply in replies:
        document = read_whole(reply.body, SERIES_DEPTH)
        left_out += document["left_out"]
        observed += document["observed"]
    return "".join(
        written_pieces({"left_out": left_out, "observed": observed}, SERIES_DEPTH)
    ).encode()
