"""What stands for the proxy: a real HTTP server in a thread of its own that keeps the reports."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from threading import Condition, Event, Thread
from typing import Any

from aiohttp import web

HOST = "127.0.0.1"
WAIT_S = 30
_LARGEST_REPORT_BYTES = 4 << 20

Report = dict[str, Any]
Behaviour = Callable[[web.Request, Report], Awaitable[web.StreamResponse]]


async def take(_request: web.Request, _report: Report) -> web.Response:
    return web.json_response({})


async def fail(_request: web.Request, _report: Report) -> web.Response:
    raise web.HTTPInternalServerError


async def unavailable(_request: web.Request, _report: Report) -> web.Response:
    """Answer as a balancer does that has no proxy behind it."""
    raise web.HTTPServiceUnavailable


async def hang(_request: web.Request, _report: Report) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def hang_up(request: web.Request, _report: Report) -> web.Response:
    """Close the connection without an answer."""
    assert request.transport is not None
    request.transport.close()
    return web.Response(status=500)  # which goes nowhere


def _trickling(head: bytes) -> Behaviour:
    async def answer(request: web.Request, _report: Report) -> web.Response:
        """Go on with an answer that begins so, as long as somebody waits."""
        assert request.transport is not None
        request.transport.write(head)
        while not request.transport.is_closing():
            request.transport.write(b"x")
            await asyncio.sleep(0.01)
        return web.Response()  # which goes nowhere

    return answer


trickle_head = _trickling(b"HTTP/1.1 200 OK\r\nx: ")
trickle = _trickling(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")


def refuse(status: int, reason: str, error: str = "wrong", fix: str = "mend it") -> Behaviour:
    async def answer(_request: web.Request, _report: Report) -> web.Response:
        body = {"reason": reason, "error": error, "fix": fix}
        return web.json_response(body, status=status)

    return answer


class Receiver:
    """Serves `POST /v1/spark/batches` the way its `behaviour` says; that may change at any time.

    `asked` are all reports of events that came, `taken` those that were answered with success.
    Greetings stand apart: how many come depends on the time.
    """

    def __init__(self, behaviour: Behaviour = take, tls: ssl.SSLContext | None = None) -> None:
        self.behaviour = behaviour
        self.asked: list[Report] = []
        self.taken: list[Report] = []
        self.heartbeats: list[Report] = []
        """Reports that a run lives, all that came."""
        self.headers: list[dict[str, str]] = []
        self.connections: set[object] = set()
        """One object for each connection that a report came on."""
        self.port = 0
        self._tls = tls
        self._changed = Condition()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{HOST}:{self.port}"

    def start(self) -> "Receiver":
        """Serve; after a stop on the same port again."""
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever)
        self._thread.start()
        self._run(self._open())
        return self

    def stop(self) -> None:
        if self._loop is not None:
            self._run(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(WAIT_S)
            self._loop.close()
            self._loop = None

    def hang_up(self) -> None:
        """Close all connections, and go on serving."""
        self._run(self._close_connections())

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Return the condition's first true value; it is looked at whenever a report came."""
        with self._changed:
            value = self._changed.wait_for(condition, WAIT_S)
        assert value, f"not in {WAIT_S} s: {what}; asked: {self.asked}"
        return value

    def numbers(self) -> list[int]:
        return [report["number"] for report in self.taken]

    def wait_for_numbers(self, *numbers: int) -> None:
        """Wait until reports with these numbers, and no others, were taken."""
        self.wait_for(lambda: len(self.taken) >= len(numbers), f"{len(numbers)} reports")
        assert self.numbers() == list(numbers)

    def of(self, name: str, *events: str) -> list[Report]:
        """Give what was taken about a query, all of it or certain events."""
        wanted = [report for report in self.taken if report["name"] == name]
        return [report for report in wanted if not events or report["event"] in events]

    def _run(self, coroutine: Any) -> None:
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_S)

    async def _open(self) -> None:
        app = web.Application(client_max_size=_LARGEST_REPORT_BYTES)
        app.router.add_post("/{prefix:.*}v1/spark/batches", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, self.port, ssl_context=self._tls)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _close(self) -> None:
        await self._runner.cleanup()
        # A handler that hangs is left over, and would be complained of by a later test's log.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _close_connections(self) -> None:
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            assert connection.transport is not None
            connection.transport.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        report = await request.json()
        is_heartbeat = report["event"] == "running"
        with self._changed:
            (self.heartbeats if is_heartbeat else self.asked).append(report)
            self.headers.append(dict(request.headers))
            self.connections.add(request.protocol)
            self._changed.notify_all()
        response = await self.behaviour(request, report)
        if response.status == 200 and not is_heartbeat:
            with self._changed:
                self.taken.append(report)
                self._changed.notify_all()
        return response


class Gate:
    """A behaviour: nothing is answered before `open()`, and everything is taken after."""

    def __init__(self) -> None:
        self._opened = Event()

    def open(self) -> None:
        self._opened.set()

    async def __call__(self, request: web.Request, report: Report) -> web.Response:
        await asyncio.to_thread(self._opened.wait, WAIT_S)
        return await take(request, report)
