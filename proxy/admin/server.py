"""The admin HTTP server: `/metrics`, `/healthz`, `/readyz`."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SHUTDOWN_TIMEOUT_S = 1.0
"""How long a request in progress may go on when the server stops."""

NotReady = Callable[[], str | None]
"""Gives the reason why the proxy can't serve clients now, None when it can."""


class AdminError(Exception):
    """The admin port could not be opened."""


class AdminServer:
    """Serves operators on one address."""

    def __init__(
        self, host: str, port: int, *, metrics: CollectorRegistry, not_ready: NotReady
    ) -> None:
        self._host = host
        self._port = port
        self._metrics = metrics
        self._not_ready = not_ready
        self._runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        """The port that is open, also when any free one was asked for. Only after `start`."""
        assert self._runner is not None
        return int(self._runner.addresses[0][1])

    async def start(self) -> None:
        """Open the port. Raises AdminError."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._get_metrics),
                web.get("/healthz", self._get_healthz),
                web.get("/readyz", self._get_readyz),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise AdminError(
                f"admin.bind: {self._host}:{self._port}: {error.strerror or error}"
            ) from None

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _get_metrics(self, _: web.Request) -> web.Response:
        body = generate_latest(self._metrics)
        return web.Response(body=body, headers={"Content-Type": METRICS_CONTENT_TYPE})

    async def _get_healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "up"})

    async def _get_readyz(self, _: web.Request) -> web.Response:
        reason = self._not_ready()
        if reason is None:
            return web.json_response({"status": "ready"})
        return web.json_response({"status": "not ready", "reason": reason}, status=503)
