"""One proxy in one process: its ports, its state, and how it begins, is replaced and ends."""

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry
from structlog import get_logger

from metrics.clock import clock_ms
from proxy.admin.server import AdminError, AdminServer
from proxy.cluster.upstream import Address
from proxy.config import Config
from proxy.config.check_report import find_start_hints
from proxy.config.models import HIDE_PASSWORD
from proxy.config.reload import Reloader
from proxy.config.secrets import Secrets
from proxy.config.stores import open_store
from proxy.debt_records import LEAST_KEPT_MS, KeptDebts
from proxy.member import MemberProcess, prepare_process
from proxy.parts import listener_of
from proxy.quota.manager import QuotaManager
from proxy.relay.listener import ListenerSettings
from proxy.relay.ports import ListenerError
from proxy.relay.take_over import Predecessor, TakeOverError
from proxy.succession import Succession, bind_admin, reopen, serve_until

PORT_ERRORS = (ListenerError, AdminError)
"""What `App.start` raises for a port that cannot be opened."""

_log = get_logger(__name__)


class App:
    """One proxy. Make it inside a running event loop; `run` it, or `start` and `stop` it."""

    def __init__(self, config: Config, path: Path, *, splice: bool = True) -> None:
        self._config = config
        self._member = MemberProcess(config, partial(listeners_of, config), splice=splice)
        self._store = self._member.store
        owed = partial(self._member.owed, LEAST_KEPT_MS)
        self._debts = KeptDebts(config.state.kind, owed)
        self.relay = self._member.relay
        self.reloader = Reloader(path, config, self._apply, self._member.loads)
        self._tasks: Sequence[asyncio.Task[None]] = ()
        self._stop = asyncio.Event()
        self._released = False
        """Whether a successor may have the state."""

    @property
    def admin(self) -> AdminServer:
        """What serves operators. Only after `start`."""
        return self._member.admin

    @property
    def quotas(self) -> QuotaManager:
        """All quotas in force."""
        return self._member.quotas

    @property
    def metrics(self) -> CollectorRegistry:
        """All metrics of the process."""
        return self._member.metrics

    async def start(self, predecessor: Predecessor | None = None) -> None:
        """Open every port and begin to work.

        `predecessor` is a proxy to replace. Its ports are shared, and what it has in its state is
        read; only then it is told to release that, which is waited for. New connections wait
        meanwhile; none is refused. When all is open it is told to stop. If that takes longer than
        SERVE_TIMEOUT_S, this process is ended.
        Raises ListenerError, AdminError, StateError, TakeOverError.
        """
        prepare_process()
        log_hints(self._config)
        succession = Succession(predecessor, self.relay.take_over, self._stop)
        self.relay.open(succession.beside)
        admin: list[socket.socket] = []
        try:
            admin += bind_admin(self._config, succession.beside or ())
            way, holder = self._member.bootstrap, succession.holder
            await self._member.load(await asyncio.to_thread(open_store, self._config, way, holder))
            await self._take_debts()
            await self._member.make_admin().start(admin)
        except BaseException:
            await self.relay.close()
            self._store.close()
            for sock in admin:
                sock.close()
            raise
        try:
            succession.complete()
        except TakeOverError:
            await self.release()
            await self.relay.close()
            raise
        _log.info("admin", port=self.admin.port)
        self._tasks = self._member.begin(self.reloader.watch, self._debts.run)

    async def stop(self) -> None:
        """Drain, then close everything; first what another process may wait for."""
        try:
            if not self._released:
                await self.release()
            await self.admin.stop()  # a successor may have given this back, and not the state
        finally:
            await self._member.end()

    async def release(self) -> None:
        """Close admin port and state, for a successor; all is written by then."""
        await self.admin.stop()
        await self._debts.close()
        await self._member.release()
        if self._config.state.kind != "memory":  # nobody else can have that
            await asyncio.to_thread(self._store.close)
        self._member.keep_changes()
        self._released = True

    async def resume(self) -> None:
        """Open state and admin port again: the successor has died, or given up.

        Where that fails the log says so. Clients are served in any case, as they were meanwhile.
        """
        await reopen(
            (
                ("state not opened again, nothing is kept", self._resume_state),
                ("admin port not opened again", self._resume_admin),
            )
        )

    async def _resume_state(self) -> None:
        if self._config.state.kind != "memory":
            await asyncio.to_thread(self._store.close)
            way = self._member.bootstrap
            self._store.use(await asyncio.to_thread(open_store, self._config, way))
        self._member.resume()
        await self._take_debts()
        self._released = False

    async def _take_debts(self) -> None:
        """Have clients owe what they did where another process served them."""
        debts = await self._debts.read(self._store)
        self._member.quotas.shared.take_debts(debts, clock_ms())

    async def _resume_admin(self) -> None:
        await self.admin.stop()
        await self.admin.start(bind_admin(self._config, ()))

    def take_back(self) -> None:
        """Have new connections come here again: the successor that gets them hangs."""
        self.relay.take_back()

    def stopped(self) -> None:
        """Begin to stop: a successor serves."""
        self._stop.set()

    async def run(
        self, stop: asyncio.Event, ready: Callable[[], None], predecessor: Predecessor | None = None
    ) -> None:
        """Work until `stop` is set. Raises as `start`, or what a task of ours died of."""
        self._stop = stop
        await self.start(predecessor)
        await serve_until(stop, ready, self, self._tasks)

    def addresses(self) -> Iterable[Address]:
        """Return where we listen."""
        return [*self.relay.addresses(), *self.admin.addresses()]

    async def _apply(self, config: Config, secrets: Secrets) -> None:
        """Put another configuration in force."""
        await self._member.apply(config, secrets)
        await self._member.record_change(config)


def listeners_of(config: Config, secrets: Secrets) -> Sequence[ListenerSettings]:
    """Return where the listeners of one process are."""
    return [listener_of(config, each, secrets) for each in config.listeners]


def log_hints(config: Config) -> None:
    """Log what the author of a configuration should know of."""
    if config.cluster.shows_password:
        text = "the password of cluster.sasl goes to the brokers in the clear"
        _log.warning(text, fix=HIDE_PASSWORD)
    for hint in find_start_hints(config):
        _log.warning("configuration hint", hint=hint)
