"""Lets a gateway in: where nobody else can connect, what it says of the author is believed."""

import json
from urllib.parse import quote

from aiohttp import web
from aiohttp.typedefs import Handler

from proxy.admin.audit import LOCAL_AUTHOR, Author, audit_left
from proxy.admin.port.access import Access
from proxy.admin.port.guard import Guard
from proxy.admin.port.member_headers import CHANGES, LEAVE_AUDIT, author_of


class MemberGuard(Guard):
    """Lets every request pass. Only for a UNIX socket in a directory of ours."""

    def __init__(self) -> None:
        super().__init__(Access())

    @web.middleware
    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request; with the changes that it made, where these are left to the gateway."""
        if LEAVE_AUDIT not in request.headers:
            return await super().answer(request, handler)
        with audit_left() as changes:
            response = await super().answer(request, handler)
        if changes:
            response.headers[CHANGES] = quote(json.dumps(changes), safe="")
        return response

    def _admit(self, request: web.Request) -> Author:
        return author_of(request.headers, LOCAL_AUTHOR)
