"""Be a member that a launcher has forked: it works as it is told."""

import asyncio
import json
import os
import socket
from collections.abc import Callable, MutableMapping
from functools import partial
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
from proxy.member import PORT_ERRORS, LaunchedAs, Member
from proxy.state import StateError
from proxy.tier.group.group_member import MembershipError

_log = get_logger(__name__)


def run_worker(
    config: Config, path: Path, launched: LaunchedAs, channel: socket.socket, *, splice: bool
) -> int:
    """Work until the launcher says that it is to stop; return the exit code."""
    # In place: loggers that were used before have this list.
    structlog.get_config()["processors"].insert(0, partial(_add_worker, launched.number))
    return uvloop.run(_run(config, path, launched, channel, splice=splice))


async def _run(
    config: Config, path: Path, launched: LaunchedAs, channel: socket.socket, *, splice: bool
) -> int:
    reader, writer = await asyncio.open_connection(sock=channel)

    def send(line: str) -> None:
        writer.write(f"{line}\n".encode())

    async def beat() -> None:
        while True:
            send(Notice.BEAT)
            await asyncio.sleep(BEAT_INTERVAL_S)

    beating = asyncio.create_task(beat())
    try:
        member = Member(config, path, splice=splice, launched=launched)
        await member.start()
        send(Notice.READY)
        return await _obey(member, reader, send)
    except (*PORT_ERRORS, StateError, MembershipError, OSError) as error:
        send(f"{Notice.FAILED} {json.dumps(str(error))}")
        await writer.drain()
        return EXIT_CRASHED
    finally:
        beating.cancel()


async def _obey(member: Member, reader: asyncio.StreamReader, send: Callable[[str], None]) -> int:
    """Do what the launcher orders; end when work has ended that should not have."""
    while True:
        reading = asyncio.create_task(reader.readline())
        await asyncio.wait((reading, *member.tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in member.tasks:
            if task.done():
                return _explain(task)
        match reading.result().decode().rstrip():
            case "":
                _log.error("the launcher has ended, so this member ends")
                log_queue.wait_written()
                os._exit(EXIT_LOST)  # its ports must be free
            case Order.ACCEPT:
                spare_full_collections()
                member.accept()
            case Order.RELOAD:
                member.reload()
            case Order.RELEASE:
                await member.release()
                send(Notice.DONE)
            case Order.RESUME:
                await member.resume()
                send(Notice.DONE)
            case Order.STOP:
                await member.stop()
                return EXIT_DONE


def _explain(task: asyncio.Task[None]) -> int:
    """Log why the member ends; the launcher starts another one."""
    error = None if task.cancelled() else task.exception()
    if isinstance(error, StateError | MembershipError):
        _log.error("this member ends", error=str(error))
    else:
        _log.error("unexpected end of work", work=task.get_name(), exc_info=error)
    return EXIT_CRASHED


def _add_worker(
    number: int, _: Any, __: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Have each line of the log say which worker writes it."""
    event["worker"] = number
    return event
