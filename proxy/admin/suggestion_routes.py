"""The path `/v1/suggestions`: rules that would fit what was observed."""

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from proxy.admin.admin_parts import AdminParts
from proxy.admin.rates.observed_rates import KEPT_HOURS, SECONDS_PER_HOUR, Observed
from proxy.admin.rates.suggestions import as_documents, as_yaml, suggest
from proxy.admin.replies import ApiError, answer_in_slices
from proxy.admin.sliced_json import ROW_DEPTH, read_whole
from proxy.quota.values import BadValueError, parse_duration

SUGGESTIONS_PATH = "/v1/suggestions"
OBSERVED_PATH = "/member/observed"
"""Gives what this member has seen."""
DEFAULT_SINCE = "24h"


class SuggestionRoutes:
    """The handlers."""

    def __init__(self, parts: AdminParts) -> None:
        self._rates, self._quotas, self._slices = parts.rates, parts.quotas, parts.slices

    def routes(self) -> list[web.RouteDef]:
        """Return the handler by method and path."""
        return [web.get(SUGGESTIONS_PATH, self._get_suggestions)]

    def member_routes(self) -> list[web.RouteDef]:
        """Return the handlers that only another member may ask."""
        return [web.get(OBSERVED_PATH, self._get_observed)]

    async def _get_suggestions(self, request: web.Request) -> web.Response:
        return await self.suggested(request, Observed(), with_own=True)

    async def _get_observed(self, request: web.Request) -> web.Response:
        observed, _, since_s = Observed(), *_since(request)
        await self._add_own(observed, since_s, time.time())
        rows = (seen.document() for seen in observed.by_series.values())
        document = {"left_out": observed.left_out, "observed": rows}
        return await answer_in_slices(document, self._slices)

    async def read(self, bodies: Iterable[bytes]) -> Observed:
        """Return what members say that they have seen. Raises ValueError for anything else."""
        observed = Observed()
        try:
            for body in bodies:
                document: Any = await asyncio.to_thread(read_whole, body, ROW_DEPTH)
                observed.left_out += int(document["left_out"])
                await self._slices.collect(observed.adding_documents(document["observed"]))
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError("this is not what a member has seen") from error
        return observed

    async def suggested(
        self, request: web.Request, observed: Observed, *, with_own: bool
    ) -> web.Response:
        """Answer by the rules in force, of what was seen, by this member as well if `with_own`."""
        (since, since_s), now_s = _since(request), time.time()
        if with_own:
            await self._add_own(observed, since_s, now_s)
        suggestions = await suggest(observed, self._quotas.table, self._slices)
        lines = as_yaml(suggestions, since, now_s, observed.left_out)
        document = {
            "since_s": since_s,
            "yaml": "\n".join(await self._slices.collect(lines)) + "\n",
            "clients": as_documents(suggestions),
        }
        return await answer_in_slices(document, self._slices)

    async def _add_own(self, observed: Observed, since_s: float, now_s: float) -> None:
        first_hour = int((now_s - since_s) // SECONDS_PER_HOUR)
        await self._slices.collect(observed.adding(self._rates, first_hour))


def _since(request: web.Request) -> tuple[str, float]:
    """Read `?since=TIME`; return it as it was written, and in seconds."""
    since = request.query.get("since", DEFAULT_SINCE)
    try:
        since_s = parse_duration(since)
    except BadValueError as error:
        raise ApiError(400, f"since: {error.message}", error.fix) from None
    if since_s > KEPT_HOURS * SECONDS_PER_HOUR:
        fix = f"write at most {KEPT_HOURS}h"
        raise ApiError(400, f"since: rates are kept for {KEPT_HOURS} h", fix)
    return since, since_s
