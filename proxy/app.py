"""Wires the parts together: the only module that knows them all."""

import asyncio
import gc
import os
import resource
import signal
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry
from structlog import get_logger

from metrics import Instruments, Registry, SensorCollector
from metrics.clock import MS_PER_SECOND, clock_ms
from proxy.admin.history import History
from proxy.admin.server import AdminError, AdminServer
from proxy.admin.slices import Slices
from proxy.admin.status import BrokerStatus, ConfigLoad, ListenerStatus, RelayStatus
from proxy.cluster.dial import upstream_context
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.login import Credentials, Login
from proxy.cluster.upstream import LOGIN_REFUSED
from proxy.config import Config, ListenerSection
from proxy.config.models import HIDE_PASSWORD
from proxy.config.reload import Reloader
from proxy.queries.queries import Queries
from proxy.quota.entities import QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.rule_registry import Compose, ComposedRules, RuleRegistry
from proxy.quota.rules import Rule
from proxy.relay.brokers import Brokers
from proxy.relay.clients import ClientRegistry
from proxy.relay.kafka_quotas import KafkaQuotas
from proxy.relay.listener import ListenerError, ListenerSettings
from proxy.relay.pump import PipePool
from proxy.relay.relay import Relay
from proxy.relay.services import Limits, Reapers, Services, ThrottleMode
from proxy.relay.tls import server_context
from proxy.state import KafkaStore, MemoryStore, SqliteStore, Store

EXPIRY_INTERVAL_S = 60.0  # between two looks for idle sensors
TAKE_OVER_TIMEOUT_S = 30.0
"""How long a successor waits for the state and the admin port of the proxy that it replaces."""

ADMIN_RETRY_S = 0.05
TICK_INTERVAL_S = 1.0  # between two looks for clients that are held no longer, and for the charts

FULL_COLLECTION_AFTER = 100
"""Collections of younger objects between two full ones of Python's garbage collector, which hold
the event loop for 0.3 s with 10,000 clients, rules and partitions. Python's own 10 makes several
during a reload. By then the garbage of some 18,000 closed connections is kept, 5 kB each."""

PORT_ERRORS = (ListenerError, AdminError)
"""What `App.start` raises for a port that cannot be opened."""

_log = get_logger(__name__)


