"""Reads what comes with an admin request, and writes the JSON that answers it."""

import asyncio
import json
from collections.abc import Iterator, Mapping

from aiohttp import web

from proxy.admin.slices import Slices

HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
"""On every JSON answer: the figures are of this moment, and are never taken for a page."""

BODY_TIMEOUT_S = 10.0
"""How long a body may take to arrive."""


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


async def answer_in_slices(document: Mapping[str, object], slices: Slices) -> web.Response:
    """Return a long document as a JSON answer: nothing else would run during one json.dumps."""
    text = "".join(await slices.collect(json_pieces(document)))
    return web.Response(text=text, content_type="application/json", headers=HEADERS)


def json_pieces(document: Mapping[str, object]) -> Iterator[str]:
    """Yield the text that `json.dumps` gives, each item of the document's lists by itself."""
    yield "{"
    for number, (key, value) in enumerate(document.items()):
        yield f"{', ' if number else ''}{json.dumps(key)}: "
        if isinstance(value, list):
            yield "["
            for index, item in enumerate(value):
                yield f"{', ' if index else ''}{json.dumps(item)}"
            yield "]"
        else:
            yield json.dumps(value)
    yield "}"


async def json_body(request: web.Request, most_bytes: int) -> bytes:
    """Return the body of a request that says it is JSON; it is not looked into.

    Raises ApiError: 400 when it is broken off, 408 when it is slow, 413 when it is longer than
    `most_bytes`, 415 when it is not said to be JSON.
    """
    if request.content_type != "application/json":
        raise ApiError(
            415,
            f"the body is {request.content_type}, not JSON",
            "send the header 'Content-Type: application/json'",
        )
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > most_bytes:
                    raise ApiError(413, "the body is too large", f"send at most {most_bytes} bytes")
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time", "send it at once") from None
    except web.RequestPayloadError:
        raise ApiError(400, "the body is broken off or badly framed", "send it again") from None
    return bytes(body)


def whole_number(request: web.Request, name: str, default: int, most: int) -> int:
    """Return a number of the query string, 0 to `most`. Raises ApiError with status 400."""
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and int(text[:9]) <= most):
        raise ApiError(400, f"{name}: {text!r} is not a number", f"write 0 to {most}")
    return int(text[:9])
