"""Asks the handlers of this process as another member is asked, without a connection."""

import asyncio
from collections.abc import Mapping
from typing import cast

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.payload import Payload
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from proxy.admin.peers.member_client import Reply
from proxy.admin.port.guard import answer_member


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

    `outer` is the request that is being answered. As much time is taken as it takes: a change that
    is under way must not be cut off.
    """
    loop = asyncio.get_running_loop()
    # The limit is above all of it: else reading from the connection of `outer` would pause.
    reader = StreamReader(outer.protocol, len(body or b"") + 1, loop=loop)
    if body:
        reader.feed_data(body)
    reader.feed_eof()
    message = _message(method, target, headers)
    inner = web.Request(message, reader, outer.protocol, outer.writer, outer.task, loop)
    match = await outer.app.router.resolve(inner)
    response = await answer_member(inner, match.handler)
    assert isinstance(response, web.Response)
    told = response.body or b""
    if isinstance(told, Payload):
        written = _WrittenBody()
        await told.write(cast(AbstractStreamWriter, written))
        told = written
    return Reply(member, response.status, response.headers, bytes(told))


def _message(method: str, target: str, headers: Mapping[str, str]) -> RawRequestMessage:
    """Return the head of a request as aiohttp reads one."""
    raw = tuple((name.encode(), value.encode()) for name, value in headers.items())
    return RawRequestMessage(
        method,
        target,
        HttpVersion11,
        CIMultiDictProxy(CIMultiDict(headers)),
        raw,
        should_close=False,
        compression=None,
        upgrade=False,
        chunked=False,
        url=URL(target, encoded=True),
    )
