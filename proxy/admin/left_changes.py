"""Takes in what was changed at another member, since the leader alone keeps the audit."""

import json
import time
from dataclasses import dataclass

from aiohttp import web

from proxy.admin.audit import AuditLog
from proxy.admin.port.guard import current_author
from proxy.admin.replies import ApiError, answer, json_body

LEFT_CHANGES_PATH = "/member/changes"
MAX_CHANGES_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class LeftChangeRoutes:
    """The handler; only other members may ask it."""

    audit: AuditLog

    def routes(self) -> list[web.RouteDef]:
        """Return the handler by method and path."""
        return [web.post(LEFT_CHANGES_PATH, self._post_changes)]

    async def _post_changes(self, request: web.Request) -> web.Response:
        body = await json_body(request, MAX_CHANGES_BYTES)
        try:
            changes = [
                (str(each["what"]), each["before"], each["after"]) for each in json.loads(body)
            ]
        except (ValueError, TypeError, KeyError, RecursionError):
            fix = 'send [{"what": WHAT, "before": BEFORE, "after": AFTER}, ...]'
            raise ApiError(400, "the body is no list of changes", fix) from None
        for what, before, after in changes:
            await self.audit.record(current_author(), what, before, after, time.time())
        return answer({"recorded": len(changes)})
