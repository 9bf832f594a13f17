"""Wires a member together: quotas, connections, queries, its tier, and what shows them.

What each takes of the configuration is said here: only this module knows both.
"""

import asyncio
import ctypes
import gc
import resource
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TypeVar

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry
from structlog import get_logger

from metrics import Instruments, MemberInstruments, UsageInstruments
from metrics.clock import MS_PER_SECOND, clock_ms
from metrics.exposition import OF_LOG, FigureCollector
from metrics.member_names import ONLY_MEMBER, member_name
from proxy.admin.admin_parts import AdminParts
from proxy.admin.audit import BY_FILE, AuditLog
from proxy.admin.history import History
from proxy.admin.port.admin_port import PortLimits
from proxy.admin.port.guard import Access, AdminToken, Right
from proxy.admin.request_times import RequestTimes, watch_lag
from proxy.admin.server import AdminServer
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.login import Credentials, Login
from proxy.cluster.upstream import LOGIN_REFUSED
from proxy.config import Config
from proxy.config.descriptors import share_files
from proxy.config.differences import find_differences, find_schedule_changes
from proxy.config.models import MAX_WORKERS
from proxy.config.secrets import ALL_RIGHTS, Secrets, read_secrets
from proxy.garbage import FREED_INTERVAL_S, FreedMemory, collect_frozen
from proxy.health import Health
from proxy.log_queue import log_level, log_queue
from proxy.progress.query_registry import owns_all
from proxy.progress.report import QueryScope
from proxy.queries.queries import Queries
from proxy.quota.entities import QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.meter import Meter
from proxy.quota.meters import OF_SENSORS
from proxy.quota.rule_registry import KeptChange, RuleRegistry
from proxy.quota.rules import QuotaPause, Rule
from proxy.quota.validation import selector
from proxy.relay.brokers import Brokers
from proxy.relay.clients import ClientRegistry, ClientUsage
from proxy.relay.kafka_quotas import KafkaQuotas
from proxy.relay.listener import ListenerSettings
from proxy.relay.pump import MAX_PIPES
from proxy.relay.relay import Relay
from proxy.relay.services import Limits, Reapers, Services, ThrottleMode
from proxy.release import VERSION
from proxy.slices import Slices
from proxy.state import MemoryStore, StateError, Store, WriteProbe
from proxy.tasks import end_tasks
from proxy.tier.key_rules import digest_in_force
from proxy.tier.slot_map import SlotSteering
from proxy.tier.tier_member import TierMember
from proxy.usage.observed_usage import Observed, read_observed
from proxy.usage.usage_meter import Metering, UsageMeter
from proxy.usage.usage_topic import UsageTopic, UsageWriter

STOOD_STILL_S = 1.0
"""A lag after which clients are held to their bounds by schedule: their sensors saw nothing."""

EXPIRY_INTERVAL_S = 60.0  # between two looks for idle sensors
RULES_INTERVAL_S = 0.2  # between two looks whether other rules are in force
UNREAD = "rates/"
"""Keys of records that nothing reads any more: usage is in a topic now."""

TICK_INTERVAL_S = 1.0  # between two looks for clients that are held no longer, and for the charts

THREAD_TURN_S = 0.001
"""For how long a thread that computes keeps the event loop from going on; Python's own 5 ms would
come on top of each of its rounds during a reload."""

Work = Callable[[], Coroutine[None, None, None]]
T = TypeVar("T")

_log = get_logger(__name__)


