"""What an admin request is told when it can't be served: one JSON shape for every error."""

from collections.abc import Mapping

from aiohttp import web

HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
"""On every JSON answer: the figures are of this moment, and are never taken for a page."""


class ApiError(Exception):
    """A request that is refused.

    Args:
        status: the HTTP status, 400 or above.
        what: what is wrong, for people.
        fix: how to mend it.
        headers: what the status asks for, such as `Allow`.
        reason: a word for programs, where several causes have one status.

    """

    def __init__(
        self,
        status: int,
        what: str,
        fix: str,
        headers: Mapping[str, str] | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(what)
        self.status = status
        self.what = what
        self.fix = fix
        self.headers = headers or {}
        self.reason = reason

    def response(self) -> web.Response:
        """Return the answer: `{"error": what, "fix": how}`, with `"reason"` if there is one."""
        reason = {} if self.reason is None else {"reason": self.reason}
        return answer({"error": self.what, "fix": self.fix, **reason}, self.status, self.headers)


def answer(
    document: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return a document as a JSON answer."""
    return web.json_response(document, status=status, headers={**HEADERS, **(headers or {})})
