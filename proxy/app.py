"""Wires the parts together: the only module that knows them all."""

import asyncio
import ctypes
import faulthandler
import gc
import resource
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry
from structlog import get_logger

from metrics import Instruments, Registry, SensorCollector
from metrics.clock import clock_ms
from proxy.admin.audit import BY_FILE, AuditLog
from proxy.admin.history import History
from proxy.admin.log_level import log_level
from proxy.admin.loop_lag import watch_lag
from proxy.admin.rates.rate_observer import RateObserver
from proxy.admin.readiness import Readiness, judge
from proxy.admin.request_times import RequestTimes
from proxy.admin.server import AdminError, AdminServer
from proxy.admin.slices import Slices
from proxy.admin.status import (
    BrokerStatus,
    CertificateStatus,
    ConfigLoad,
    ListenerStatus,
    RelayStatus,
)
from proxy.cluster.kafka_client import KafkaClient
from proxy.cluster.upstream import LOGIN_REFUSED, Address
from proxy.config import Config
from proxy.config.check_report import find_start_hints
from proxy.config.differences import find_differences
from proxy.config.models import HIDE_PASSWORD
from proxy.config.reload import Reloader
from proxy.config.secrets import Certificate, Secrets, read_secrets
from proxy.config.stores import StateHolder, open_store
from proxy.garbage import FREED_INTERVAL_S, FreedMemory, collect_frozen
from proxy.parts import access_of, bootstrap_of, limits_of, listener_of, port_limits_of
from proxy.queries.queries import Queries
from proxy.quota.entities import QuotaKind
from proxy.quota.kept_changes import read_overrides, read_pauses
from proxy.quota.manager import QuotaManager
from proxy.quota.rule_registry import Compose, RuleRegistry
from proxy.quota.rule_sources import ComposedRules
from proxy.quota.rules import Rule
from proxy.quota.selector import selector
from proxy.relay.brokers import Brokers
from proxy.relay.clients import ClientRegistry
from proxy.relay.kafka_quotas import KafkaQuotas
from proxy.relay.listener import ListenerError, bind_ports
from proxy.relay.pump import PipePool
from proxy.relay.relay import Relay
from proxy.relay.services import Reapers, Services, ThrottleMode
from proxy.relay.take_over import SERVE_TIMEOUT_S, Predecessor, Replaceable, TakeOverError
from proxy.state import KafkaStore, MemoryStore, StateError, Store, WatchedStore

EXPIRY_INTERVAL_S = 60.0  # between two looks for idle sensors
RESUME_TIMEOUT_S, RESUME_RETRY_S = 5.0, 0.1
"""How long, and how often, a proxy tries to take back what a successor had that died."""

TICK_INTERVAL_S = 1.0  # between two looks for clients that are held no longer, and for the charts

THREAD_TURN_S = 0.001
"""For how long a thread that computes keeps the event loop from going on; Python's own 5 ms would
come on top of each of its rounds during a reload."""

PORT_ERRORS = (ListenerError, AdminError)
"""What `App.start` raises for a port that cannot be opened."""

_log = get_logger(__name__)