class App:
    """One proxy. Make it inside a running event loop; `run` it, or `start` and `stop` it."""

    rules: RuleRegistry
    """All rules in force and where they come from. Only after `start`."""
    admin: AdminServer
    """Only after `start`."""

    def __init__(self, config: Config, path: Path, *, splice: bool = True) -> None:
        loop = asyncio.get_running_loop()
        settings = config.quota_settings
        self._config = config
        self._store: Store = MemoryStore()
        self.metrics = CollectorRegistry()
        instruments = Instruments(self.metrics, max_label_sets=config.limits.max_client_entities)
        sensors = Registry(settings.max_sensors)
        self.metrics.register(SensorCollector(sensors, clock_ms))
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            self.metrics.register(collector)
        self.quotas = QuotaManager(
            settings, instruments, sensors, on_overflow=_log_overflow, on_state=_log_state
        )
        errors = instruments.upstream_errors_total
        self._bootstrap = _bootstrap(config, errors.labels(LOGIN_REFUSED).inc)
        self.brokers = Brokers(self._bootstrap, splice=splice)
        client = KafkaClient(self._bootstrap, limit_s=None)
        self._kafka_quotas = KafkaQuotas(client, self._use_kafka, errors)
        self._kafka_quotas.follow(config.quotas.source == "kafka")
        self._kafka_rules: Iterable[Rule] = ()
        self._kafka_changed = asyncio.Event()
        self._composing = asyncio.Lock()
        self._clients = ClientRegistry(instruments.bytes_total)
        self._queries = Queries(
            config.progress_settings,
            config.pipeline_settings,
            self.quotas,
            self._bootstrap,
            instruments,
            registry=self.metrics,
            knows_client=self._clients.knows,
        )
        self._services = Services(
            loop=loop,
            limits=_limits(config),
            mode=ThrottleMode(config.throttle.mode),
            quotas=self.quotas,
            reapers=Reapers(loop, instruments),
            instruments=instruments,
            pipes=PipePool(),
            clients=self._clients,
            interceptor=self._queries.following.client,
            splice=splice,
            passes_unknown_apis=config.cluster.unknown_apis == "pass",
        )
        listeners = tuple(map(_listener, config.listeners))
        self.relay = Relay(listeners, self.brokers, self._services)
        self.reloader = Reloader(path, config, self._apply, instruments.config_reloads_total)
        self._history = History(self.quotas.measured_rates)
        self._slices = Slices()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, take_over: int | None = None) -> None:
        """Open every port and begin to work.

        `take_over` is the process id of a proxy to replace: its ports are shared and it is told to
        stop, then its state is waited for. New connections wait meanwhile; none is refused.
        Raises ListenerError, AdminError, StateError, or OSError when there is no such process.
        """
        _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
        if self._config.cluster.shows_password:
            text = "the password of cluster.sasl goes to the brokers in the clear"
            _log.warning(text, fix=HIDE_PASSWORD)
        self.relay.open(beside=take_over is not None)
        try:
            if take_over is not None:
                os.kill(take_over, signal.SIGTERM)
            wait_s = 0.0 if take_over is None else TAKE_OVER_TIMEOUT_S
            wait_ms, way = wait_s * MS_PER_SECOND, self._bootstrap
            self._store = await asyncio.to_thread(_open_store, self._config, way, wait_ms)
            settings = self._config.quota_settings
            self.rules = RuleRegistry(self.quotas, self._store, settings, self._compose)
            self._queries.load(self._store)
            await self._start_admin(wait_s)
        except BaseException:
            await self.relay.close()
            self._store.close()
            raise
        _log.info("admin", port=self.admin.port)
        self.relay.accept()
        self._tasks = [
            asyncio.create_task(work(), name=work.__name__)
            for work in (
                self.brokers.monitor,
                self.relay.watch_idle,
                self.reloader.watch,
                self._kafka_quotas.watch,
                self._follow_kafka,
                self._expire,
                self._tick,
                *self._queries.works(),
            )
        ]

    async def stop(self) -> None:
        """Drain, then close everything; first what a successor waits for: state, admin port."""
        try:
            await self.admin.stop()
            await self._queries.close()
            await asyncio.to_thread(self._store.close)
        finally:
            await self.relay.drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._services.reapers.close()

    async def _start_admin(self, wait_s: float) -> None:
        """Open the admin port, waiting for it at most so long."""
        admin = self._config.admin
        self.admin = AdminServer(
            admin.bind.host,
            admin.bind.port,
            metrics=self.metrics,
            not_ready=self._not_ready,
            quotas=self.quotas,
            rules=self.rules,
            relay=self._relay_status,
            history=self._history,
            reports=self._queries,
            connections=self.relay.list,
            clock_ms=clock_ms,
            token=admin.token_file.read_text().strip() if admin.token_file else None,
        )
        deadline_s = self._services.loop.time() + wait_s
        while True:
            try:
                return await self.admin.start()
            except AdminError:
                if self._services.loop.time() >= deadline_s:
                    raise
            await asyncio.sleep(ADMIN_RETRY_S)

    async def run(
        self, stop: asyncio.Event, ready: Callable[[], None], take_over: int | None = None
    ) -> None:
        """Work until `stop` is set. Raises as `start`, or what a task of ours died of."""
        await self.start(take_over)
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

    def _use_kafka(self, rules: Iterable[Rule]) -> None:
        self._kafka_rules = rules
        self._kafka_changed.set()

    async def _compose(self, compose: Compose) -> ComposedRules:
        """Compose rules in a thread; one at a time, so that the event loop has its share."""
        async with self._composing:
            return await asyncio.to_thread(compose)

    async def _follow_kafka(self) -> None:
        """Put the cluster's own quotas in force, until cancelled."""
        while True:
            await self._kafka_changed.wait()
            self._kafka_changed.clear()
            await self.rules.use_kafka(self._kafka_rules)

    async def _apply(self, config: Config) -> None:
        """Put quotas, throttling, limits and a new password of the same user in force."""
        login, sasl = self._bootstrap.login, config.cluster.sasl
        # The password of another user waits with that user for a restart.
        if login is not None and sasl is not None and sasl == self._config.cluster.sasl:
            login.renew(sasl.password())
        settings = await asyncio.to_thread(lambda: config.quota_settings)
        await self.rules.use_file(settings)
        self._kafka_quotas.follow(config.quotas.source == "kafka")
        self._bootstrap.connect_timeout_s = config.limits.connect_timeout
        self._queries.update(config.progress_settings, config.pipeline_settings)
        self._services.limits = _limits(config)
        self._services.mode = ThrottleMode(config.throttle.mode)

    def _relay_status(self) -> RelayStatus:
        return RelayStatus(
            listeners=[
                ListenerStatus(
                    name=name,
                    host=listener.settings.host,
                    port=listener.bootstrap_port,
                    tls=listener.settings.tls is not None,
                    connections=self.relay.connected_through[name],
                )
                for name, listener in self.relay.listeners.items()
            ],
            brokers=[
                BrokerStatus(node_id, *address)
                for node_id, address in sorted(self.brokers.addresses.items())
            ],
            cluster_answers=self.brokers.reachable,
            delay_queues={each.queue.api: len(each.queue) for each in self._services.reapers.all},
            config_loads=[
                ConfigLoad(load.at_s, load.result, load.message) for load in self.reloader.loads
            ],
            throttle_mode=self._services.mode.value,
        )

    def _not_ready(self) -> str | None:
        if self.brokers.reachable:
            return None
        if self.brokers.refusal is not None:
            return f"the Kafka cluster does not let the proxy log in: {self.brokers.refusal}"
        return "the Kafka cluster does not answer"

    async def _expire(self) -> None:
        """Forget idle sensors and clients, until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            await self._slices.collect(self.quotas.expiring(clock_ms()))
            await self._slices.collect(self._clients.forgetting(clock_ms()))

    async def _tick(self) -> None:
        """Apply changed quotas, end throttling, add to the charts, until cancelled."""
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            self.relay.follow_quotas()
            await self._slices.collect(self.quotas.settling())
            await self._slices.collect(self._services.connection_quotas.settling())
            await self._slices.collect(self.quotas.sweeping(clock_ms()))
            await self._slices.collect(self.relay.list.measuring(clock_ms()))
            if self._history.due(clock_ms()):
                await self._slices.collect(self._history.sample(clock_ms))


def spare_full_collections() -> None:
    """Collect garbage now, and have what is left looked at no more, and what comes seldom."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_AFTER)


