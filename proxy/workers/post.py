"""The place of one worker, in which one process after the other works."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from proxy.members.member_names import member_name
from proxy.workers.control_channel import (
    CallFailedError,
    ChannelLostError,
    ControlChannel,
    Handler,
)
from proxy.workers.machine_ports import Sockets
from proxy.workers.nursery import Nursery, Process, send_sockets
from proxy.workers.restarts import Restarts
from proxy.workers.state_server import StateServer
from proxy.workers.told_debts import ToldDebts

CALL_LIMIT_S = 30.0
"""For what takes a worker no time that one would notice."""

FIRST_WORKER = 0
"""Number of the worker that writes what concerns all; in a tier the owner of its slot does."""

SEND_LIMIT_S = 10.0
"""For the sockets to reach a new process."""


class WorkerError(Exception):
    """A worker cannot begin, or cannot do what it is asked for."""


class Post:
    """One worker. Its admin server is at `admin_path`; in a tier its machine is in its name."""

    def __init__(self, number: int, folder: Path, machine: str | None = None) -> None:
        self.number = number
        self.name = member_name(number, machine)
        self.admin_path = folder / f"worker-{number}"
        self.restarts = Restarts()
        self.serves = False
        """Whether it is ready for clients."""
        self.debts = ToldDebts()
        """What its clients owe."""
        self.found: dict[str, dict[int, int]] = {}
        """Ports that it opened by itself, by listener and broker."""
        self.process: Process | None = None
        self.ended = asyncio.Event()
        """Set while there is no process."""
        self.ended.set()
        self._channel: ControlChannel | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def make(
        self,
        nursery: Nursery,
        sockets: Mapping[str, Sockets],
        handlers: Mapping[str, Handler],
        state: StateServer,
    ) -> list[tuple[str, int | None]]:
        """Make a process, and give it its sockets; return for what each of them is.

        Raises NurseryLostError, WorkerError.
        """
        loop = asyncio.get_running_loop()
        self.process = process = nursery.make()
        self.ended.clear()
        loop.add_reader(process.handle, self._has_ended, process)
        layout = [(name, node_id) for name, each in sockets.items() for node_id in each]
        listed = [sock for each in sockets.values() for sock in each.values()]
        process.control.settimeout(SEND_LIMIT_S)
        try:
            await asyncio.to_thread(send_sockets, process.control, listed)
        except OSError as error:
            raise WorkerError(f"worker {self.number} does not take its sockets: {error}") from None
        self._channel = ControlChannel(process.control, handlers)
        await self._channel.open()
        self._tasks = [
            asyncio.create_task(self._channel.run(), name="control"),
        ]
        Thread(
            target=state.serve, args=(process.state,), name=f"state-{self.number}", daemon=True
        ).start()
        return layout

    async def call(self, method: str, limit_s: float = CALL_LIMIT_S, **params: Any) -> Any:
        """Have it do something. Raises WorkerError; one that has gone is ChannelLostError."""
        if self._channel is None:
            raise ChannelLostError("it is not there")
        try:
            return await self._channel.call(method, limit_s, **params)
        except CallFailedError as error:
            raise WorkerError(f"worker {self.number}: {error}") from None
        except TimeoutError:
            text = f"worker {self.number} does not answer to {method} within {limit_s:g} s"
            raise WorkerError(text) from None

    def tell(self, method: str, **params: Any) -> None:
        """Send it a notice, if it is there."""
        if self._channel is not None:
            with suppress(ChannelLostError):
                self._channel.notify(method, **params)

    def kill(self) -> None:
        """End its process at once; `ended` is set a moment later."""
        if self.process is not None:
            self.process.kill()

    def _has_ended(self, process: Process) -> None:
        asyncio.get_running_loop().remove_reader(process.handle)
        self.serves = False
        if self._channel is not None:
            self._channel.close()
        else:
            process.control.close()
        for task in self._tasks:
            task.cancel()
        self._channel, self._tasks, self.process = None, [], None
        process.close()
        self.ended.set()


def looping(posts: Sequence[Post]) -> list[str]:
    """Return the names of workers that crash again and again."""
    return [post.name for post in posts if post.restarts.is_looping]


async def call_all(posts: Sequence[Post], method: str, limit_s: float, **params: Any) -> None:
    """Have all workers that are there do something at the same time. Raises WorkerError."""
    calls = (post.call(method, limit_s, **params) for post in posts)
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, ChannelLostError):
            raise result
