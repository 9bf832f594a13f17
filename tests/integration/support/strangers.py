"""A server that is no broker: it gives everybody the same answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from support.proxy_process import HOST


@asynccontextmanager
async def stranger(frame: bytes | None) -> AsyncIterator[tuple[str, int]]:
    """Give the address of one that answers whatever it is asked with `frame` and closes.

    None: it reads on and says nothing.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if frame is None:
            await reader.read()
        else:
            writer.write(frame)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, HOST, 0) as server:
        yield server.sockets[0].getsockname()[:2]
