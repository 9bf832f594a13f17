"""Wires the parts together: the only module that knows them all."""

import asyncio
import resource
from collections.abc import Callable

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry
from structlog import get_logger

from metrics import Instruments, Registry, SensorCollector
from proxy.admin.server import AdminServer
from proxy.config import Config, Listener
from proxy.quota.entities import QuotaKind
from proxy.quota.manager import QuotaManager, QuotaSettings
from proxy.quota.rules import Rule
from proxy.relay.cluster import Cluster
from proxy.relay.listener import ListenerSettings
from proxy.relay.pipes import PipePool
from proxy.relay.relay import Relay
from proxy.relay.services import (
    MS_PER_SECOND,
    Limits,
    Reapers,
    Services,
    ThrottleMode,
    clock_ms,
)
from proxy.relay.tls import server_context, upstream_context

EXPIRY_INTERVAL_S = 60.0
"""Between two looks for idle sensors."""

_log = get_logger(__name__)


def quota_settings(config: Config) -> QuotaSettings:
    """Turn the configuration's quotas into the manager's."""
    return QuotaSettings(
        rules=tuple(
            Rule(
                user=rule.user,
                client_id=rule.client_id,
                client_id_prefix=rule.client_id_prefix,
                listener=rule.listener,
                scope=rule.scope,
                bounds={
                    kind: float(bound)
                    for kind in QuotaKind
                    if (bound := getattr(rule, kind.value)) is not None
                },
                place=config.place(f"quotas.rules[{number}]"),
                number=number,
            )
            for number, rule in enumerate(config.quotas.rules)
        ),
        window_ms=config.quotas.window * MS_PER_SECOND,
        samples=config.quotas.samples,
        max_delay_ms=config.throttle.max_delay * MS_PER_SECOND,
        max_client_entities=config.limits.max_client_entities,
    )


class App:
    """One proxy. Make it inside a running event loop; `run` it, or `start` and `stop` it."""

    def __init__(self, config: Config, *, splice: bool = True) -> None:
        loop = asyncio.get_running_loop()
        settings = quota_settings(config)
        limits = config.limits
        self.metrics = CollectorRegistry()
        instruments = Instruments(self.metrics, max_label_sets=limits.max_client_entities)
        sensors = Registry(settings.max_sensors)
        self.metrics.register(SensorCollector(sensors, clock_ms))
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            self.metrics.register(collector)
        self.quotas = QuotaManager(settings, instruments, sensors, on_overflow=_log_overflow)
        tls = config.cluster.tls
        self.cluster = Cluster(
            tuple((server.host, server.port) for server in config.cluster.bootstrap_servers),
            upstream_context(tls.ca_file, tls.cert_file, tls.key_file) if tls else None,
            limits.connect_timeout,
            splice=splice,
        )
        self._reapers = Reapers(loop, instruments)
        self._services = Services(
            loop=loop,
            limits=Limits(
                max_connections=limits.max_connections,
                max_connections_per_ip=limits.max_connections_per_ip,
                max_request_bytes=limits.max_request_bytes,
                max_in_flight_requests=limits.max_in_flight_requests,
                idle_timeout_s=limits.idle_timeout,
                connect_timeout_s=limits.connect_timeout,
                drain_timeout_s=limits.drain_timeout,
            ),
            mode=ThrottleMode(config.throttle.mode),
            quotas=self.quotas,
            reapers=self._reapers,
            instruments=instruments,
            pipes=PipePool(),
            splice=splice,
        )
        self.relay = Relay(tuple(map(_listener, config.listeners)), self.cluster, self._services)
        self.admin = AdminServer(
            config.admin.bind.host,
            config.admin.bind.port,
            metrics=self.metrics,
            not_ready=self._not_ready,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Open every port and begin to work. Raises ListenerError or AdminError."""
        _raise_file_limit()
        self.relay.open()
        try:
            await self.admin.start()
        except BaseException:
            await self.relay.close()
            raise
        _log.info("admin", port=self.admin.port)
        self._tasks = [
            asyncio.create_task(work(), name=work.__name__)
            for work in (self.cluster.monitor, self.relay.watch_idle, self._expire)
        ]

    async def stop(self) -> None:
        """Drain, then close everything."""
        await self.relay.drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.admin.stop()
        self._reapers.close()

    async def run(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        """Work until `stop` is set. Raises what a background task of ours died of."""
        await self.start()
        try:
            ready()
            stopping = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait(
                (stopping, *self._tasks), return_when=asyncio.FIRST_COMPLETED
            )
            stopping.cancel()
            for task in done - {stopping}:
                task.result()
        finally:
            await self.stop()

    def _not_ready(self) -> str | None:
        return None if self.cluster.reachable else "the Kafka cluster does not answer"

    async def _expire(self) -> None:
        """Forget idle sensors and clients, until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            self.quotas.expire(clock_ms())
            self._services.forget_clients(clock_ms())


def _listener(listener: Listener) -> ListenerSettings:
    ports, tls = listener.broker_ports, listener.tls
    return ListenerSettings(
        name=listener.name,
        host=listener.bind.host,
        port=listener.bind.port,
        advertised_host=listener.advertised_host,
        broker_ports=(ports.first, ports.last) if ports else None,
        tls=server_context(tls.cert_file, tls.key_file, tls.ca_file) if tls else None,
        sni=tls.sni if tls else None,
    )


def _log_overflow(rule: Rule, kind: QuotaKind) -> None:
    _log.warning(
        "too many clients for sensors of their own: further ones share one",
        rule=rule.title,
        quota=str(kind),
        fix="raise limits.max_client_entities",
    )


def _raise_file_limit() -> None:
    """Let the process open as many sockets as the system allows it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
