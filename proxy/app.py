"""Wires the parts together: the only module that knows them all."""

import asyncio
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry
from structlog import get_logger

from metrics import Instruments, Registry, SensorCollector
from metrics.clock import MS_PER_SECOND, clock_ms
from proxy.admin.history import History
from proxy.admin.log_level import log_level
from proxy.admin.loop_lag import watch_lag
from proxy.admin.readiness import Readiness, judge
from proxy.admin.request_times import RequestTimes
from proxy.admin.server import AdminError, AdminServer
from proxy.admin.slices import Slices
from proxy.admin.status import BrokerStatus, ConfigLoad, ListenerStatus, RelayStatus
from proxy.cluster.dial import upstream_context
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.login import Credentials, Login
from proxy.cluster.upstream import LOGIN_REFUSED
from proxy.config import Config, ListenerSection
from proxy.config.certificates import certificate_expiries
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
from proxy.state import KafkaStore, MemoryStore, SqliteStore, Store, WatchedStore

EXPIRY_INTERVAL_S = 60.0  # between two looks for idle sensors
TAKE_OVER_TIMEOUT_S = 30.0
"""How long a successor waits for the state and the admin port of the proxy that it replaces."""

ADMIN_RETRY_S = 0.05
TICK_INTERVAL_S = 1.0  # between two looks for clients that are held no longer, and for the charts

THREAD_TURN_S = 0.001
"""For how long a thread that computes keeps the event loop from going on; Python's own 5 ms would
come on top of each of its rounds during a reload."""

MIDDLE_COLLECTION_AFTER, FULL_COLLECTION_AFTER = 5, 1
"""Collections of younger objects between two of Python's garbage collector: a full one looks at
some 8,000 objects then, which takes some 2 ms. With 10,000 clients, rules and partitions it would
look at a million, if those that were there before were not left out."""

FROZEN_GROWTH = 1_000_000
"""Objects frozen since all were looked at, some 150 MB, after which all are again, for 0.3 s or so:
what became garbage in a cycle after it was frozen stays until then."""

