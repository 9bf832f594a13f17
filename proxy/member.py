"""One member: its parts, its ports and its state, its place in a tier, its end."""

import asyncio
import ctypes
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry
from structlog import get_logger

from metrics import Instruments, MemberInstruments, UsageInstruments
from metrics.clock import MS_PER_SECOND, clock_ms
from metrics.exposition import OF_LOG, MetricTableCollector
from metrics.member_names import ONLY_MEMBER, member_name
from proxy.admin.admin_parts import AdminParts
from proxy.admin.audit import BY_FILE, AuditLog
from proxy.admin.history import RateHistory
from proxy.admin.request_times import RecentKafkaApiTimes, watch_loop_lag
from proxy.admin.server import AdminServer
from proxy.cluster.kafka_client import KafkaClient
from proxy.cluster.upstream import LOGIN_REFUSED
from proxy.config import Config
from proxy.config.check_report import find_startup_hints
from proxy.config.descriptors import share_descriptors
from proxy.config.differences import find_differences, find_in_force_changes
from proxy.config.models import HIDE_PASSWORD, MAX_WORKERS
from proxy.config.reload import Reloader
from proxy.config.secrets import ALL_RIGHTS, Secrets, read_secrets
from proxy.config.stores import open_store
from proxy.debt_records import DebtWriter
from proxy.garbage import FREED_INTERVAL_S, FrozenGarbage, MemoryTrimmer
from proxy.health import Health
from proxy.host_ports import HostMemberSockets, MemberSockets
from proxy.hot_restart import taking_over
from proxy.log_queue import log_level, log_queue
from proxy.progress.query_registry import owns_all
from proxy.queries.queries import Queries
from proxy.quota.entities import QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.meter import Meter
from proxy.quota.meters import OF_SENSORS
from proxy.quota.rule_registry import KeptChange, RuleRegistry
from proxy.quota.rules import QuotaPause, Rule
from proxy.relay.brokers import BrokerConnector
from proxy.relay.clients import ClientRegistry, ClientUsage
from proxy.relay.intercept_queue import InterceptQueue
from proxy.relay.kafka_quotas import KafkaQuotaPoller
from proxy.relay.ports import refuse_all
from proxy.relay.pump import MAX_PIPES
from proxy.relay.relay import Relay
from proxy.relay.services import Reapers, Services
from proxy.relay.take_over import Predecessor
from proxy.release import VERSION
from proxy.slices import TimeSlicer
from proxy.state import MemoryStore, ProbedStore, StateError, Store
from proxy.tasks import end_tasks
from proxy.tier.key_rules import digest_in_force
from proxy.tier.slot_map import SlotSteering
from proxy.tier.tier_member import TierMember
from proxy.usage.observed_usage import ObservedUsage, read_observed
from proxy.usage.usage_meter import UsageMeter, UsageRecorder
from proxy.usage.usage_topic import UsageTopic, UsageWriter
from proxy.wiring import access_of, bootstrap_of, limits_of, listener_settings_of

STOOD_STILL_S = 1.0
"""A lag after which clients are held to their bounds by schedule: their sensors saw nothing."""

EXPIRY_INTERVAL_S = 60.0  # between two looks for idle sensors
RULES_INTERVAL_S = 0.2  # between two looks whether other rules are in force
TICK_INTERVAL_S = 1.0  # between two looks for clients that are held no longer, and for the charts

Work = Callable[[], Coroutine[None, None, None]]
T = TypeVar("T")

SETTLED_S = 30.0
"""A member that has lived for so long after a crash loop has come out of it."""

JOIN_AGAIN_S = 1.0
"""Between two tries to join the tier again, each of which waits for the brokers besides."""

_log = get_logger(__name__)