def _bootstrap(config: Config, on_refused: Callable[[], None]) -> Bootstrap:
    """Make the way into the cluster; `on_refused` is called when it does not let the proxy in."""
    servers = [(server.host, server.port) for server in config.cluster.bootstrap_servers]
    tls, sasl = config.cluster.tls, config.cluster.sasl
    context = upstream_context(tls.ca_file, tls.cert_file, tls.key_file) if tls else None
    login = None
    if sasl is not None:
        credentials = Credentials(sasl.mechanism, sasl.username, sasl.password())
        login = Login(credentials, on_refused)
    return Bootstrap(servers, context, config.limits.connect_timeout, login)


def _open_store(config: Config, bootstrap: Bootstrap, wait_ms: float) -> Store:
    state, tls, login = config.state, bootstrap.tls, bootstrap.login
    if state.kind == "memory":
        return MemoryStore()
    if state.kind == "sqlite":
        return SqliteStore(state.path, wait_ms=wait_ms)
    timeout_s = config.limits.connect_timeout
    return KafkaStore(
        bootstrap.servers, state.topic, tls=tls, login=login, timeout_s=timeout_s, wait_ms=wait_ms
    )


def _limits(config: Config) -> Limits:
    """Return the relay's limits; the configuration's durations are seconds, too."""
    names = (field.name for field in fields(Limits))
    return Limits(**{name: getattr(config.limits, name.removesuffix("_s")) for name in names})


def _listener(listener: ListenerSection) -> ListenerSettings:
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
    text = "too many clients for sensors of their own: further ones share one"
    fix = "raise limits.max_client_entities"
    _log.warning(text, rule=rule.title, quota=str(kind), fix=fix)


def _log_state(
    entity: str, kind: QuotaKind, rule: Rule, throttled: bool, rate: float, bound: float
) -> None:
    text = "throttling began" if throttled else "throttling ended"
    about = {"client": entity, "quota": str(kind), "rule": rule.title}
    _log.info(text, **about, rate=round(rate), bound=round(bound))
