"""The parent of the workers: it has ports, state and admin port, and serves no client itself."""

import asyncio
import pickle
import shutil
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter
from structlog import get_logger

from metrics import DroppedLogLines, MemberInstruments
from proxy.app import log_hints
from proxy.cluster.upstream import Address
from proxy.config import Config
from proxy.config.reload import LoadAttempt, LoadLog, Reloader
from proxy.config.secrets import Secrets, read_secrets
from proxy.debt_records import KeptDebts
from proxy.log_queue import log_queue
from proxy.member import prepare_process
from proxy.parts import access_of, bootstrap_of
from proxy.quota.debts import Debt
from proxy.relay.relay import log_listening
from proxy.relay.take_over import Predecessor
from proxy.state import MemoryStore, WatchedStore
from proxy.succession import Succession, bind_admin, reopen, serve_until
from proxy.workers.control_channel import ChannelLostError, Handler
from proxy.workers.machine_gateway import make_gateway
from proxy.workers.machine_ports import MachinePorts
from proxy.workers.machine_slots import MachineSlots
from proxy.workers.nursery import Nursery, NurseryLostError
from proxy.workers.post import CALL_LIMIT_S, Post, WorkerError, call_all
from proxy.workers.slot_sharing import SlotSharing
from proxy.workers.state_server import StateServer
from proxy.workers.tier_slots import TierSlots
from proxy.workers.upkeep import Upkeep

START_LIMIT_S = 300.0
"""For a worker to take up the state, which takes seconds where it is large."""

RELOAD_LIMIT_S = 300.0
"""For workers to put another configuration in force."""

GIVE_BACK_LIMIT_S = 15.0
"""To give back what others are to have when this machine stops: slots, and what is not written
yet. The state is closed after that, and connections drain."""

LEAST_RELEASE_S = 1.0
"""For workers to write what is due, however long the slots took."""

DRAIN_EXTRA_S = 5.0
"""A worker that has not ended so long after `drain_timeout` is killed."""

WORKER_ERRORS = (WorkerError, NurseryLostError, ChannelLostError)
"""What `Supervisor.start` raises for a worker that cannot begin."""

_log = get_logger(__name__)