class Member:
    """One member. Make it inside a running event loop, `start` it, have it `accept`.

    A launcher gives `number`, from 0, and `sockets`; a member without opens its ports itself. It
    was started again for `restarts` times, and where it `is_looping` it crashes again and again:
    others are to have its clients for now.
    """

    def __init__(
        self,
        config: Config,
        path: Path,
        *,
        splice: bool = True,
        number: int = 0,
        sockets: MemberSockets | None = None,
        restarts: int = 0,
        is_looping: bool = False,
    ) -> None:
        self._given = sockets
        loop = asyncio.get_running_loop()
        log_level.set(config.log_level)
        machine = None if config.tier is None else config.tier.machine
        self._name = member_name(number, machine) if machine else ONLY_MEMBER
        self._config = self._in_force = config
        self._store = ProbedStore(MemoryStore())
        self._metrics = CollectorRegistry()
        instruments = Instruments(self._metrics, max_label_sets=config.limits.max_client_entities)
        instruments.build_info.labels(VERSION).set(1)
        self._quotas = QuotaManager(config.quota_settings, instruments)
        self._quotas.on_overflow, self._quotas.on_state = _log_overflow, _log_state
        tables = (OF_SENSORS, self._quotas.metric_rows), (OF_LOG, lambda: [((), log_queue)])
        self._metrics.register(MetricTableCollector(tables, clock_ms, sys.maxsize))
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            self._metrics.register(collector)
        errors = instruments.upstream_errors_total
        self._secrets = read_secrets(config)
        self._bootstrap = bootstrap_of(config, self._secrets, errors.labels(LOGIN_REFUSED).inc)
        self._brokers = BrokerConnector(self._bootstrap)
        self._clients = ClientRegistry(
            instruments.bytes_total, None if config.usage is None else self._new_usage
        )
        self._quotas.on_would_throttle = self._clients.would_throttle
        self._queries = Queries(
            config.progress_settings,
            config.pipelines,
            self._quotas,
            self._bootstrap,
            instruments,
            metrics=self._metrics,
            knows_client=self._clients.knows,
            unshown=InterceptQueue(loop.call_later),
        )
        steering = None if machine is None else SlotSteering(self._name)
        self._services = Services(
            loop=loop,
            limits=limits_of(config),
            holds=config.throttle.holds,
            quotas=self._quotas,
            reapers=Reapers(loop, instruments),
            instruments=instruments,
            clients=self._clients,
            interceptor=self._queries.following.client,
            unshown=self._queries.following.unshown,
            max_pipes=MAX_PIPES if splice else 0,
            topic_names=self._queries.following.names,
            passes_unknown_apis=config.cluster.unknown_apis == "pass",
            # No two members of a host give a connection the same number.
            numbers=count(1) if machine is None else count(MAX_WORKERS + number, MAX_WORKERS),
            steering=steering,
        )
        listeners = tuple(listener_settings_of(config, self._secrets))
        self._relay = Relay(listeners, self._brokers, self._services)
        self._tier: TierMember | None = None
        self._health = Health(
            self._relay, self._services, self._store, lambda: self._secrets.certificates
        )
        self._history = RateHistory(self._quotas.measured_rates)
        self._request_times = RecentKafkaApiTimes(self._services.times)
        self._slices = TimeSlicer()
        """For all long walks of this process."""
        self._metering = self._make_metering()
        self._debts = DebtWriter(config.state.kind, self._quotas, self._slices)
        self._reloader = Reloader(path, config, self._apply, self._health.record_load)
        self.reload = self._reloader.request
        self.ports = HostMemberSockets(config)
        """Of the host where this member is alone; else only those that it opens for brokers."""
        self.tasks: Sequence[asyncio.Task[None]] = ()
        """The work that goes on and does not end, after `accept`."""
        self._released = False
        """Whether a successor may have the state."""
        self._rejoining: list[asyncio.Task[None]] = []
        """What joins the tier again."""
        self._opening = asyncio.Lock()
        """Held while a thread opens the state for that."""
        if steering is not None:
            self._tier = self._make_tier(config, steering, number, restarts)
            self._tier.is_settling = is_looping
            self._store.watch_key = self._tier.watch_key

    async def start(
        self, predecessor: Predecessor | None = None, stop: asyncio.Event | None = None
    ) -> None:
        """Open every port and the state, and join the tier; clients wait until `accept`.

        A `predecessor` is replaced as `taking_over` does it.
        Raises ListenerError, StateError, TakeOverError, MembershipError.
        """
        if self._given is not None:
            self._sockets = self._given
            await self._open()
            return
        async with taking_over(predecessor, self._config, self.ports, stop):
            (self._sockets,) = self.ports.members
            await self._open()
            if predecessor is not None and self._tier is None:
                self._pace_new_clients()

    async def _open(self) -> None:
        """Open the state and what answers at the ports, and join the tier."""
        relay, tier = self._relay, self._tier
        site: AdminServer | None = None
        try:
            relay.use(self._sockets.listeners, self.ports)
            await self._load(await asyncio.to_thread(self._open_store))
            await self._debts.take(self._store)
            site = self._make_admin()
            await self._open_admin()
            if tier is not None:
                await tier.join(self._admin.port)
                if tier.is_settling:
                    asyncio.get_running_loop().call_later(SETTLED_S, tier.settled)
            self._share_admin_port()
        except BaseException:
            if tier is not None:
                await tier.leave(for_successor=True)
            await relay.close()
            self.ports.close()
            if site is not None:
                await site.stop()
            await asyncio.to_thread(self._store.close)
            raise

    def _pace_new_clients(self) -> None:
        """Give nobody credit for a while who may have had its bound at the predecessor till now."""
        quotas = self._quotas
        quotas.paces_new = True
        span_s = quotas.settings.span_ms / MS_PER_SECOND
        asyncio.get_running_loop().call_later(span_s, setattr, quotas, "paces_new", False)

    def accept(self) -> None:
        """Accept clients, and start the work that goes on, which does not end."""
        self._relay.accept()
        works: Sequence[Work] = (
            self._brokers.monitor,
            self._store.watch,
            self._watch_lag,
            self._relay.watch_idle,
            self._kafka_quotas.watch,
            self._expire,
            self._give_memory_back,
            self._tick,
            *self._queries.works(),
            self._reloader.watch,
            self._debts.run,
        )
        if self._metering is not None:
            works = (*works, self._metering.run)
        if self._tier is not None:
            works = (*works, self._tier.watch, self._tier.watch_loads, self._follow_rules)
        self.tasks = [asyncio.create_task(work(), name=work.__name__) for work in works]

    async def stop(self) -> None:
        """Drain, then close everything; first what another process may wait for."""
        try:
            await end_tasks(self._rejoining)
            if self._tier is not None:
                await self._tier.leave(for_successor=False)
            if not self._released:
                await self.release()
            # A successor may have given this back, and not the state.
            await self._admin.stop()
        finally:
            self._relay.stop_accepting()
            self.ports.close()
            await self._relay.drain()
            await end_tasks(self.tasks)
            if self._metering is not None and self.tasks:
                await self._metering.close()

    async def release(self) -> None:
        """Close admin port and state, for a successor; all is written by then."""
        async with self._opening:  # which a thread does that cannot be ended
            await end_tasks(self._rejoining)
        if self._tier is not None:
            await self._tier.leave(for_successor=True)
        await self._admin.stop()
        # A launcher has the port, too, and one that the system has chosen would not stay.
        if self._given is None and self._config.admin.bind.port:
            refuse_all(self._sockets.own_admin)
        await self._debts.close()
        await self._queries.close()
        if self._config.state.kind != "memory":  # nobody else can have that
            await asyncio.to_thread(self._store.close)
        self._released = True

    async def resume(self) -> None:
        """Open state and admin port again: the successor has died, or given up.

        Where the state cannot be opened the log says so. Clients are served in any case, as they
        were meanwhile. A tier is joined behind that, which is tried until it works.
        """
        try:
            await self._resume_state()
        except StateError as error:
            _log.error("state not opened again, nothing is kept", error=str(error))
        await self._admin.stop()
        await self._open_admin()
        self._share_admin_port()
        if self._tier is not None:
            self._rejoining = [asyncio.create_task(self._rejoin(self._tier))]
            self._rejoining[0].add_done_callback(self._tier.ended)

    async def _load(self, store: Store) -> None:
        """Take up what the store has, and write there from now on. Raises StateError.

        Of queries and pipelines only what this member owns.
        """
        self._store.use(store)
        self._rules = RuleRegistry(
            self._quotas,
            self._store,
            self._quotas.settings,
            partial(_in_turn, asyncio.Lock()),
            partial(_in_turn, asyncio.Lock()),
            writes=self._tier is None,
            now_s=time.time(),
        )
        self._audit = AuditLog(self._store)
        await self._end_due()
        self._kafka_quotas = KafkaQuotaPoller(
            KafkaClient(self._bootstrap, limit_s=None),
            self._rules.use_kafka,
            self._services.instruments.upstream_errors_total,
        )
        await self._kafka_quotas.follow(self._config.quotas.source == "kafka")
        self._queries.load(self._store, owns_all if self._tier is None else self._tier.owns)

    def _make_tier(
        self, config: Config, steering: SlotSteering, number: int, restarts: int
    ) -> TierMember:
        # Who is new here may have had its bound at another member a moment ago.
        self._quotas.paces_new = True
        metrics = MemberInstruments(self._metrics)
        metrics.workers.set(1)
        metrics.worker_restarts_total.labels(str(number)).inc(restarts)
        return TierMember(
            self._name,
            config,
            self._secrets,
            self._bootstrap,
            metrics,
            steering=steering,
            queries=self._queries,
            lead=self._lead,
            quotas=self._quotas,
            slices=self._slices,
            relay=self._relay,
            on_shared_state=self._on_shared_state_changed,
        )

    def _make_admin(self) -> AdminServer:
        """Make what serves operators; `start` it with sockets."""
        parts = AdminParts(
            metrics=self._metrics,
            member=self._name,
            readiness=self._health.readiness,
            tier=self._tier,
            quotas=self._quotas,
            rules=self._rules,
            relay=self._health.relay_status,
            history=self._history,
            request_times=self._request_times.documents,
            reports=self._queries,
            observe=None if self._config.usage is None else self._observe,
            audit=self._audit,
            connections=self._relay.list,
        )
        self._services.instruments.ready.set_function(lambda: parts.problems()[0] is None)
        most = {"max_connections": share_descriptors(self._config).admin}
        self._admin = AdminServer(
            self._config.admin.model_copy(update=most),
            parts,
            access=access_of(self._config, self._secrets),
            tls=self._secrets.admin,
        )
        return self._admin

    async def _open_admin(self) -> None:
        """Answer at this member's own admin port, which stays open when the server stops."""
        await self._admin.start([sock.dup() for sock in self._sockets.own_admin])

    def _share_admin_port(self) -> None:
        """Answer for all at the port of the host, where the members that can do so accept."""
        self._admin.listening.serve([sock.dup() for sock in self._sockets.shared_admin])

    def _open_store(self) -> Store:
        if self._tier is not None:
            return self._tier.open_store()
        return open_store(self._config, self._bootstrap)

    async def _resume_state(self) -> None:
        if self._config.state.kind != "memory":
            await asyncio.to_thread(self._store.close)
            self._store.use(await asyncio.to_thread(self._open_store))
        await self._rules.use_store(self._store)
        self._queries.resume(self._store)
        await self._debts.take(self._store)
        self._released = False

    async def _rejoin(self, tier: TierMember) -> None:
        """Open the state, if that has failed, and join the tier, as soon as the brokers let us."""
        while True:
            try:
                async with self._opening:
                    if self._released:
                        await self._resume_state()
                return await tier.join(self._admin.port)
            except StateError as error:
                _log.error("tier not joined again", error=str(error))
                await tier.leave(for_successor=True)
            await asyncio.sleep(JOIN_AGAIN_S)

    async def _reload_shared_state(self, failing: str) -> None:
        """Read what another process has written that concerns all, or log what is failing."""
        try:
            await self._rules.reread()
            await self._audit.reread()
        except StateError as error:
            _log.error(failing, error=str(error))

    async def _lead(self, is_leader: bool) -> None:
        """Keep what concerns all from now on, or leave it to another process."""
        if is_leader != self._rules.writes:
            self._rules.writes = is_leader
            await self._reload_shared_state("what concerns all members is not read")

    async def _apply(self, config: Config, secrets: Secrets) -> None:
        """Put quotas, throttling, limits and what the files say now in force.

        And the log level of the file, whatever an operator has set. The audit gets what changed.
        """
        self._use_secrets(config, secrets)
        settings = await asyncio.to_thread(lambda: config.quota_settings)
        await self._rules.use_file(settings)
        await self._kafka_quotas.follow(config.quotas.source == "kafka")
        self._bootstrap.connect_timeout_s = config.limits.connect_timeout_s
        self._queries.update(config.progress_settings, config.pipelines)
        self._services.limits = limits_of(config)
        self._services.holds = config.throttle.holds
        log_level.set(config.log_level)
        if self._tier is not None:
            self._tier.use_config(config)
        before, self._in_force = self._in_force, config
        if not self._rules.writes:
            return
        was, is_now = await asyncio.to_thread(find_differences, before, config)
        if was or is_now:
            await self._audit.record(BY_FILE, "configuration", was, is_now, time.time())

    def _use_secrets(self, config: Config, secrets: Secrets) -> None:
        """Show other certificates on new connections, log in with another password, and so on."""
        login, sasl = self._bootstrap.login, config.cluster.sasl
        if secrets.tls_digest != self._secrets.tls_digest:
            for name, context in secrets.listeners.items():
                self._relay.listeners[name].use_tls(context)
            self._bootstrap.tls = secrets.upstream
            self._admin.listening.tls = secrets.admin
            if self._tier is not None:
                self._tier.client.tls = secrets.peers
            _log.info("certificates renewed")
        # The password of another user waits with that user for a restart.
        if login is not None and secrets.password is not None and sasl == self._config.cluster.sasl:
            login.renew(secrets.password)
        if self._metering is not None:
            self._metering.meter.hash_key = secrets.hash_key
        # The texts of the tokens that there were at the start: others wait for a restart.
        self._admin.guard.access = access_of(self._config, secrets)
        if self._tier is not None:
            self._tier.client.token = secrets.tokens.get(ALL_RIGHTS)
        self._secrets = secrets
        self._health.show_certificates()

    def _new_usage(self) -> ClientUsage:
        assert self._config.usage is not None
        return ClientUsage(self._queries.following.names, self._config.usage.sample_every)

    def _make_metering(self) -> UsageRecorder | None:
        """Make what writes usage records, if they are wanted."""
        usage = self._config.usage
        if usage is None:
            return None
        bytes_total, of_clients = self._services.instruments.bytes_total, self._clients.usage
        meter = UsageMeter(
            *(bytes_total, of_clients, lambda: self._quotas.table, self._secrets.hash_key),
            showing=self._services.unshown.showing,
        )
        topic = UsageTopic(self._bootstrap, usage.topic)
        writer = UsageWriter(topic, UsageInstruments(self._metrics))
        alone = member_name(0, socket.gethostname().partition(".")[0])
        member = alone if self._config.tier is None else self._name
        return UsageRecorder(meter, writer, self._slices, member=member, interval_s=usage.interval)

    async def _observe(self, since_s: float) -> ObservedUsage:
        """Return what usage records say of the last so many seconds; raises as `read_observed`."""
        assert self._config.usage is not None
        since_ms = round((time.time() - since_s) * MS_PER_SECOND)
        most, topic = self._config.limits.max_client_entities, self._config.usage.topic
        return await read_observed(self._bootstrap, topic, since_ms, most, self._slices)

    def _on_shared_state_changed(self) -> None:
        """Read again what concerns all: another member has written it."""
        reloading = self._reload_shared_state("what another member has written is not read")
        self._reloading = asyncio.create_task(reloading)

    async def _follow_rules(self) -> None:
        """Show, and give to the tier, which rules are in force here, until cancelled."""
        assert self._tier is not None
        assert self._config.tier is not None
        gauge, seen = self._services.instruments.rules_digest, -1
        while True:
            if self._quotas.generation != seen:
                seen, table = self._quotas.generation, self._quotas.table
                await self._tier.use_rules(table.rules)
                make = partial(digest_in_force, table, enforce=self._quotas.settings.enforce)
                digest = await asyncio.to_thread(make)
                gauge.clear()
                gauge.labels(self._config.tier.name, digest).set(1)
            await asyncio.sleep(RULES_INTERVAL_S)

    async def _watch_lag(self) -> None:
        """Measure the lag of the event loop, until cancelled."""
        await watch_loop_lag(self._observe_lag, clock_ms)

    def _observe_lag(self, lag_s: float) -> None:
        """Record the lag; others may have served our clients while this process stood still."""
        self._services.instruments.event_loop_lag_seconds.observe(lag_s)
        if self._tier is not None and lag_s >= STOOD_STILL_S:
            self._queries.running.lost_sight()
            walk = self._quotas.pace_immediately(lambda _: True, clock_ms)
            self._pacing = asyncio.create_task(self._slices.collect(walk))

    async def _expire(self) -> None:
        """Forget idle sensors and clients, until cancelled."""
        garbage = FrozenGarbage()
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            garbage.collect()
            await self._slices.collect(self._quotas.expiring(clock_ms()))
            await self._slices.collect(self._clients.forgetting(clock_ms()))

    async def _give_memory_back(self) -> None:
        """Give memory that was freed back to the system, until cancelled."""
        memory = MemoryTrimmer(ctypes.CDLL(None))
        while True:
            await asyncio.sleep(FREED_INTERVAL_S)
            memory.give_back()

    async def _end_due(self) -> None:
        """End overrides and pauses whose time has come; begin and end what has a schedule."""
        ended, before = list[KeptChange](), self._rules.composed.of_file.scheduled
        try:
            ended = await self._rules.end_due(time.time())
        except StateError as error:
            _log.error("ended overrides or pauses are still in the state", error=str(error))
        was, is_now = find_in_force_changes(before, self._rules.composed.of_file.scheduled)
        if is_now:
            _log.info("rules changed by their schedules", rules=is_now)
            if self._rules.writes:
                await self._audit.record(BY_FILE, "schedules", was, is_now, time.time())
        for each in ended:
            if isinstance(each, QuotaPause):
                _log.info("throttling resumed", selector=each.name, by=each.by)
            else:
                _log.info("quota override ended", selector=each.rule.selector, by=each.by)

    async def _tick(self) -> None:
        """Apply changed quotas, end throttling, add to the charts, until cancelled."""
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            await self._end_due()
            self._services.sweep()
            self._request_times.sample(clock_ms())
            await self._slices.collect(self._quotas.settling())
            await self._slices.collect(self._services.connection_quotas.settling())
            await self._slices.collect(self._quotas.sweeping(clock_ms()))
            await self._slices.collect(self._relay.list.measuring(clock_ms()))
            await self._slices.collect(self._history.sample(clock_ms))


async def _in_turn(lock: asyncio.Lock, work: Callable[[], T]) -> T:
    """Return what a thread makes, one at a time: so the event loop has its share.

    A write of rules may need this event loop, for the state to get its place back.
    """
    async with lock:
        return await asyncio.to_thread(work)


def _log_overflow(rule: Rule, kind: QuotaKind) -> None:
    text = "too many clients for sensors of their own: further ones share one"
    fix = "raise limits.max_client_entities"
    _log.warning(text, rule=rule.title, quota=str(kind), fix=fix)


def _log_state(meter: Meter, begins: bool, now_ms: float) -> None:
    text = "throttling began" if begins else "throttling ended"
    about = {"client": meter.entity, "quota": str(meter.kind), "rule": meter.rule.title}
    rate, bound = meter.rate.measure(now_ms), meter.shown_bound
    _log.info(text, **about, rate=round(rate), bound=round(bound))


def log_hints(config: Config) -> None:
    """Log what the author of a configuration should know of."""
    if config.cluster.shows_password:
        text = "the password of cluster.sasl goes to the brokers in the clear"
        _log.warning(text, fix=HIDE_PASSWORD)
    for hint in find_startup_hints(config):
        _log.warning("configuration hint", hint=hint)
