"""A way to a broker over which a test has power: it counts, swallows and hangs up."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from support.proxy_process import HOST

PIECE_BYTES = 1 << 16


@dataclass(slots=True)
class Detour:
    """What the way in front of a broker has seen, and what it lets pass."""

    upstream: tuple[str, int]
    swallow: bytes | None = None
    """A request that has these bytes in it is not sent on."""
    address: tuple[str, int] = (HOST, 0)
    opened: int = 0
    open: int = 0
    swallowed: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        self.open += 1
        broker_reader, broker_writer = await asyncio.open_connection(*self.upstream)
        back = asyncio.create_task(self._answers(broker_reader, writer))
        self.tasks.add(back)
        try:
            while data := await reader.read(PIECE_BYTES):
                if self.swallow is not None and self.swallow in data:
                    self.swallowed += 1
                else:
                    broker_writer.write(data)
        except ConnectionError:
            pass
        finally:
            self.open -= 1
            back.cancel()
            broker_writer.close()
            writer.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
        writer.close()


@asynccontextmanager
async def detour(
    bootstrap: str, *, swallow: bytes | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Detour]:
    """Open a way to a broker, with TLS at our end of it if there is a context."""
    host, port = bootstrap.split(":")
    way = Detour((host, int(port)), swallow)
    server = await asyncio.start_server(way.serve, HOST, 0, ssl=tls)
    way.address = server.sockets[0].getsockname()[:2]
    async with server:
        yield way
