"""Be a member that a launcher has forked: it works as it is told."""

import asyncio
import json
import os
import socket
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import structlog
import uvloop
from structlog import get_logger

from proxy.config import Config
from proxy.garbage import spare_full_collections
from proxy.launcher.worker_handle import (
    BEAT_INTERVAL_S,
    EXIT_CRASHED,
    EXIT_DONE,
    EXIT_LOST,
    Notice,
    Order,
)
from proxy.log_queue import log_queue
from proxy.member import PORT_ERRORS, Member, Place
from proxy.state import StateError
from proxy.tier.group.group_member import MembershipError

_log = get_logger(__name__)


def run_worker(
    config: Config, path: Path, place: Place, channel: socket.socket, *, splice: bool
) -> int:
    """Work until the launcher says that it is to stop; return the exit code."""
    _mark_log(place.number)
    return uvloop.run(_Worker().run(config, path, place, channel, splice=splice))


class _Worker:
    _writer: asyncio.StreamWriter
    _lost_task: asyncio.Future[asyncio.Task[None]]
    """Work that has ended and should not have."""

    async def run(
        self, config: Config, path: Path, place: Place, channel: socket.socket, *, splice: bool
    ) -> int:
        self._lost_task = asyncio.get_running_loop().create_future()
        reader, self._writer = await asyncio.open_connection(sock=channel)
        beating = asyncio.create_task(self._beat())
        try:
            member = Member(config, path, splice=splice, place=place)
            await member.start()
            return await self._obey(member, reader)
        except (*PORT_ERRORS, StateError, MembershipError, OSError) as error:
            self._send(f"{Notice.FAILED} {json.dumps(str(error))}")
            await self._writer.drain()
            return EXIT_CRASHED
        finally:
            beating.cancel()

    async def _obey(self, member: Member, reader: asyncio.StreamReader) -> int:
        self._send(Notice.READY)
        lost = self._lost_task
        while True:
            reading = asyncio.ensure_future(reader.readline())
            await asyncio.wait((reading, lost), return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                return _explain(lost.result())
            match reading.result().decode().rstrip():
                case "":
                    _log.error("the launcher has ended, so this member ends")
                    log_queue.wait_written()
                    os._exit(EXIT_LOST)  # its ports must be free
                case Order.ACCEPT:
                    spare_full_collections()
                    member.accept()
                    for task in member.tasks:
                        task.add_done_callback(self._lost)
                case Order.RELOAD:
                    member.reloader.request()
                case Order.RELEASE:
                    await member.release()
                    self._send(Notice.DONE)
                case Order.RESUME:
                    await member.resume()
                    self._send(Notice.DONE)
                case Order.STOP:
                    await member.stop()
                    return EXIT_DONE

    def _lost(self, task: asyncio.Task[None]) -> None:
        if not self._lost_task.done():
            self._lost_task.set_result(task)

    async def _beat(self) -> None:
        while True:
            self._send(Notice.BEAT)
            await asyncio.sleep(BEAT_INTERVAL_S)

    def _send(self, line: str) -> None:
        self._writer.write(f"{line}\n".encode())


def _explain(task: asyncio.Task[None]) -> int:
    """Log why the member ends; the launcher starts another one."""
    error = None if task.cancelled() else task.exception()
    if isinstance(error, StateError | MembershipError):
        _log.error("this member ends", error=str(error))
    else:
        _log.error("unexpected end of work", work=task.get_name(), exc_info=error)
    return EXIT_CRASHED


def _mark_log(number: int) -> None:
    """Have each line of the log say which worker writes it."""

    def add_worker(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["worker"] = number
        return event

    # In place: loggers that were used before have this list.
    structlog.get_config()["processors"].insert(0, add_worker)
