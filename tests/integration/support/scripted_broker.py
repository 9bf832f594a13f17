"""A broker that answers each API with the body that a test gives it, to any number of clients."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from struct import pack
from types import MappingProxyType
from typing import Any, Self

from support.proxy_process import HOST

from proxy.wire.apis import API_VERSIONS, APIS, LENGTH_BYTES, RESPONSE_HEADER_BYTES, plan_of
from proxy.wire.frames import RequestHead, parse_request_head

API_VERSIONS_VERSION = 0  # what it offers: all others get the answer for it (KIP-511)
UNSUPPORTED_VERSION = 35

Answer = Callable[[RequestHead], bytes]
"""Gives the body of a response."""


def body(api_key: int, version: int, **fields: Any) -> bytes:
    """Return the body of a response, without its header."""
    return bytes(APIS[api_key].response(version=version, **fields).encode(header=False))


PART_BYTES = 1 << 16
NO_CLAIMS: Mapping[int, int] = MappingProxyType({})


def in_parts(content: bytes) -> Iterator[memoryview]:
    """Cut, so that it shows how much was taken."""
    view = memoryview(content)
    for start in range(0, len(view), PART_BYTES):
        yield view[start : start + PART_BYTES]


class ScriptedBroker:
    """Serves in a thread of its own. A context manager."""

    def __init__(self, answers: dict[int, Answer], claims: Mapping[int, int] = NO_CLAIMS) -> None:
        """Answer by API key; ApiVersions is answered with those and itself.

        `claims`: the lengths that responses claim to have, where that is not true.
        """
        self._claims = claims
        self.answers = {API_VERSIONS: self._api_versions, **answers}
        """May be changed at any time."""
        self.asked: Counter[tuple[str | None, int]] = Counter()
        """Requests that came, by client id and API."""
        self.sent_bytes: Counter[str | None] = Counter()
        """By client id."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._listening = socket.create_server((HOST, 0))
        self._listening.setblocking(False)
        self.host, self.port = self._listening.getsockname()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._listening.close()

    @property
    def bootstrap(self) -> str:
        """`HOST:PORT`."""
        return f"{self.host}:{self.port}"

    def _run(self) -> None:
        self._begin(self._accept())
        self._loop.run_forever()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            sock, _ = await self._loop.sock_accept(self._listening)
            self._begin(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        with sock, suppress(EOFError, ConnectionError):
            while True:
                length = await self._read(sock, LENGTH_BYTES)
                frame = length + await self._read(sock, int.from_bytes(length, "big"))
                head = parse_request_head(frame, max_request_bytes=len(frame))
                assert head is not None
                self.asked[head.client_id, head.api_key] += 1
                content = self.answers[head.api_key](head)
                tags = b"\0" if plan_of(head.api_key, head.api_version).is_flexible else b""
                size = RESPONSE_HEADER_BYTES - LENGTH_BYTES + len(tags) + len(content)
                size = self._claims.get(head.api_key, size)
                start = pack(">ii", size, head.correlation_id) + tags
                for part in in_parts(start + content):
                    await self._loop.sock_sendall(sock, part)
                    self.sent_bytes[head.client_id] += len(part)

    async def _read(self, sock: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = await self._loop.sock_recv(sock, count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def _api_versions(self, head: RequestHead) -> bytes:
        version = API_VERSIONS_VERSION
        error = 0 if head.api_version == version else UNSUPPORTED_VERSION
        kind = APIS[API_VERSIONS].response.ApiVersion
        offered = [
            kind(api_key=key, min_version=0, max_version=APIS[key].max_version)
            for key in self.answers
        ]
        return body(API_VERSIONS, version, error_code=error, api_keys=offered)
