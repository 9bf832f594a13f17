"""One member: it opens ports and state, joins its tier, is replaced, and ends."""

import asyncio
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from structlog import get_logger

from proxy.admin.server import AdminError, AdminServer
from proxy.cluster.upstream import Address
from proxy.config import Config
from proxy.config.check_report import find_start_hints
from proxy.config.models import HIDE_PASSWORD
from proxy.config.reload import Reloader
from proxy.config.stores import FormerOwner, open_store
from proxy.debt_records import KeptDebts
from proxy.hot_restart import HotRestart, bind_admin
from proxy.relay.ports import ListenerError, close_all
from proxy.relay.take_over import Predecessor
from proxy.state import StateError, Store
from proxy.wiring import MemberProcess, prepare_process

PORT_ERRORS = (ListenerError, AdminError)
"""What `Member.start` raises for a port that cannot be opened."""

SETTLED_S = 30.0
"""A member that has lived for so long after a crash loop has come out of it."""

RESUME_TIMEOUT_S, RESUME_RETRY_S = 5.0, 0.1
"""How long, and how often, a proxy tries to take back what a successor had that died."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchedAs:
    """What a launcher gives to one of the members of its host."""

    number: int
    """From 0."""
    listeners: Mapping[str, Mapping[int | None, socket.socket]]
    """Sockets by the names of listeners, and by broker, as `Listener.use` takes them."""
    admin: Sequence[socket.socket]
    """Of the port that is asked for all; the members of a host accept on the same sockets."""
    own_admin: Sequence[socket.socket]
    """Where other members ask this one."""
    restarts: int = 0
    """How often the member was started again."""
    is_looping: bool = False
    """Whether it has crashed again and again: others are to have its clients for now."""
    is_successor: bool = False
    """Whether the process before may still have its place in the tier."""

    @property
    def sockets(self) -> list[socket.socket]:
        """All of them."""
        of_listeners = [sock for each in self.listeners.values() for sock in each.values()]
        return [*of_listeners, *self.admin, *self.own_admin]


class Member:
    """One member. Make it inside a running event loop, `start` it, have it `accept`.

    `launched` is what a launcher gives; a member without opens its ports itself.
    """

    def __init__(
        self, config: Config, path: Path, *, splice: bool = True, launched: LaunchedAs | None = None
    ) -> None:
        self._config, self._launched = config, launched
        number, restarts = (0, 0) if launched is None else (launched.number, launched.restarts)
        self._parts = parts = MemberProcess(config, number, restarts=restarts, splice=splice)
        self._store = parts.store
        self._debts = KeptDebts(config.state.kind, parts.quotas, parts.slices)
        self._reloader = Reloader(path, config, parts.apply, parts.health.record_load)
        self.reload, self.take_back = self._reloader.request, parts.relay.ports.take_back
        self.tasks: Sequence[asyncio.Task[None]] = ()
        """The work that goes on and does not end, after `accept`."""
        self._released = False
        """Whether a successor may have the state."""

    async def start(
        self, predecessor: Predecessor | None = None, stop: asyncio.Event | None = None
    ) -> None:
        """Open every port and the state, and join the tier; clients wait until `accept`.

        `predecessor` is a proxy to replace. Its ports are shared, and what it has in its state is
        read; only then it is told to release that, which is waited for. New connections wait
        meanwhile; none is refused. When all is open it is told to stop. If that takes longer than
        SERVE_TIMEOUT_S, this process is ended. It is not replaced once `stop` is set.
        Raises ListenerError, AdminError, StateError, TakeOverError, MembershipError.
        """
        prepare_process()
        launched, relay, tier = self._launched, self._parts.relay, self._parts.tier
        hot_restart = HotRestart(predecessor, relay.ports.take_over, stop)
        admin: list[socket.socket] = []
        site: AdminServer | None = None
        try:
            if launched is None:
                log_hints(self._config)
                relay.open(hot_restart.sharing_ports_with)
                admin += bind_admin(self._config.admin.bind, hot_restart.sharing_ports_with or ())
            else:
                relay.use(launched.listeners)
            store = await asyncio.to_thread(self._open_store, hot_restart.state_owner)
            await self._parts.load(store)
            await self._debts.take(self._store)
            site = self._parts.make_admin()
            await site.start(admin or self._admin_sockets())
            if tier is not None:
                tier.is_settling = launched is not None and launched.is_looping
                tier.is_successor |= launched is not None and launched.is_successor
                await tier.join(self._parts.admin.port)
                if tier.is_settling:
                    asyncio.get_running_loop().call_later(SETTLED_S, tier.settled)
            self._share_admin_port()
            hot_restart.complete()
        except BaseException:
            if tier is not None:
                await tier.leave(for_successor=True)
            await relay.close()
            if site is not None:
                await site.stop()
            await asyncio.to_thread(self._store.close)
            close_all(admin)
            raise
        if launched is None:
            _log.info("admin", port=self._parts.admin.port)

    def accept(self) -> None:
        """Begin to work."""
        self.tasks = self._parts.begin(self._reloader.watch, self._debts.run)

    async def stop(self) -> None:
        """Drain, then close everything; first what another process may wait for."""
        try:
            if self._parts.tier is not None:
                await self._parts.tier.leave(for_successor=False)
            if not self._released:
                await self.release()
            # A successor may have given this back, and not the state.
            await self._parts.admin.stop()
        finally:
            await self._parts.end()

    async def release(self) -> None:
        """Close admin port and state, for a successor; all is written by then."""
        if self._parts.tier is not None:
            await self._parts.tier.leave(for_successor=True)
        await self._parts.admin.stop()
        await self._debts.close()
        await self._parts.audit.close()
        await self._parts.queries.close()
        if self._config.state.kind != "memory":  # nobody else can have that
            await asyncio.to_thread(self._store.close)
        self._parts.audit.resume(self._store)  # in memory, until there is a state again
        self._released = True

    async def resume(self) -> None:
        """Open state and admin port again: the successor has died, or given up.

        Where that fails the log says so. Clients are served in any case, as they were meanwhile.
        """
        loop = asyncio.get_running_loop()
        for text, open_again in (
            ("state not opened again, nothing is kept", self._resume_state),
            ("admin port not opened again", self._resume_admin),
            ("tier not joined again", self._rejoin),
        ):
            until_s = loop.time() + RESUME_TIMEOUT_S
            while True:
                try:
                    await open_again()
                    break
                except (StateError, AdminError) as error:
                    # A process that has died may have both for a moment still.
                    if loop.time() >= until_s:
                        _log.error(text, error=str(error))
                        break
                await asyncio.sleep(RESUME_RETRY_S)

    def addresses(self) -> Iterable[Address]:
        """Return where we listen."""
        return [*self._parts.relay.ports.addresses(), *self._parts.admin.listening.addresses]

    def _admin_sockets(self) -> list[socket.socket]:
        """Return sockets for the admin port that may be closed, as those of the launcher stay."""
        if self._launched is None:
            return bind_admin(self._config.admin.bind)
        return [sock.dup() for sock in self._launched.own_admin]

    def _share_admin_port(self) -> None:
        """Answer for all at the port of the host, where the members that can do so accept."""
        if self._launched is not None:
            self._parts.admin.listening.serve([sock.dup() for sock in self._launched.admin])

    def _open_store(self, owner: FormerOwner | None) -> Store:
        if self._parts.tier is not None:
            return self._parts.tier.open_store(owner)
        return open_store(self._config, self._parts.bootstrap, owner)

    async def _resume_state(self) -> None:
        if self._config.state.kind != "memory":
            await asyncio.to_thread(self._store.close)
            self._store.use(await asyncio.to_thread(self._open_store, None))
        await self._parts.rules.use_store(self._store)
        self._parts.queries.resume(self._store)
        await self._debts.take(self._store)
        self._released = False

    async def _resume_admin(self) -> None:
        await self._parts.admin.stop()
        await self._parts.admin.start(self._admin_sockets())

    async def _rejoin(self) -> None:
        if self._parts.tier is not None:
            await self._parts.tier.join(self._parts.admin.port)
        self._share_admin_port()


def log_hints(config: Config) -> None:
    """Log what the author of a configuration should know of."""
    if config.cluster.shows_password:
        text = "the password of cluster.sasl goes to the brokers in the clear"
        _log.warning(text, fix=HIDE_PASSWORD)
    for hint in find_start_hints(config):
        _log.warning("configuration hint", hint=hint)
