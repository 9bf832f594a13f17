"""Lets the gateways of other machines in: they are asked for this machine alone, and believed."""

from aiohttp import web
from aiohttp.typedefs import Handler

from proxy.admin.audit import Author
from proxy.admin.port.access import Access
from proxy.admin.port.guard import Guard, require_all_rights
from proxy.admin.port.member_headers import ONE_MACHINE, SCOPE, author_of
from proxy.admin.replies import ApiError


class TierGuard(Guard):
    """Hands what has the header SCOPE to `relay`, if its token has all rights; see `Guard`.

    Only of such a request it is believed who asks.
    """

    def __init__(self, access: Access, relay: Handler) -> None:
        super().__init__(access)
        self._relay = relay

    @web.middleware
    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request that may pass, whoever it is of."""
        is_scoped = SCOPE in request.headers
        return await super().answer(request, self._relay if is_scoped else handler)

    def _admit(self, request: web.Request) -> Author:
        author = super()._admit(request)
        scope = request.headers.get(SCOPE)
        if scope is None:
            return author
        require_all_rights("ask as the gateway of another machine")
        if scope != ONE_MACHINE:
            raise ApiError(400, f"{SCOPE}: {scope!r} is unknown", f"write {ONE_MACHINE}")
        return author_of(request.headers, author.name)
