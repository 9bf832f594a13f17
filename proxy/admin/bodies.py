"""Reads what comes with a request: a body of bounded size, numbers in the query string."""

import asyncio

from aiohttp import web

from proxy.admin.errors import ApiError

BODY_TIMEOUT_S = 10.0
"""How long a body may take to arrive."""


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


def number(request: web.Request, name: str, default: int, most: int) -> int:
    """Return a whole number of the query string, 0 to `most`. Raises ApiError with status 400."""
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and int(text[:9]) <= most):
        raise ApiError(400, f"{name}: {text!r} is not a number", f"write 0 to {most}")
    return int(text[:9])