class MemberProcess:
    """One process that relays, without its ports and its store. Make it inside an event loop.

    `number` is the member's among those of its host, from 0; it was started again `restarts` times.
    `load` a store, `make_admin`, and `begin`; in the `end` connections drain. Once `audit` and
    `queries` are closed nothing is written any more, so that the store can be.
    """

    rules: RuleRegistry
    """All rules in force and where they come from. Only after `load`."""
    admin: AdminServer
    """Only after `make_admin`."""
    audit: AuditLog
    """What was changed, and by whom. Only after `load`."""

    def __init__(self, config: Config, number: int, *, restarts: int, splice: bool) -> None:
        loop = asyncio.get_running_loop()
        settings = self._settings = config.quota_settings
        log_level.set(config.log_level)
        machine = None if config.tier is None else config.tier.machine
        self.name = member_name(number, machine) if machine else ONLY_MEMBER
        self._config = self._in_force = config
        self.store = WriteProbe(MemoryStore())
        self.metrics = CollectorRegistry()
        instruments = Instruments(self.metrics, max_label_sets=config.limits.max_client_entities)
        instruments.build_info.labels(VERSION).set(1)
        self.quotas = QuotaManager(settings, instruments)
        self.quotas.on_overflow, self.quotas.on_state = _log_overflow, _log_state
        tables = (OF_SENSORS, self.quotas.figure_rows), (OF_LOG, lambda: [((), log_queue)])
        self.metrics.register(FigureCollector(tables, clock_ms, sys.maxsize))
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            self.metrics.register(collector)
        errors = instruments.upstream_errors_total
        self.secrets = read_secrets(config)
        self.bootstrap = bootstrap_of(config, self.secrets, errors.labels(LOGIN_REFUSED).inc)
        self.brokers = Brokers(self.bootstrap)
        new_usage = None if config.usage is None else self._new_usage
        self._clients = ClientRegistry(instruments.bytes_total, new_usage)
        self.quotas.on_would_throttle = self._clients.would_throttle
        self.queries = Queries(
            config.progress_settings,
            config.pipelines,
            self.quotas,
            self.bootstrap,
            instruments,
            metrics=self.metrics,
            knows_client=self._clients.knows,
            show_fetched=lambda: self.services.unshown.showing(),  # noqa: PLW0108 - made below
        )
        steering = None if machine is None else SlotSteering(self.name)
        self.services = Services(
            loop=loop,
            limits=limits_of(config),
            mode=ThrottleMode(config.throttle.mode),
            quotas=self.quotas,
            reapers=Reapers(loop, instruments),
            instruments=instruments,
            clients=self._clients,
            interceptor=self.queries.following.client,
            max_pipes=MAX_PIPES if splice else 0,
            topic_names=self.queries.following.names,
            passes_unknown_apis=config.cluster.unknown_apis == "pass",
            # No two members of a host give a connection the same number.
            numbers=count(1) if machine is None else count(MAX_WORKERS + number, MAX_WORKERS),
            steering=steering,
        )
        listeners = tuple(listeners_of(config, self.secrets, number))
        self.relay = Relay(listeners, self.brokers, self.services)
        self.tier: TierMember | None = None
        self.health = Health(
            self.relay, self.services, self.store, lambda: self.secrets.certificates
        )
        self._history = History(self.quotas.measured_rates)
        self._request_times = RequestTimes(self.services.times.by_name)
        self.slices = Slices()
        """For all long walks of this process."""
        self._metering = self._make_metering()
        self._tasks: list[asyncio.Task[None]] = []
        if steering is not None:
            # Who is new here may have had its bound at another member a moment ago.
            self.quotas.paces_new = True
            member_instruments = MemberInstruments(self.metrics)
            member_instruments.workers.set(1)
            member_instruments.worker_restarts_total.labels(str(number)).inc(restarts)
            self.tier = TierMember(
                self.name,
                config,
                self.secrets,
                self.bootstrap,
                member_instruments,
                steering=steering,
                queries=self.queries,
                lead=self.lead,
                quotas=self.quotas,
                slices=self.slices,
                relay=self.relay,
                on_shared_state=self._on_shared_state_changed,
            )
            self.store.watch_key = self.tier.watch_key

    async def load(self, store: Store) -> None:
        """Take up what the store has, and write there from now on. Raises StateError.

        Of queries and pipelines only what this member owns.
        """
        self.store.use(store)
        self.rules = RuleRegistry(
            self.quotas,
            self.store,
            self._settings,
            partial(_in_turn, asyncio.Lock()),
            partial(_in_turn, asyncio.Lock()),
            writes=self.tier is None,
            now_s=time.time(),
        )
        self.audit = AuditLog(self.store)
        self._drop_unread()
        await self._end_due()
        self._kafka_quotas = KafkaQuotas(
            KafkaClient(self.bootstrap, limit_s=None),
            self.rules.use_kafka,
            self.services.instruments.upstream_errors_total,
        )
        await self._kafka_quotas.follow(self._config.quotas.source == "kafka")
        self.queries.load(self.store, owns_all if self.tier is None else self.tier.owns)

    def make_admin(self) -> AdminServer:
        """Make what serves operators; `start` it with sockets."""
        admin = self._config.admin
        parts = AdminParts(
            metrics=self.metrics,
            member=self.name,
            readiness=self.health.readiness,
            tier=self.tier,
            client_of=self._client_of,
            quotas=self.quotas,
            rules=self.rules,
            relay=self.health.relay_status,
            history=self._history,
            request_times=self._request_times.documents,
            reports=self.queries,
            observe=None if self._config.usage is None else self._observe,
            audit=self.audit,
            connections=self.relay.list,
        )
        self.admin = AdminServer(
            admin.bind.host,
            parts,
            access=access_of(self._config, self.secrets),
            limits=PortLimits(
                share_files(self._config).admin,
                admin.max_connections_per_ip,
                admin.head_timeout,
                admin.idle_timeout,
            ),
            tls=self.secrets.admin,
        )
        return self.admin

    def begin(self, *more: Work) -> Sequence[asyncio.Task[None]]:
        """Accept clients, and start the work that goes on; return its tasks, which do not end."""
        self.health.show()
        self.relay.accept()
        works: Sequence[Work] = (
            self.brokers.monitor,
            self.store.watch,
            self._watch_lag,
            self.relay.watch_idle,
            self._kafka_quotas.watch,
            self._expire,
            self._give_memory_back,
            self._tick,
            *self.queries.works(),
            *more,
        )
        if self._metering is not None:
            works = (*works, self._metering.run)
        if self.tier is not None:
            works = (*works, self.tier.watch, self.tier.watch_loads, self._follow_rules)
        self._tasks = [asyncio.create_task(work(), name=work.__name__) for work in works]
        return self._tasks

    async def end(self) -> None:
        """Drain connections, end the work, write the last of the usage."""
        await self.relay.drain()
        await end_tasks(self._tasks)
        if self._metering is not None and self._tasks:
            await self._metering.close()
        self.services.reapers.close()

    async def reload_shared_state(self) -> None:
        """Read what another process has written that concerns all. Raises StateError."""
        await self.rules.reread()
        await self.audit.reread()

    async def lead(self, is_leader: bool) -> None:
        """Keep what concerns all from now on, or leave it to another process.

        Raises StateError when what there is cannot be read.
        """
        if is_leader == self.rules.writes:
            return
        self.rules.writes = is_leader
        await self.reload_shared_state()
        await asyncio.to_thread(self._drop_unread)

    def _drop_unread(self) -> None:
        """Delete what older versions kept, if this process writes what concerns all."""
        keys = [record.key for record in self.store.items(UNREAD)] if self.rules.writes else []
        if keys:
            with suppress(StateError):  # it is tried again at the next start
                self.store.put_many((), delete=keys)

    async def apply(self, config: Config, secrets: Secrets) -> None:
        """Put quotas, throttling, limits and what the files say now in force.

        And the log level of the file, whatever an operator has set. The audit gets what changed.
        """
        self._use_secrets(config, secrets)
        settings = await asyncio.to_thread(lambda: config.quota_settings)
        await self.rules.use_file(settings)
        await self._kafka_quotas.follow(config.quotas.source == "kafka")
        self.bootstrap.connect_timeout_s = config.limits.connect_timeout_s
        self.queries.update(config.progress_settings, config.pipelines)
        self.services.limits = limits_of(config)
        self.services.mode = ThrottleMode(config.throttle.mode)
        log_level.set(config.log_level)
        if self.tier is not None:
            self.tier.use_config(config)
        before, self._in_force = self._in_force, config
        if not self.rules.writes:
            return
        was, is_now = await asyncio.to_thread(find_differences, before, config)
        if was or is_now:
            await self.audit.record(BY_FILE, "configuration", was, is_now, time.time())

    def _use_secrets(self, config: Config, secrets: Secrets) -> None:
        """Show other certificates on new connections, log in with another password, and so on."""
        login, sasl = self.bootstrap.login, config.cluster.sasl
        if secrets.tls_digest != self.secrets.tls_digest:
            for name, context in secrets.listeners.items():
                self.relay.listeners[name].use_tls(context)
            self.bootstrap.tls = secrets.upstream
            self.admin.listening.tls = secrets.admin
            _log.info("certificates renewed")
        # The password of another user waits with that user for a restart.
        if login is not None and secrets.password is not None and sasl == self._config.cluster.sasl:
            login.renew(secrets.password)
        if self._metering is not None:
            self._metering.meter.use_key(secrets.hash_key)
        # The texts of the tokens that there were at the start: others wait for a restart.
        self.admin.guard.access = access_of(self._config, secrets)
        self.secrets = secrets
        self.health.show_certificates()

    def _new_usage(self) -> ClientUsage:
        assert self._config.usage is not None
        return ClientUsage(self.queries.following.names, self._config.usage.sample_every)

    def _make_metering(self) -> Metering | None:
        """Make what writes usage records, if they are wanted."""
        usage = self._config.usage
        if usage is None:
            return None
        bytes_total, of_clients = self.services.instruments.bytes_total, self._clients.usage
        meter = UsageMeter(
            bytes_total, of_clients, lambda: self.quotas.table, self.secrets.hash_key
        )
        topic = UsageTopic(self.bootstrap, usage.topic)
        writer = UsageWriter(topic, UsageInstruments(self.metrics), self.slices)
        alone = member_name(0, socket.gethostname().partition(".")[0])
        member = alone if self._config.tier is None else self.name
        return Metering(meter, writer, self.slices, member=member, interval_s=usage.interval)

    async def _observe(self, since_s: float) -> Observed:
        """Return what usage records say of the last so many seconds; raises as `read_observed`."""
        assert self._config.usage is not None
        since_ms = round((time.time() - since_s) * MS_PER_SECOND)
        most, topic = self._config.limits.max_client_entities, self._config.usage.topic
        return await read_observed(self.bootstrap, topic, since_ms, most, self.slices)

    def _client_of(self, query: str) -> str:
        """Return the client id of a query by its name."""
        found = (each.client_id for each in self._in_force.queries if each.name == query)
        return next(found, query)

    def _on_shared_state_changed(self) -> None:
        """Read again what concerns all: another member has written it."""
        self._reloading = asyncio.create_task(self._try_reload())

    async def _try_reload(self) -> None:
        try:
            await self.reload_shared_state()
        except StateError as error:
            _log.error("what another member has written is not read", error=str(error))

    async def _follow_rules(self) -> None:
        """Show, and give to the tier, which rules are in force here, until cancelled."""
        assert self.tier is not None
        assert self._config.tier is not None
        gauge, seen = self.services.instruments.rules_digest, -1
        while True:
            if self.quotas.generation != seen:
                seen, table = self.quotas.generation, self.quotas.table
                await self.tier.use_rules(table.rules)
                make = partial(digest_in_force, table, enforce=self.quotas.settings.enforce)
                digest = await asyncio.to_thread(make)
                gauge.clear()
                gauge.labels(self._config.tier.name, digest).set(1)
            await asyncio.sleep(RULES_INTERVAL_S)

    async def _watch_lag(self) -> None:
        """Measure the lag of the event loop, until cancelled."""
        await watch_lag(self._observe_lag, clock_ms)

    def _observe_lag(self, lag_s: float) -> None:
        """Record the lag; others may have served our clients while this process stood still."""
        self.services.instruments.event_loop_lag_seconds.observe(lag_s)
        if self.tier is not None and lag_s >= STOOD_STILL_S:
            walk = self.quotas.pace_immediately(lambda _: True, clock_ms)
            self._pacing = asyncio.create_task(self.slices.collect(walk))

    async def _expire(self) -> None:
        """Forget idle sensors and clients, until cancelled."""
        frozen = gc.get_freeze_count()
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            frozen = collect_frozen(frozen)
            await self.slices.collect(self.quotas.expiring(clock_ms()))
            await self.slices.collect(self._clients.forgetting(clock_ms()))

    async def _give_memory_back(self) -> None:
        """Give memory that was freed back to the system, until cancelled."""
        memory = FreedMemory.of(ctypes.CDLL(None))
        while True:
            await asyncio.sleep(FREED_INTERVAL_S)
            memory.give_back()

    async def _end_due(self) -> None:
        """End overrides and pauses whose time has come; begin and end what has a schedule."""
        ended, before = list[KeptChange](), self.rules.composed.of_file.scheduled
        try:
            ended = await self.rules.end_due(time.time())
        except StateError as error:
            _log.error("ended overrides or pauses are still in the state", error=str(error))
        was, is_now = find_schedule_changes(before, self.rules.composed.of_file.scheduled)
        if is_now:
            _log.info("rules changed by their schedules", rules=is_now)
            if self.rules.writes:
                await self.audit.record(BY_FILE, "schedules", was, is_now, time.time())
        for each in ended:
            if isinstance(each, QuotaPause):
                _log.info("throttling resumed", selector=each.name, by=each.by)
            else:
                _log.info("quota override ended", selector=selector(each.rule.keys), by=each.by)

    async def _tick(self) -> None:
        """Apply changed quotas, end throttling, add to the charts, until cancelled."""
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            await self._end_due()
            self.services.sweep()
            self._request_times.sample(clock_ms())
            await self.slices.collect(self.quotas.settling())
            await self.slices.collect(self.services.connection_quotas.settling())
            await self.slices.collect(self.quotas.sweeping(clock_ms()))
            await self.slices.collect(self.relay.list.measuring(clock_ms()))
            if self._history.due(clock_ms()):
                await self.slices.collect(self._history.sample(clock_ms))


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