OLDEST_GENERATION = 2  # a collection of it is a full one

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
        log_level.set(config.log_level)
        self._config = config
        self._store = WatchedStore(MemoryStore())
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
        apis = self._services.times.by_name
        self._request_times = RequestTimes(
            lambda: {api: (each.broker, each.proxy, each.hold) for api, each in apis.items()}
        )
        self._slices = Slices()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, take_over: int | None = None) -> None:
        """Open every port and begin to work.

        `take_over` is the process id of a proxy to replace: its ports are shared and it is told to
        stop, then its state is waited for. New connections wait meanwhile; none is refused.
        Raises ListenerError, AdminError, StateError, or OSError when there is no such process.
        """
        sys.setswitchinterval(THREAD_TURN_S)
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
            store = await asyncio.to_thread(_open_store, self._config, way, wait_ms)
            self._store = WatchedStore(store)
            settings = self._config.quota_settings
            self.rules = RuleRegistry(self.quotas, self._store, settings, self._compose)
            await self._kafka_quotas.follow(self._config.quotas.source == "kafka")
            self._queries.load(self._store)
            await self._start_admin(wait_s)
        except BaseException:
            await self.relay.close()
            self._store.close()
            raise
        _log.info("admin", port=self.admin.port)
        self._show_health()
        self.relay.accept()
        self._tasks = [
            asyncio.create_task(work(), name=work.__name__)
            for work in (
                self.brokers.monitor,
                self._store.watch,
                self._watch_lag,
                self.relay.watch_idle,
                self.reloader.watch,
                self._kafka_quotas.watch,
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
            not_ready=lambda: self._readiness().reason,
            warning=lambda: self._readiness().warning,
            request_times=self._request_times.documents,
            quotas=self.quotas,
            rules=self.rules,
            relay=self._relay_status,
            history=self._history,
            reports=self._queries,
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

    async def _use_kafka(self, rules: Iterable[Rule]) -> None:
        """Put the cluster's own quotas in force. Only after `start`."""
        await self.rules.use_kafka(rules)

    async def _compose(self, compose: Compose) -> ComposedRules:
        """Compose rules in a thread; one at a time, so that the event loop has its share."""
        async with self._composing:
            return await asyncio.to_thread(compose)

    async def _apply(self, config: Config) -> None:
        """Put quotas, throttling, limits and a new password of the same user in force.

        And the log level of the file, whatever an operator has set.
        """
        login, sasl = self._bootstrap.login, config.cluster.sasl
        # The password of another user waits with that user for a restart.
        if login is not None and sasl is not None and sasl == self._config.cluster.sasl:
            login.renew(sasl.password())
        settings = await asyncio.to_thread(lambda: config.quota_settings)
        await self.rules.use_file(settings)
        await self._kafka_quotas.follow(config.quotas.source == "kafka")
        self._bootstrap.connect_timeout_s = config.limits.connect_timeout
        self._queries.update(config.progress_settings, config.pipeline_settings)
        self._services.limits = _limits(config)
        self._services.mode = ThrottleMode(config.throttle.mode)
        log_level.set(config.log_level)

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
            cluster_answers=self.brokers.answers,
            delay_queues={each.queue.api: len(each.queue) for each in self._services.reapers.all},
            config_loads=[
                ConfigLoad(load.at_s, load.result, load.message) for load in self.reloader.loads
            ],
            throttle_mode=self._services.mode.value,
        )

    def _readiness(self) -> Readiness:
        brokers, since_s = self.brokers, self.brokers.silent_since_s
        return judge(
            reachable=brokers.reachable,
            was_reachable=brokers.was_reachable,
            refusal=brokers.refusal,
            silent_s=None if since_s is None else self._services.loop.time() - since_s,
        )

    def _show_health(self) -> None:
        """Show by metrics what else only `/readyz`, the log and the state would."""
        instruments, brokers = self._services.instruments, self.brokers
        instruments.ready.set_function(lambda: self._readiness().reason is None)
        instruments.cluster_reachable.set_function(lambda: brokers.answers)
        instruments.login_refused.set_function(lambda: brokers.refusal is not None)
        instruments.state_writable.set_function(lambda: self._store.writable)
        for name, listener in self.relay.listeners.items():
            gauge = instruments.brokers_without_port.labels(name)
            gauge.set_function(listener.count_left_out)
        self._show_certificates(self._config)

    def _show_certificates(self, config: Config) -> None:
        """Show when the certificates expire that were just loaded."""
        expiry = self._services.instruments.certificate_not_after_timestamp_seconds
        expiry.clear()
        for role, listener, not_after_s in certificate_expiries(config):
            expiry.labels(role, listener).set(not_after_s)

    async def _watch_lag(self) -> None:
        """Measure the lag of the event loop, until cancelled."""
        await watch_lag(self._services.instruments.event_loop_lag_seconds.observe, clock_ms)

    async def _expire(self) -> None:
        """Forget idle sensors and clients, until cancelled."""
        frozen = gc.get_freeze_count()
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            frozen = collect_frozen(frozen)
            await self._slices.collect(self.quotas.expiring(clock_ms()))
            await self._slices.collect(self._clients.forgetting(clock_ms()))

    async def _tick(self) -> None:
        """Apply changed quotas, end throttling, add to the charts, until cancelled."""
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            self.relay.follow_quotas()
            self._services.outages.sweep(clock_ms())
            self._request_times.sample(clock_ms())
            await self._slices.collect(self.quotas.settling())
            await self._slices.collect(self.quotas.sweeping(clock_ms()))
            if self._history.due(clock_ms()):
                await self._slices.collect(self._history.sample(clock_ms))


def spare_full_collections() -> None:
    """Collect garbage now; from now on leave out what a full collection has found in use.

    So no full collection takes long. What it has found is freed as ever when nothing refers to it
    any more, but a reference cycle of such objects only by `collect_frozen`: what comes and goes
    often has to be free of cycles, as tests/relay/test_freed.py shows of connections.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # of nothing: Python puts full ones off until a quarter of its last one is new
    gc.callbacks.append(_freeze_survivors)
    young, _, _ = gc.get_threshold()
    gc.set_threshold(young, MIDDLE_COLLECTION_AFTER, FULL_COLLECTION_AFTER)


def collect_frozen(frozen_before: int, growth: int = FROZEN_GROWTH) -> int:
    """Collect all garbage if `growth` objects were frozen since there were `frozen_before`.

    Return how many there were when all were looked at last.
    """
    frozen = gc.get_freeze_count()
    if frozen - frozen_before < growth:
        return min(frozen, frozen_before)
    gc.unfreeze()
    gc.collect()
    return gc.get_freeze_count()


def _freeze_survivors(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop" and info["generation"] == OLDEST_GENERATION:
        gc.freeze()


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
