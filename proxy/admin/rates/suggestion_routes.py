"""The path `/v1/suggestions`: rules that would fit what was observed."""

import time
from dataclasses import dataclass

from aiohttp import web

from proxy.admin.rates.observed_rates import KEPT_HOURS, SECONDS_PER_HOUR, ObservedRates
from proxy.admin.rates.suggestions import as_documents, as_yaml, suggest
from proxy.admin.replies import ApiError, answer_in_slices
from proxy.admin.slices import Slices
from proxy.quota.manager import QuotaManager
from proxy.quota.values import BadValueError, parse_duration

SUGGESTIONS_PATH = "/v1/suggestions"
DEFAULT_SINCE = "24h"


@dataclass(frozen=True, slots=True)
class SuggestionRoutes:
    """The handler."""

    rates: ObservedRates
    quotas: QuotaManager
    slices: Slices

    def routes(self) -> list[web.RouteDef]:
        """Return the handler by method and path."""
        return [web.get(SUGGESTIONS_PATH, self._get_suggestions)]

    async def _get_suggestions(self, request: web.Request) -> web.Response:
        since, now_s = request.query.get("since", DEFAULT_SINCE), time.time()
        try:
            since_s = parse_duration(since)
        except BadValueError as error:
            raise ApiError(400, f"since: {error.message}", error.fix) from None
        if since_s > KEPT_HOURS * SECONDS_PER_HOUR:
            fix = f"write at most {KEPT_HOURS}h"
            raise ApiError(400, f"since: rates are kept for {KEPT_HOURS} h", fix)
        suggestions = await suggest(self.rates, self.quotas.table, since_s, now_s, self.slices)
        lines = as_yaml(suggestions, since, now_s, len(self.rates.left_out))
        document = {
            "since_s": since_s,
            "yaml": "\n".join(await self.slices.collect(lines)) + "\n",
            "clients": as_documents(suggestions),
        }
        return await answer_in_slices(document, self.slices)
