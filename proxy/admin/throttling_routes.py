"""The path `/v1/throttling`: lets clients through for a time, and holds them to quotas again."""

import time
from dataclasses import dataclass

from aiohttp import web
from structlog import get_logger

from proxy.admin.audit import AuditLog
from proxy.admin.client_documents import iso, left_s
from proxy.admin.overrides import ThrottlingChange, parse_throttling
from proxy.admin.port.guard import current_author
from proxy.admin.replies import ApiError, answer, json_body
from proxy.quota.rule_registry import RuleRegistry
from proxy.quota.rules import QuotaPause, pause_name
from proxy.state import Document, StateError

THROTTLING_PATH = "/v1/throttling"
MAX_CHANGE_BYTES = 64 * 1024

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ThrottlingRoutes:
    """The handlers."""

    rules: RuleRegistry
    audit: AuditLog

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
            async with self.audit.recording(current_author(), "pauses", self._shown):
                await self._make(change, now_s)
        except ValueError as error:
            raise ApiError(400, str(error), "end some of them with on: true") from None
        except StateError as error:
            raise ApiError(503, error.what, error.fix) from error
        _log_change(change)
        return answer({"throttling": throttling_document(self.rules, now_s)})

    async def _make(self, change: ThrottlingChange, now_s: float) -> None:
        if change.until_s is not None:
            await self.rules.pause(QuotaPause(change.keys, change.until_s, change.by, now_s))
            return
        ended = await self.rules.resume(change.keys or None)
        if not ended and change.keys:
            fix = "see GET /v1/throttling for those that are paused"
            raise ApiError(404, f"{pause_name(change.keys)} is not paused", fix)

    def _shown(self) -> object:
        """Return who is paused until when, for the audit."""
        return {pause.name: iso(pause.until_s) for pause in self.rules.pauses()}


def _log_change(change: ThrottlingChange) -> None:
    about = {
        "selector": pause_name(change.keys),
        "by": change.by,
        "who": current_author().name,
        "remote": current_author().address,
    }
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