class Supervisor:
    """One machine. Make it inside a running event loop, and `run` it."""

    def __init__(
        self, config: Config, path: Path, nursery: Nursery, *, splice: bool = True
    ) -> None:
        self._config = self._in_force = config
        self._nursery = nursery
        self._splice = splice
        self._secrets = read_secrets(config)
        self._way = bootstrap_of(config, self._secrets, lambda: None)
        self._store = WatchedStore(MemoryStore())
        self._state = StateServer(self._store)
        self._debts = KeptDebts(config.state.kind, self._owed)
        self._ports = MachinePorts(config)
        self._folder = Path(tempfile.mkdtemp(prefix="quota-proxy-"))
        self._posts = [
            Post(number, self._folder, None if config.tier is None else config.tier.machine)
            for number in range(config.worker_count)
        ]
        registry = CollectorRegistry()
        self._metrics = MemberInstruments(registry)
        registry.register(DroppedLogLines(lambda: log_queue.dropped))
        self._sharing = self._share(config)
        self._store.watch_key = self._sharing.watch_key
        self._gateway = make_gateway(
            config, self._secrets, self._posts, self._metrics, self._sharing
        )
        self._brokers: dict[int, Address] = {}
        """Of which a worker has heard."""
        uncounted = Counter(
            "config_reloads", "Counted by the first worker.", ["result"], registry=None
        )
        self._loads = LoadLog(uncounted, self._tell_load)
        self.reloader = Reloader(path, config, self._apply, self._loads)
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._released = False
        """Whether a successor may have the state."""
        self._metrics.workers.set_function(lambda: sum(post.serves for post in self._posts))
        self._upkeep = Upkeep(
            self._posts, self._ports, self._metrics, self._serve_again, self._sharing.changed
        )

    def _share(self, config: Config) -> SlotSharing:
        if config.tier is None:
            return MachineSlots(config, self._way, self._posts, self._ports, self._metrics)
        parts = self._secrets, self._way, self._posts, self._ports, self._metrics
        return TierSlots(config, *parts)

    async def start(self, predecessor: Predecessor | None = None) -> None:
        """Open every port and have all workers serve, as `App.start`.

        Raises as that, and WorkerError, NurseryLostError.
        """
        prepare_process()
        log_hints(self._config)
        succession = Succession(predecessor, self._ports.take_over, self._stop)
        admin = []
        try:
            self._ports.open(succession.beside)
            for each in self._ports.bootstrap_ports():
                log_listening(*each)
            admin += bind_admin(self._config, succession.beside or ())
            holder = succession.holder
            self._store.use(await asyncio.to_thread(self._sharing.open_store, holder))
            debts = await self._debts.read(self._store)
            for post in self._posts:
                post.debts.keep(debts)
            await _all(self._begin(post) for post in self._posts)
            await self._gateway.start(admin)
            await self._sharing.join(self._gateway.port)
            succession.complete()
        except BaseException:
            await self._sharing.leave(for_successor=False)
            await self._gateway.stop()
            await self._kill_all()
            await asyncio.to_thread(self._store.close)
            self._ports.close()
            for sock in admin:
                sock.close()
            raise
        _log.info("admin", port=self._gateway.port)
        await _all(self._accept(post) for post in self._posts)
        works = (
            *(work() for work in self._sharing.works()),
            self.reloader.watch(),
            self._store.watch(),
            self._watch_nursery(),
            self._debts.run(),
            *self._upkeep.works(),
        )
        self._tasks = [asyncio.create_task(work) for work in works]

    async def run(
        self, stop: asyncio.Event, ready: Callable[[], None], predecessor: Predecessor | None = None
    ) -> None:
        """Work until `stop` is set. Raises as `start`, or what a task of ours died of."""
        self._stop = stop
        try:
            await self.start(predecessor)
            await serve_until(stop, ready, self, self._tasks)
        finally:
            self._nursery.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    async def stop(self) -> None:
        """Have all workers drain at the same time, and end."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + GIVE_BACK_LIMIT_S
        try:
            await self._sharing.leave(for_successor=False)
            if not self._released:
                await self.release(max(LEAST_RELEASE_S, until_s - loop.time()))
            await self._gateway.stop()  # a successor may have given this back, and not the state
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._drain()

    async def release(self, limit_s: float = CALL_LIMIT_S) -> None:
        """Close admin port and state, for a successor; all is written by then.

        What a worker has not written within `limit_s` is lost, as in a crash.
        """
        await self._sharing.leave(for_successor=True)
        await self._gateway.stop()
        await self._debts.close()
        await self._ask_all("release", limit_s)
        if self._config.state.kind != "memory":  # nobody else can have that
            await asyncio.to_thread(self._store.close)
        self._released = True

    async def resume(self) -> None:
        """Open state and admin port again: the successor has died, or given up."""
        await reopen(
            (
                ("state not opened again, nothing is kept", self._resume_state),
                ("admin port not opened again", self._resume_admin),
                ("tier not joined again", self._rejoin),
            )
        )

    async def _resume_state(self) -> None:
        if self._config.state.kind != "memory":
            await asyncio.to_thread(self._store.close)
            self._store.use(await asyncio.to_thread(self._sharing.open_store, None))
        await self._debts.read(self._store)
        await self._ask_all("resume")
        self._released = False

    async def _rejoin(self) -> None:
        await self._sharing.join(self._gateway.port)

    async def _resume_admin(self) -> None:
        await self._gateway.stop()
        await self._gateway.start(bind_admin(self._config, ()))

    def take_back(self) -> None:
        """Have new connections come here again: the successor that gets them hangs."""
        self._ports.take_back()

    def stopped(self) -> None:
        """Begin to stop: a successor serves."""
        self._stop.set()

    def addresses(self) -> Iterable[Address]:
        """Return where each of our sockets listens."""
        return [*self._ports.addresses(), *self._gateway.addresses()]

    async def _begin(self, post: Post) -> None:
        """Start a worker, up to where it could accept clients.

        Raises WorkerError, NurseryLostError, ChannelLostError.
        """
        handlers: Mapping[str, Handler] = {
            "learned": self._learned,
            "ports": partial(self._found_ports, post),
            "rules": self._sharing.use_rules,
            "visits": self._sharing.pass_visits,
            "debts": post.debts.tell,
            "common_changed": partial(self._common_changed, post),
            "loads": partial(self._sharing.take_loads, post.name),
        }
        sockets = self._ports.of(post.number)
        async with self._sharing.begin() as shares:
            layout = await post.make(self._nursery, sockets, handlers, self._state)
            await post.call(
                "start",
                START_LIMIT_S,
                number=post.number,
                name=post.name,
                config=pack_config(self._config),
                in_force=pack_config(self._in_force),
                **shares,
                owed=[debt.document() for debt in post.debts.left()],
                layout=layout,
                admin_path=str(post.admin_path),
                splice=self._splice,
                loads=[(load.at_s, load.result, load.message) for load in self._loads.latest],
            )
        for node_id, (host, port) in self._brokers.items():
            post.tell("learn", node_id=node_id, host=host, port=port)

    async def _serve_again(self, post: Post) -> None:
        """Start a worker that has ended. Raises as `_begin`."""
        await self._begin(post)
        await self._accept(post)
        self._sharing.serves_again()

    async def _accept(self, post: Post) -> None:
        """Have a worker accept clients. Raises as `_begin`."""
        await post.call("accept")
        post.serves = True
        assert post.process is not None
        _log.info("worker serves", worker=post.number, process=post.process.pid)
        post.restarts.started(time.monotonic())

    async def _owed(self) -> list[Debt]:
        return [debt for post in self._posts for debt in post.debts.left()]

    async def _watch_nursery(self) -> None:
        """Raise NurseryLostError when no worker can be made any more."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._nursery.handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._nursery.handle)
        raise NurseryLostError("the process that makes workers has ended, and they with it")

    def _common_changed(self, by: Post) -> None:
        """Have the other workers read what concerns all again; other machines see it written."""
        for post in self._posts:
            if post is not by:
                post.tell("reread")

    def _learned(self, node_id: int, host: str, port: int) -> None:
        """Announce a broker's address to all workers: each needs that, and a port for it."""
        if self._brokers.get(node_id) != (host, port):
            self._brokers[node_id] = host, port
            for post in self._posts:
                post.tell("learn", node_id=node_id, host=host, port=port)

    def _found_ports(self, post: Post, node_id: int, found: Mapping[str, int]) -> None:
        """Announce to all workers ports that one has opened by itself."""
        before = {name: ports.get(node_id) for name, ports in post.found.items()}
        for listener, port in found.items():
            post.found.setdefault(listener, {})[node_id] = port
        if any(before.get(listener) != port for listener, port in found.items()):
            self._sharing.changed()

    def _tell_load(self, load: LoadAttempt) -> None:
        for post in self._posts:
            post.tell("loaded", at_s=load.at_s, result=load.result, message=load.message)

    async def _apply(self, config: Config, secrets: Secrets) -> None:
        """Put another configuration in force, in all workers."""
        if secrets.tls_digest != self._secrets.tls_digest:
            self._way.tls = secrets.upstream
        login, sasl = self._way.login, config.cluster.sasl
        if login is not None and secrets.password is not None and sasl == self._config.cluster.sasl:
            login.renew(secrets.password)
        self._way.connect_timeout_s = config.limits.connect_timeout
        self._gateway.use_access(access_of(self._config, secrets))
        self._gateway.use_tls(secrets.admin)
        self._secrets, self._in_force = secrets, config
        await call_all(self._posts, "reload", RELOAD_LIMIT_S, config=pack_config(config))
        self._sharing.use_config(config)

    async def _ask_all(self, method: str, limit_s: float = CALL_LIMIT_S) -> None:
        """Have all workers do something; the log says which did not."""
        try:
            await call_all(self._posts, method, limit_s)
        except WorkerError as error:
            _log.error("a worker does not follow", error=str(error))

    async def _drain(self) -> None:
        """Have all workers let their connections go and end; kill those that do not."""
        await self._ask_all("stop_accepting")
        self._ports.close()
        limit_s = self._in_force.limits.drain_timeout + DRAIN_EXTRA_S
        draining = [
            asyncio.create_task(post.call("drain", limit_s)) for post in self._posts if post.process
        ]
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                for post in self._posts:
                    await post.ended.wait()
        for task in draining:
            task.cancel()
        await asyncio.gather(*draining, return_exceptions=True)
        if late := [post.number for post in self._posts if post.process is not None]:
            _log.error("killing workers that did not end", workers=late)
        await self._kill_all()

    async def _kill_all(self) -> None:
        for post in self._posts:
            post.kill()
        for post in self._posts:
            await post.ended.wait()


def pack_config(config: Config) -> str:
    """Return a configuration as a worker reads it."""
    return b64encode(pickle.dumps(config)).decode()


async def _all(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Run these at the same time; raise what the first of them raises when all are done."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
