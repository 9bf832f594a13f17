"""Answers what machines of a tier ask each other: whether this one lives, and what visitors had."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from aiohttp import web

from proxy.admin.port.guard import require_all_rights
from proxy.admin.replies import ApiError, answer, json_body
from proxy.admin.sliced_json import ROW_DEPTH, read_whole
from proxy.state import Document

TIER_PATH = "/v1/tier"
ALIVE_PATH = "/v1/tier/alive"
VISITS_PATH = "/v1/tier/visits"

LONG_ALIVE_PATH = "/v1/tier/alive?until=ended"
"""Is answered after LONG_S, or when the machine ends in order: when it dies its connection breaks,
and who asks knows at once."""

LONG_S = 20.0

MAX_VISITS_BYTES = 16 * 2**20
"""Of one message; 10,000 visits with long names come to less."""


VisitRows = Sequence[Sequence[Any]]
"""Of visits: listener, user, client id, address, kind and amount."""


@dataclass(frozen=True, slots=True)
class TierRoutes:
    """The handlers, but for the overview for who may do all.

    `alive` gives what this machine says of itself, `overview` what it knows of the tier; both raise
    ApiError while it is in none. `visited` charges what visitors had elsewhere,
    and gives what their sensors owe; it raises ValueError for rows that are no visits.
    """

    alive: Callable[[], Document]
    visited: Callable[[VisitRows], Awaitable[VisitRows]]
    overview: Callable[[], Document]
    _ended: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def begin(self) -> None:
        """Answer the other machines from now on."""
        self._ended.clear()

    def end(self) -> None:
        """Have nobody wait for an answer any more."""
        self._ended.set()

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers by method and path."""
        return [
            web.get(TIER_PATH, self._get_tier),
            web.get(ALIVE_PATH, self._get_alive),
            web.post(VISITS_PATH, self._post_visits),
        ]

    async def _get_tier(self, _: web.Request) -> web.Response:
        return answer(self.overview())

    async def _get_alive(self, request: web.Request) -> web.Response:
        require_all_rights("ask as a machine of the tier")
        if request.query.get("until") == "ended":
            with suppress(TimeoutError):
                async with asyncio.timeout(LONG_S):
                    await self._ended.wait()
        return answer(self.alive())

    async def _post_visits(self, request: web.Request) -> web.Response:
        require_all_rights("ask as a machine of the tier")
        body = await json_body(request, MAX_VISITS_BYTES)
        try:
            owed = await self.visited(await asyncio.to_thread(_visits_of, body))
        except (ValueError, RecursionError) as error:
            fix = 'send {"visits": [[LISTENER, USER, CLIENT_ID, ADDRESS, KIND, AMOUNT], ...]}'
            raise ApiError(400, f"these are no visits: {error}", fix) from None
        return answer({"owed": owed})


def _visits_of(body: bytes) -> VisitRows:
    """Return the rows of a message. Raises ValueError, RecursionError."""
    match read_whole(body, ROW_DEPTH):
        case {"visits": list() as rows}:
            for row in rows:
                if not _is_visit(row):
                    raise ValueError(f"{row!r:.200} is no visit")
            return rows
    raise ValueError("the list of visits is missing")


def _is_visit(row: Any) -> bool:
    match row:
        case [str(), str() | None, str() | None, str(), str(), float() | int() as amount]:
            return not isinstance(amount, bool) and isfinite(amount) and amount >= 0
    return False
