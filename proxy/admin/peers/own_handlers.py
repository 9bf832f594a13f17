"""Asks the handlers of this process as another member is asked, without a connection."""

from collections.abc import Mapping
from typing import cast

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from yarl import URL

from proxy.admin.peers.member_client import Reply
from proxy.admin.port.guard import answer_member
from proxy.admin.replies import OWN_BODY


class _WrittenBody(bytearray):
    """Collects the pieces of an answer's body: the one method of a writer that a body needs."""

    async def write(self, piece: bytes | memoryview) -> None:
        self.extend(piece)


async def ask_own_handlers(
    outer: web.Request,
    member: str,
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes | None,
) -> Reply:
    """Return what this process, which is `member`, answers to a request of its own.

    `outer` is the request that is being answered. It takes as long as it takes: a change that is
    under way must not be cut off.
    """
    inner = outer.clone(method=method, rel_url=URL(target, encoded=True), headers=headers)
    inner[OWN_BODY] = body or b""
    match = await outer.app.router.resolve(inner)
    response = await answer_member(inner, match.handler)
    assert isinstance(response, web.Response)
    answered = response.body or b""
    if isinstance(answered, Payload):
        written = _WrittenBody()
        await answered.write(cast(AbstractStreamWriter, written))
        answered = written
    return Reply(member, response.status, response.headers, bytes(answered))
