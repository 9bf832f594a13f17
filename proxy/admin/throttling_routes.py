"""The path `/v1/throttling`: lets clients through for a time, and holds them to quotas again."""

import time
from dataclasses import dataclass

from aiohttp import web
from structlog import get_logger

from proxy.admin.client_documents import Document, iso, left_s
from proxy.admin.overrides import ThrottlingChange, parse_throttling
from proxy.admin.replies import ApiError, answer, json_body
from proxy.quota.pauses import QuotaPause, pause_name
from proxy.quota.rule_registry import RuleRegistry
from proxy.state import StateError

THROTTLING_PATH = "/v1/throttling"
MAX_CHANGE_BYTES = 64 * 1024

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ThrottlingRoutes:
    """The handlers."""

    rules: RuleRegistry

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers by method and path."""
        return [
            web.get(THROTTLING_PATH, self._get_throttling),
            web.post(THROTTLING_PATH, self._post_throttling),
        ]

    async def _get_throttling(self, _: web.Request) -> web.Response:
        return answer({"throttling": throttling_document(self.rules, time.time())})

    async def _post_throttling(self, request: web.Request) -> web.Response:
        now_s = time.time()
        change = parse_throttling(await json_body(request, MAX_CHANGE_BYTES), now_s)
        try:
            if change.until_s is not None:
                pause = QuotaPause(change.keys, change.until_s, change.by, now_s)
                await self.rules.pause(pause)
            else:
                ended = await self.rules.resume(change.keys or None)
                if not ended and change.keys:
                    fix = "see GET /v1/throttling for those that are paused"
                    raise ApiError(404, f"{pause_name(change.keys)} is not paused", fix)
        except ValueError as error:
            raise ApiError(400, str(error), "end some of them with on: true") from None
        except StateError as error:
            raise ApiError(503, error.what, error.fix) from error
        _record_change(request, change)
        return answer({"throttling": throttling_document(self.rules, now_s)})


def _record_change(request: web.Request, change: ThrottlingChange) -> None:
    """Log who paused or resumed what: every change that was made comes here, and nothing else."""
    about = {"selector": pause_name(change.keys), "by": change.by, "remote": request.remote}
    if change.until_s is None:
        _log.info("throttling resumed", **about)
    else:
        _log.warning("throttling paused", until=iso(change.until_s), **about)


def throttling_document(rules: RuleRegistry, now_s: float) -> Document:
    """Return whether quotas are enforced, and for whom they are paused, for JSON."""
    return {
        "enforced": rules.is_enforced,
        "paused": [
            {
                "selector": pause.name,
                "keys": dict(pause.keys),
                "until": iso(pause.until_s),
                "left_s": left_s(pause.until_s, now_s),
                "by": pause.by,
                "at": iso(pause.at_s),
            }
            for pause in rules.pauses()
        ],
    }
