"""The parent of a host's members: it has their ports, and serves no client itself.

While a member is down, what connects to it waits.
"""

import asyncio
import gc
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from structlog import get_logger

from proxy.config import Config
from proxy.host_ports import HostMemberSockets
from proxy.hot_restart import taking_over
from proxy.launcher.worker import BEAT_INTERVAL_S, Directive, WorkerError, WorkerHandle, run_worker
from proxy.member import Member
from proxy.relay.take_over import Predecessor
from proxy.tasks import end_tasks

START_LIMIT_S = 300.0
"""For a member to take up the state, which takes seconds where it is large."""

HAND_BACK_LIMIT_S = 30.0
"""For members to give back what a successor is to have, or to take it back."""

STOP_EXTRA_S = 30.0
"""A member that has not ended so long after `drain_timeout` is killed: it hands over its slots,
writes what is due, and drains."""

HANG_INTERVAL_S = 1.0
"""Between two looks whether members hang."""

_log = get_logger(__name__)


class Launcher:
    """Starts a member for each of `workers`. Make it inside a running event loop, as Member.

    Not uvloop's: members are forked from it, and leave its event loop behind.
    """

    def __init__(self, config: Config, path: Path, *, splice: bool = True) -> None:
        self._config, self._make_member = config, partial(Member, config, path, splice=splice)
        self.ports = HostMemberSockets(config)
        self._workers = [WorkerHandle(number) for number in range(config.worker_count)]
        self.tasks: Sequence[asyncio.Task[None]] = ()
        self._is_in_place = asyncio.Event()
        """Unset while a successor may have what members have released."""
        self._is_in_place.set()

    def reload(self) -> None:
        """Have all members load the configuration again."""
        for worker in self._workers:
            worker.send(Directive.RELOAD)

    async def start(
        self, predecessor: Predecessor | None = None, stop: asyncio.Event | None = None
    ) -> None:
        """Open every port and start all members, as `Member.start`.

        Raises ListenerError, StateError, WorkerError, TakeOverError.
        """
        try:
            async with taking_over(predecessor, self._config, self.ports, stop):
                gc.collect()
                gc.freeze()  # what is there now stays shared
                begun = map(self._begin, self._workers)
                for result in await asyncio.gather(*begun, return_exceptions=True):
                    if isinstance(result, BaseException):
                        raise result
        except BaseException:
            await self._kill_all()
            raise

    def accept(self) -> None:
        """Have all members serve."""
        for worker in self._workers:
            self._accept(worker)
        works = [*map(self._keep, self._workers), self._watch()]
        self.tasks = [asyncio.create_task(work) for work in works]

    async def stop(self) -> None:
        """Have all members hand over, drain and end, at the same time; kill those that do not."""
        await end_tasks(self.tasks)
        for worker in self._workers:
            worker.send(Directive.STOP)
        self.ports.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.limits.drain_timeout_s + STOP_EXTRA_S):
                for worker in self._workers:
                    await worker.ended.wait()
        if late := [worker.number for worker in self._workers if worker.pid is not None]:
            _log.error("killing workers that did not end", workers=late)
        await self._kill_all()

    async def release(self) -> None:
        """Have all members release what only one process can have, for a successor.

        None is started again until `resume`: it would take the place of the successor's.
        """
        self._is_in_place.clear()
        await self._ask_all(Directive.RELEASE)

    async def resume(self) -> None:
        """Have all members take back what they had released: the successor has ended."""
        await self._ask_all(Directive.RESUME)
        self._is_in_place.set()

    async def _begin(self, worker: WorkerHandle) -> None:
        """Start a member, up to where it could accept clients. Raises WorkerError."""
        sockets = self.ports.members[worker.number]
        make = partial(
            self._make_member,
            number=worker.number,
            sockets=sockets,
            restarts=worker.restarts.count,
            is_looping=worker.restarts.is_looping,
        )
        work = partial(run_worker, worker.number, make)
        own = set(sockets.all())
        not_its = [sock for sock in self.ports.sockets() if sock not in own]
        not_its += [each.channel for each in self._workers if each.channel is not None]
        await worker.fork(work, not_its)
        await worker.until_ready(START_LIMIT_S)

    def _accept(self, worker: WorkerHandle) -> None:
        worker.send(Directive.ACCEPT)
        worker.serves = True
        worker.restarts.started_s = time.monotonic()
        _log.info("worker serves", worker=worker.number, process=worker.pid)

    async def _keep(self, worker: WorkerHandle) -> None:
        """Start a member again whenever it has ended, until cancelled."""
        while True:
            await worker.ended.wait()
            restarts = worker.restarts
            was_looping = restarts.is_looping
            delay_s = restarts.crashed(time.monotonic())
            _log.error("a worker has ended, starting it again", worker=worker.number, in_s=delay_s)
            if restarts.is_looping and not was_looping:
                text = "a worker crashes again and again: others have its clients meanwhile"
                _log.error(text, worker=worker.number, fix="see above what it died of")
            await asyncio.sleep(delay_s)
            await self._is_in_place.wait()
            try:
                await self._begin(worker)
            except WorkerError as error:
                _log.error("a worker could not begin", worker=worker.number, error=str(error))
                worker.kill()
            else:
                self._accept(worker)

    async def _watch(self) -> None:
        """Kill members that hang, until cancelled."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(HANG_INTERVAL_S)
            if time.monotonic() - before_s > HANG_INTERVAL_S + BEAT_INTERVAL_S:
                # The launcher stood still, and the members may have done so with it.
                for worker in self._workers:
                    worker.heard()
            for worker in self._workers:
                if worker.serves and worker.hangs():
                    _log.error("a worker hangs and is killed", worker=worker.number)
                    worker.kill()

    async def _ask_all(self, order: Directive) -> None:
        """Have all members do something; the log says which did not."""
        asked = [each for each in self._workers if each.pid is not None]
        calls = (worker.do(order, HAND_BACK_LIMIT_S) for worker in asked)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                _log.error("a worker does not follow", error=str(result))

    async def _kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            await worker.ended.wait()
