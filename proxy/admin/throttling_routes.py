"""The path `/v1/throttling`: lets clients through for a time, and holds them to quotas again."""

import time
from dataclasses import dataclass

from aiohttp import web

from proxy.admin.audit import AuditLog
from proxy.admin.changes import audited, log_change
from proxy.admin.overrides import ThrottlingChange, parse_throttling
from proxy.admin.replies import ApiError, answer, json_body
from proxy.admin.written_values import iso, left_s
from proxy.quota.pauses import QuotaPause, pause_name
from proxy.quota.rule_registry import RuleRegistry
from proxy.state import Document

THROTTLING_PATH = "/v1/throttling"
MAX_CHANGE_BYTES = 64 * 1024


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
        async with audited(self.audit, "pauses", self._ends, "end some of them with on: true"):
            await self._make(change, now_s)
        about = {"selector": pause_name(change.keys), "by": change.by}
        if change.until_s is None:
            log_change("throttling resumed", **about)
        else:
            log_change("throttling paused", "warning", until=iso(change.until_s), **about)
        return answer({"throttling": throttling_document(self.rules, now_s)})

    async def _make(self, change: ThrottlingChange, now_s: float) -> None:
        if change.until_s is not None:
            await self.rules.pause(QuotaPause(change.keys, change.until_s, change.by, now_s))
            return
        ended = await self.rules.resume(change.keys or None)
        if not ended and change.keys:
            fix = "see GET /v1/throttling for those that are paused"
            raise ApiError(404, f"{pause_name(change.keys)} is not paused", fix)

    def _ends(self) -> object:
        """Return who is paused until when, for the audit."""
        return {pause.name: iso(pause.until_s) for pause in self.rules.pauses()}


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