class App:
    """One proxy. Make it inside a running event loop; `run` it, or `start` and `stop` it."""

    rules: RuleRegistry
    """All rules in force and where they come from. Only after `start`."""
    admin: AdminServer
    """Only after `start`."""
    audit: AuditLog
    """What was changed, and by whom. Only after `start`."""

    def __init__(self, config: Config, path: Path, *, splice: bool = True) -> None:
        loop = asyncio.get_running_loop()
        settings = config.quota_settings
        log_level.set(config.log_level)
        self._config = self._in_force = config
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
        self._secrets = read_secrets(config)
        self._bootstrap = bootstrap_of(config, self._secrets, errors.labels(LOGIN_REFUSED).inc)
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
            limits=limits_of(config),
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
        listeners = tuple(listener_of(each, self._secrets) for each in config.listeners)
        self.relay = Relay(listeners, self.brokers, self._services)
        self.reloader = Reloader(path, config, self._apply, instruments.config_reloads_total)
        self._history = History(self.quotas.measured_rates)
        apis = self._services.times.by_name
        self._request_times = RequestTimes(
            lambda: {api: (each.broker, each.proxy, each.hold) for api, each in apis.items()}
        )
        self._slices = Slices()
        self._observer = RateObserver(
            instruments.bytes_total.children,
            config.limits.max_client_entities,
            clock_ms,
            self._slices,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._released = False
        """Whether a successor may have the state."""

    async def start(self, predecessor: Predecessor | None = None) -> None:
        """Open every port and begin to work.

        `predecessor` is a proxy to replace. Its ports are shared, and what it has in its state is
        read; only then it is told to release that, which is waited for. New connections wait
        meanwhile; none is refused. When all is open it is told to stop. If that takes longer than
        SERVE_TIMEOUT_S, this process is ended.
        Raises ListenerError, AdminError, StateError, TakeOverError.
        """
        sys.setswitchinterval(THREAD_TURN_S)
        _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
        if self._config.cluster.shows_password:
            text = "the password of cluster.sasl goes to the brokers in the clear"
            _log.warning(text, fix=HIDE_PASSWORD)
        for hint in find_start_hints(self._config):
            _log.warning("configuration hint", hint=hint)
        beside = holder = None
        if predecessor is not None:
            beside = predecessor.addresses
            holder = StateHolder(predecessor.pid, partial(self._replace, predecessor))
        self.relay.open(beside)
        admin: list[socket.socket] = []
        try:
            admin += self._bind_admin(beside or ())
            self._store.use(
                await asyncio.to_thread(open_store, self._config, self._bootstrap, holder)
            )
            settings = self._config.quota_settings
            self.rules = RuleRegistry(self.quotas, self._store, settings, self._compose)
            await self._end_due()
            await self._kafka_quotas.follow(self._config.quotas.source == "kafka")
            self._queries.load(self._store)
            self.audit = AuditLog(self._store)
            self._observer.use(self._store)
            await self._start_admin(admin)
        except BaseException:
            await self.relay.close()
            self._store.close()
            for sock in admin:
                sock.close()
            raise
        if predecessor is not None:
            try:
                self._check_wanted()
                predecessor.stop()
            except TakeOverError:
                await self.release()
                await self.relay.close()
                raise
            faulthandler.cancel_dump_traceback_later()
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
                self._give_memory_back,
                self._tick,
                self._observer.run,
                *self._queries.works(),
            )
        ]

    async def stop(self) -> None:
        """Drain, then close everything; first what another process may wait for."""
        try:
            if not self._released:
                await self.release()
            await self.admin.stop()  # a successor may have given this back, and not the state
        finally:
            await self.relay.drain()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._services.reapers.close()

    async def release(self) -> None:
        """Close admin port and state, for a successor; all is written by then."""
        await self.admin.stop()
        await self.audit.close()
        await self._queries.close()
        await self._observer.close()
        if self._config.state.kind != "memory":  # nobody else can have that
            await asyncio.to_thread(self._store.close)
        self.audit.resume(self._store)  # keeps in memory what the state does not take meanwhile
        self._released = True

    async def resume(self) -> None:
        """Open state and admin port again: the successor has died, or given up.

        Where that fails the log says so. Clients are served in any case, as they were meanwhile.
        """
        steps: tuple[tuple[str, Callable[[], Awaitable[None]]], ...] = (
            ("state not opened again, nothing is kept", self._resume_state),
            ("admin port not opened again", self._resume_admin),
        )
        for text, open_again in steps:
            until_s = self._services.loop.time() + RESUME_TIMEOUT_S
            while True:
                try:
                    await open_again()
                    break
                except (StateError, AdminError) as error:
                    # A process that has died may have both for a moment still.
                    if self._services.loop.time() >= until_s:
                        _log.error(text, error=str(error))
                        break
                await asyncio.sleep(RESUME_RETRY_S)

    async def _resume_state(self) -> None:
        if self._config.state.kind != "memory":
            await asyncio.to_thread(self._store.close)
            self._store.use(await asyncio.to_thread(open_store, self._config, self._bootstrap))
        self.rules.use_store(self._store)
        self._queries.resume(self._store)
        self._observer.resume(self._store)
        self._released = False

    async def _resume_admin(self) -> None:
        await self.admin.stop()
        await self.admin.start(self._bind_admin(()))

    def take_back(self) -> None:
        """Have new connections come here again: the successor that gets them hangs."""
        self.relay.take_back()

    def stopped(self) -> None:
        """Begin to stop: a successor serves."""
        self._stop.set()

    def _replace(self, predecessor: Predecessor, state: Store) -> None:
        """Get all new connections and the predecessor's state, if we could go on with that.

        Raises StateError, ListenerError, TakeOverError; then it serves on.
        """
        read_overrides(state)
        read_pauses(state)
        self._check_wanted()
        # Also where a call never returns; it says where that is.
        faulthandler.dump_traceback_later(SERVE_TIMEOUT_S, exit=True)
        self.relay.take_over()
        if not predecessor.release(SERVE_TIMEOUT_S):
            text = "the proxy to be replaced has ended by itself"
            _log.warning(text, process=predecessor.pid)

    def _check_wanted(self) -> None:
        """Raise TakeOverError when this proxy is to stop: then the predecessor must serve on."""
        if self._stop.is_set():
            raise TakeOverError("this proxy was told to stop before it took over", "start it again")

    def _bind_admin(self, beside: Collection[Address]) -> list[socket.socket]:
        """Return sockets that have the admin port, one for each address of its host."""
        bind = self._config.admin.bind
        try:
            return bind_ports(bind.host, bind.port, beside)
        except OSError as error:
            raise AdminError(f"admin.bind: {bind}: {error.strerror or error}") from None

    async def _start_admin(self, sockets: list[socket.socket]) -> None:
        """Serve operators on these sockets."""
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
            rates=self._observer.rates,
            connections=self.relay.list,
            clock_ms=clock_ms,
            audit=self.audit,
            access=access_of(self._config, self._secrets),
            limits=port_limits_of(self._config),
            tls=self._secrets.admin,
        )
        await self.admin.start(sockets)

    async def run(
        self, stop: asyncio.Event, ready: Callable[[], None], predecessor: Predecessor | None = None
    ) -> None:
        """Work until `stop` is set. Raises as `start`, or what a task of ours died of."""
        self._stop = stop
        await self.start(predecessor)
        replaceable = Replaceable(self)
        try:
            replaceable.open()
            ready()
            stopping = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait(
                (stopping, *self._tasks), return_when=asyncio.FIRST_COMPLETED
            )
            stopping.cancel()
            for task in done - {stopping}:
                task.result()
        finally:
            await replaceable.close()
            await self.stop()

    async def _use_kafka(self, rules: Iterable[Rule]) -> None:
        """Put the cluster's own quotas in force. Only after `start`."""
        await self.rules.use_kafka(rules)

    def addresses(self) -> list[Address]:
        """Return where we listen."""
        return [*self.relay.addresses(), *self.admin.addresses()]

    async def _compose(self, compose: Compose) -> ComposedRules:
        """Compose rules in a thread; one at a time, so that the event loop has its share."""
        async with self._composing:
            return await asyncio.to_thread(compose)

    async def _apply(self, config: Config, secrets: Secrets) -> None:
        """Put quotas, throttling, limits and what the files say now in force.

        And the log level of the file, whatever an operator has set.
        """
        self._use_secrets(config, secrets)
        settings = await asyncio.to_thread(lambda: config.quota_settings)
        await self.rules.use_file(settings)
        await self._kafka_quotas.follow(config.quotas.source == "kafka")
        self._bootstrap.connect_timeout_s = config.limits.connect_timeout
        self._queries.update(config.progress_settings, config.pipeline_settings)
        self._services.limits = limits_of(config)
        self._services.mode = ThrottleMode(config.throttle.mode)
        log_level.set(config.log_level)
        before, self._in_force = self._in_force, config
        was, is_now = await asyncio.to_thread(find_differences, before, config)
        if was or is_now:
            await self.audit.record(BY_FILE, "configuration", was, is_now, time.time())

    def _use_secrets(self, config: Config, secrets: Secrets) -> None:
        """Show other certificates on new connections, log in with another password, and so on."""
        login, sasl = self._bootstrap.login, config.cluster.sasl
        if secrets.tls_digest != self._secrets.tls_digest:
            for name, context in secrets.listeners.items():
                self.relay.listeners[name].use_tls(context)
            self._bootstrap.tls = secrets.upstream
            self.admin.use_tls(secrets.admin)
            if isinstance(self._store.inner, KafkaStore):
                self._store.inner.use_tls(secrets.upstream)
            _log.info("certificates renewed")
        # The password of another user waits with that user for a restart.
        if login is not None and secrets.password is not None and sasl == self._config.cluster.sasl:
            login.renew(secrets.password)
        # The texts of the tokens that there were at the start: others wait for a restart.
        self.admin.use_access(access_of(self._config, secrets))
        self._secrets = secrets
        self._show_certificates()

    @property
    def certificates(self) -> Sequence[Certificate]:
        """Those that this proxy shows to clients and brokers now."""
        return self._secrets.certificates

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
            certificates=[
                CertificateStatus(each.section, each.file, each.not_after_s)
                for each in self.certificates
            ],
        )

    def _readiness(self) -> Readiness:
        brokers, since_s = self.brokers, self.brokers.silent_since_s
        return judge(
            reachable=brokers.reachable,
            was_reachable=brokers.was_reachable,
            refusal=brokers.refusal,
            silent_s=None if since_s is None else self._services.loop.time() - since_s,
            writable=self._store.writable,
        )

    def _show_health(self) -> None:
        """Show by metrics what else only `/readyz`, the log and the state would."""
        instruments, brokers = self._services.instruments, self.brokers
        instruments.ready.set_function(lambda: self._readiness().reason is None)
        instruments.cluster_reachable.set_function(lambda: brokers.answers)
        instruments.login_refused.set_function(lambda: brokers.refusal is not None)
        instruments.state_writable.set_function(lambda: self._store.writable)
        instruments.rules_not_enforced.set_function(lambda: self.quotas.settings.observed_rules)
        loads = self.reloader.loads
        instruments.config_last_reload_successful.set_function(lambda: loads[0].result == "ok")
        for name, listener in self.relay.listeners.items():
            gauge = instruments.brokers_without_port.labels(name)
            gauge.set_function(listener.count_left_out)
        self._show_certificates()

    def _show_certificates(self) -> None:
        """Show when the certificates expire that were just loaded."""
        expiry = self._services.instruments.certificate_not_after_timestamp_seconds
        expiry.clear()
        for each in self.certificates:
            expiry.labels(each.role, each.listener).set(each.not_after_s)

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

    async def _give_memory_back(self) -> None:
        """Give memory that was freed back to the system, until cancelled."""
        memory = FreedMemory.of(ctypes.CDLL(None))
        while True:
            await asyncio.sleep(FREED_INTERVAL_S)
            memory.give_back()

    async def _end_due(self) -> None:
        """End overrides and pauses whose time has come."""
        try:
            ended = await self.rules.end_due(time.time())
        except StateError as error:
            _log.error("ended overrides or pauses are still in the state", error=str(error))
            return
        for entry in ended.overrides:
            _log.info("quota override ended", selector=selector(entry.rule.keys), by=entry.by)
        for pause in ended.pauses:
            _log.info("throttling resumed", selector=pause.name, by=pause.by)

    async def _tick(self) -> None:
        """Apply changed quotas, end throttling, add to the charts, until cancelled."""
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            await self._end_due()
            self._services.outages.sweep(clock_ms())
            self._services.rejections.sweep(clock_ms())
            self._request_times.sample(clock_ms())
            await self._slices.collect(self.quotas.settling())
            await self._slices.collect(self._services.connection_quotas.settling())
            await self._slices.collect(self.quotas.sweeping(clock_ms()))
            await self._slices.collect(self.relay.list.measuring(clock_ms()))
            if self._history.due(clock_ms()):
                await self._slices.collect(self._history.sample(clock_ms))


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
