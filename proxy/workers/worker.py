"""What a worker does: it relays, as the supervisor tells it."""

import asyncio
import os
import pickle
import socket
from base64 import b64decode
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import structlog
from structlog import get_logger

from metrics.clock import clock_ms
from proxy.admin.rates.observed_rates import RateShare
from proxy.config import Config
from proxy.config.reload import LoadAttempt
from proxy.config.secrets import Secrets, read_secrets
from proxy.config.worker_ports import share_of
from proxy.config.workers import MAX_WORKERS
from proxy.debt_records import LEAST_KEPT_MS
from proxy.garbage import spare_full_collections
from proxy.log_queue import log_queue
from proxy.member import MemberProcess
from proxy.members.member_names import machine_of
from proxy.members.quota_keys import QuotaKeys
from proxy.members.slot_map import SlotMap
from proxy.members.slots import slot_of
from proxy.parts import listener_of
from proxy.quota.debts import Debt
from proxy.relay.listener import ListenerSettings
from proxy.relay.stay import MIN_VISIT_S
from proxy.state.watched import WATCH_KEY
from proxy.workers.control_channel import ControlChannel
from proxy.workers.key_rules import KeyRules, rules_text
from proxy.workers.load_reports import LoadReports
from proxy.workers.machine_store import MachineStore, SocketTransport
from proxy.workers.nursery import EXIT_CRASHED
from proxy.workers.post import FIRST_WORKER
from proxy.workers.shared_keys import OwnedBoth, SlotOwns, debt_row, read_debt
from proxy.workers.slot_steering import SlotSteering
from proxy.workers.tier_store import COMMON_SLOT, WATCH, slot_key
from proxy.workers.told_debts import TOLD_INTERVAL_S
from proxy.workers.visit_exchanges import VisitExchanges
from proxy.workers.visits import EXCHANGE_INTERVAL_S, VisitLog

EXIT_DONE, EXIT_LOST = 0, 3

_log = get_logger(__name__)