def bootstrap_of(config: Config, secrets: Secrets, on_refused: Callable[[], None]) -> Bootstrap:
    """Make the way into the cluster; `on_refused` is called when it does not let the proxy in."""
    servers = [(server.host, server.port) for server in config.cluster.bootstrap_servers]
    sasl, login = config.cluster.sasl, None
    if sasl is not None and secrets.password is not None:
        credentials = Credentials(sasl.mechanism, sasl.username, secrets.password)
        login = Login(credentials, on_refused)
    return Bootstrap(servers, secrets.upstream, config.limits.connect_timeout_s, login)


def access_of(config: Config, secrets: Secrets) -> Access:
    """Return who may do what on the admin port."""
    admin = config.admin
    tokens = [
        AdminToken(
            each.name,
            secrets.tokens[each.name],
            tuple(map(Right, each.rights)),
            QueryScope(each.queries),
        )
        for each in admin.tokens
    ]
    if admin.token_file is not None:
        tokens.append(AdminToken(ALL_RIGHTS, secrets.tokens[ALL_RIGHTS]))
    hosts = (
        admin.bind.host,
        *map(config.named, admin.hosts),
        *(config.named(each.advertised_host) for each in config.listeners),
    )
    return Access(tokens, admin.read_needs_token, admin.open_paths, {*map(str.lower, hosts)})


def limits_of(config: Config) -> Limits:
    """Return the relay's limits, with as many connections as there are files for."""
    return replace(config.limits, max_connections=share_files(config).clients)


def listeners_of(config: Config, secrets: Secrets, number: int) -> Iterator[ListenerSettings]:
    """Yield where a member's listeners are and what they tell clients.

    `number` is the member's among those of its host, from 0: each has its part of the ports.
    """
    for listener in config.listeners:
        ports = listener.broker_ports
        share = None if ports is None else ports.share(config.worker_count, number)
        yield ListenerSettings(
            name=listener.name,
            host=listener.bind.host,
            port=listener.bind.port,
            advertised_host=config.named(listener.advertised_host),
            broker_ports=None if share is None else (share.first, share.last),
            tls=secrets.listeners.get(listener.name),
            sni=config.named(listener.sni) if listener.sni else None,
        )


def prepare_process() -> None:
    """Give threads short turns, and open as many files as the system allows."""
    sys.setswitchinterval(THREAD_TURN_S)
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
