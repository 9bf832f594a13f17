"""A way to a broker that can be cut in silence, as by a network that loses all packets."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from support.proxy_process import HOST

PIECE_BYTES = 1 << 16


class CutWay:
    """Passes on what comes to `port`; while it is cut, connections stay open and nothing moves."""

    def __init__(self, port: int, to_port: int) -> None:
        self._port, self._to_port = port, to_port
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._flows.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._flows.clear)

    def mend(self) -> None:
        self._loop.call_soon_threadsafe(self._flows.set)

    async def open(self) -> None:
        await asyncio.start_server(self._serve, HOST, self._port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flows.wait()
        try:
            there = await asyncio.open_connection(HOST, self._to_port)
        except OSError:
            writer.close()
            return
        for pair in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._pass(*pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(PIECE_BYTES):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        await self._flows.wait()
        writer.close()

    def run(self) -> None:
        """Serve until `end`, in a thread."""
        self._loop.run_forever()

    def begin(self) -> None:
        self._loop.run_until_complete(self.open())

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


@contextmanager
def cut_way(port: int, to_port: int) -> Iterator[CutWay]:
    """Open such a way."""
    way = CutWay(port, to_port)
    way.begin()
    thread = threading.Thread(target=way.run, daemon=True)
    thread.start()
    try:
        yield way
    finally:
        way.end()
        thread.join()