class Worker:
    """One worker, from its start to its end. Make it inside an event loop, and `run` it."""

    _member: MemberProcess
    _steering: SlotSteering
    _exchanges: VisitExchanges
    _number: int
    _name: str
    _config: Config

    def __init__(
        self, control: socket.socket, state: socket.socket, sockets: Sequence[socket.socket]
    ) -> None:
        self._state = SocketTransport(state)
        """Stays open: a store that is closed for a successor may be opened again."""
        self._sockets = sockets
        self._closing: asyncio.TimerHandle | None = None
        """Closes what still waits for a cluster that cannot be reached."""
        self._made_keys: tuple[str, QuotaKeys] | None = None
        """The latest keys, and what they were made of."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._channel = ControlChannel(
            control,
            {
                "start": self._start,
                "accept": self._accept,
                "ping": _answer,
                "let_go": self._let_go,
                "take_up": self._take_up,
                "show": self._show,
                "cut_off": self._cut_off,
                "visited": self._visited,
                "learn": self._learn,
                "reload": self._reload,
                "loaded": self._loaded,
                "reread": self._reread,
                "release": self._release,
                "resume": self._resume,
                "stop_accepting": self._stop_accepting,
                "drain": self._drain,
            },
        )

    async def run(self) -> int:
        """Work until the supervisor has it drain; return the exit code.

        When the supervisor has gone, this ends at once: its ports must be free.
        """
        await self._channel.open()
        channel = asyncio.create_task(self._channel.run(), name="control")
        channel.add_done_callback(lambda _: self._end(EXIT_LOST))
        code = await self._ended
        if code == EXIT_LOST:
            _log.error("the supervisor has ended, so this worker ends")
            log_queue.wait_written()
            os._exit(code)
        return code

    def _end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    async def _start(
        self,
        *,
        number: int,
        name: str,
        config: str,
        in_force: str,
        slot_map: Mapping[str, Any],
        shown: Mapping[str, Any] | None,
        keys: str,
        owed: Sequence[Mapping[str, Any]],
        layout: Sequence[tuple[str, int | None]],
        admin_path: str,
        splice: bool,
        loads: Sequence[tuple[float, str, str]],
    ) -> None:
        """Load everything and open the admin server; clients wait until `_accept`.

        `layout` says for which listener and broker each of the sockets is. `config` is that of the
        machine's start, `in_force` that of the latest load. Clients are sent on by the map
        `shown`, by default `slot_map`. Raises StateError, AdminError.
        """
        _mark_log(number)
        self._number, self._name = number, name
        self._config = read_config(config)
        self._owns = self._next_owns = await self._owned(slot_map, keys)
        visits = VisitLog()
        self._steering = SlotSteering(
            name,
            self._owns.slot_map if shown is None else SlotMap.of(shown),
            self._owns.keys.key_of,
            on_learned=lambda node_id, host, port: self._channel.notify(
                "learned", node_id=node_id, host=host, port=port
            ),
            on_visit=visits.add,
        )
        self._member = MemberProcess(
            self._config,
            self._listeners,
            splice=splice,
            steering=self._steering,
            numbers=count(MAX_WORKERS + number, MAX_WORKERS),
            writes=(writes := self._leads(self._owns.slot_map)),
            on_written=lambda: self._channel.notify("common_changed"),
            rate_share=RateShare(number, self._config.worker_count),
            name=name,
        )
        self._exchanges = VisitExchanges(
            visits, self._channel, self._member.quotas.shared, self._steering
        )
        self._member.quotas.paces_new = True
        self._member.store.watch_key = self._watch_key
        self._member.keep_rates(writes or not machine_of(name))
        by_listener: dict[str, dict[int | None, socket.socket]] = {}
        for (listener, node_id), sock in zip(layout, self._sockets, strict=True):
            by_listener.setdefault(listener, {})[node_id] = sock
        self._member.relay.use(by_listener)
        await self._member.load(MachineStore(self._state), self._owns)
        self._member.quotas.shared.take_debts(map(Debt.of, owed), clock_ms())
        await self._member.make_admin().start_at(Path(admin_path))
        if in_force != config:
            now = read_config(in_force)
            await self._member.apply(now, await asyncio.to_thread(read_secrets, self._config))
        self._member.loads.latest.clear()
        for load in reversed(loads):
            self._member.loads.add(LoadAttempt(*load))

    def _listeners(self, secrets: Secrets) -> Sequence[ListenerSettings]:
        found = []
        for section in self._config.listeners:
            settings = listener_of(self._config, section, secrets)
            if section.broker_ports is not None:
                share = share_of(section.broker_ports, self._config.worker_count, self._number)
                settings = replace(settings, broker_ports=(share.first, share.last))
            found.append(settings)
        return found

    def _accept(self) -> None:
        """Begin to accept clients."""
        spare_full_collections()
        tell = partial(self._channel.notify, "loads")
        tier = "" if self._config.tier is None else self._config.tier.name
        reports = LoadReports(self._member, tier, lambda: self._owns.keys, tell)
        for task in self._member.begin(self._exchange, self._tell_debts, reports.run):
            task.add_done_callback(self._lost_task)

    def _lost_task(self, task: asyncio.Task[None]) -> None:
        """End when work has ended that should not: the supervisor starts another worker."""
        if not task.cancelled() and not self._ended.done():
            _log.error("unexpected end of work", work=task.get_name(), exc_info=task.exception())
            self._end(EXIT_CRASHED)

    async def _owned(self, slot_map: Mapping[str, Any], keys: str) -> SlotOwns:
        """Return what this worker owns by a map and the rules of keys."""
        if self._made_keys is None or self._made_keys[0] != keys:
            made = await asyncio.to_thread(lambda: KeyRules.read(keys).keys())
            self._made_keys = keys, made
        return SlotOwns(self._name, SlotMap.of(slot_map), self._made_keys[1])

    async def _let_go(self, slot_map: Mapping[str, Any], keys: str) -> list[Any]:
        """Write and forget what another worker has from now on; return what its clients owe."""
        before, self._next_owns = self._owns, await self._owned(slot_map, keys)
        if not self._leads(self._next_owns.slot_map):
            await self._member.write_for_all(False)
        await self._member.queries.let_go(owns=OwnedBoth(before, self._next_owns))
        after = self._next_owns
        debts = self._member.quotas.shared.debts(
            lambda client: before.has(client) and not after.has(client), clock_ms()
        )
        return [debt_row(debt) for debt in debts]

    async def _take_up(
        self, owed: Sequence[Sequence[Any]], shown: Mapping[str, Any] | None
    ) -> None:
        """Take up what this worker owns from now on, and send the other clients on."""
        self._owns = owns = self._next_owns
        debts = [debt for debt in map(read_debt, owed) if owns.has(debt.identity)]
        self._member.quotas.shared.take_debts(debts, clock_ms())
        try:
            await self._member.queries.take_up(self._member.store, owns=owns)
        finally:
            told = owns.slot_map if shown is None else SlotMap.of(shown)
            await self._steer(told, owns.keys)
            await self._member.write_for_all(self._leads(owns.slot_map))

    async def _show(self, shown: Mapping[str, Any]) -> None:
        """Send clients on by another map; what this worker owns stays as it is."""
        await self._steer(SlotMap.of(shown), self._owns.keys)

    async def _steer(self, told: SlotMap, keys: QuotaKeys) -> None:
        """Send clients on by this map; who comes to this worker with it gets no more than one."""
        gained = self._steering.use(told, keys.key_of)
        if gained:
            walk = self._member.quotas.shared.keep_strictly(
                lambda client: slot_of(keys.key_of(client)) in gained, clock_ms
            )
            await self._member.slices.collect(walk)

    def _cut_off(self, *, is_cut_off: bool) -> None:
        """Follow whether this machine has lost its place in the tier.

        Its clients are let go then. Those that wait for the cluster would do so until they give
        up by themselves, so they have no longer than in the drain of a machine that stops.
        """
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        if is_cut_off:
            limit_s = MIN_VISIT_S + self._member.services.limits.drain_timeout_s
            loop = asyncio.get_running_loop()
            self._closing = loop.call_later(limit_s, self._close_waiting)

    def _close_waiting(self) -> None:
        self._member.relay.close_draining()
        self._cut_off(is_cut_off=True)  # others may come meanwhile

    def _leads(self, slot_map: SlotMap) -> bool:
        """Return whether this worker writes what concerns all by a map."""
        if not machine_of(self._name):
            return self._number == FIRST_WORKER
        return slot_map.owners[COMMON_SLOT] == self._name

    def _watch_key(self) -> str | None:
        """Return the key of a record that this worker may always write, if there is one."""
        if not machine_of(self._name):
            return WATCH_KEY
        slots = self._owns.slot_map.slots_of(self._name)
        return slot_key(WATCH, min(slots)) if slots else None

    async def _visited(self, visits: Sequence[Sequence[Any]]) -> list[list[Any]]:
        return await self._exchanges.charge(visits)

    async def _exchange(self) -> None:
        """Report visits to owners, and rules in force to the supervisor, until cancelled."""
        told_of = -1
        while True:
            quotas = self._member.quotas
            if self._number == FIRST_WORKER and quotas.generation != told_of:
                told_of = quotas.generation
                rules = await asyncio.to_thread(rules_text, quotas.table.rules)
                self._channel.notify("rules", rules=rules)
            self._exchanges.tell()
            await asyncio.sleep(EXCHANGE_INTERVAL_S)

    async def _tell_debts(self) -> None:
        """Report what our clients owe, until cancelled: a crash is to forgive none of it."""
        had_some = False
        while True:
            await asyncio.sleep(TOLD_INTERVAL_S)
            debts = await self._member.owed(LEAST_KEPT_MS, self._owns.has)
            if debts or had_some:
                self._channel.notify("debts", owed=[debt.document() for debt in debts])
            had_some = bool(debts)

    def _learn(self, node_id: int, host: str, port: int) -> None:
        """Record a broker that another worker has heard of, and announce a port for it."""
        self._steering.told(node_id, host, port)
        self._member.relay.learn(node_id, host, port)
        found = {
            name: address[1]
            for name, listener in self._member.relay.listeners.items()
            if listener.settings.broker_ports == (0, 0)
            and listener.settings.sni is None
            and (address := listener.address_of(node_id)) is not None
        }
        if found:
            self._channel.notify("ports", node_id=node_id, found=found)

    async def _reload(self, config: str) -> None:
        """Put another configuration in force."""
        now = await asyncio.to_thread(read_config, config)
        await self._member.apply(now, await asyncio.to_thread(read_secrets, self._config))
        if self._member.writes:
            await self._member.record_change(now)

    def _loaded(self, at_s: float, result: str, message: str) -> None:
        """Remember a load, which the first worker counts for all."""
        if self._number == FIRST_WORKER:
            self._member.loads.record(result, message)
        else:
            self._member.loads.add(LoadAttempt(at_s, result, message))

    async def _reread(self) -> None:
        """Put overrides and pauses in force as another worker has just written them."""
        await self._member.reread()

    async def _release(self) -> None:
        await self._member.release()
        self._member.store.close()
        self._member.keep_changes()

    def _resume(self) -> None:
        self._member.store.use(MachineStore(self._state))
        self._member.resume()

    def _stop_accepting(self) -> None:
        self._member.relay.stop_accepting()

    async def _drain(self) -> None:
        """Drain connections, then end."""
        await self._member.admin.stop()
        await self._member.end()
        asyncio.get_running_loop().call_later(0, self._end, EXIT_DONE)


def read_config(text: str) -> Config:
    """Return a configuration that the supervisor has packed."""
    config = pickle.loads(b64decode(text))
    assert isinstance(config, Config)
    return config


def _answer() -> None:
    """Show that the event loop runs."""


def _mark_log(number: int) -> None:
    """Have each line of the log say which worker writes it."""

    def add_worker(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["worker"] = number
        return event

    # In place: loggers that were used before have this list.
    structlog.get_config()["processors"].insert(0, add_worker)
