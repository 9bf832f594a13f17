"""Loads the configuration again on SIGHUP or when one of its files has changed, all or nothing.

Its files are the YAML file and those that it names: certificates, keys, passwords, tokens.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from operator import attrgetter
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from structlog import get_logger

from proxy.config import Config, ConfigError, load_config
from proxy.config.differences import describe_rule_counts
from proxy.config.files import read_bytes
from proxy.config.secrets import Secrets, named_files, read_secrets
from proxy.quota.values import BadValueError

WATCH_INTERVAL_S = 1.0
"""Between two looks at the files, which work with ConfigMap mounts too, where a link is replaced. A
change counts when two looks saw the same: the first may find a file that is just being written."""

REQUEST_INTERVAL_S = 1.0
"""At least, between two loads that are requested: requests meanwhile count as one."""

LOOK_LIMIT_S = 10.0
"""For a look at the files. One that takes longer hangs, as on a network file system."""

LOAD_LIMIT_S = 300.0
"""For a load; to read a file as long as any may be takes a minute or two."""

NEEDS_RESTART = (
    *("cluster", "listeners", "workers", "tier", "state", "admin", "usage"),
    "limits.max_client_entities",
)
"""What is read at the start only, but for what the files say that it names. Of the last one,
sensors follow at once and metrics do not."""

Look = tuple[bytes, ...]
"""What stands for the content of each file, or for why it can't be read."""

Result = TypeVar("Result")

_log = get_logger(__name__)


class TimeLimitedThread:
    """Calls functions in a thread, one at a time, and gives up waiting for them after a while.

    They may block for good, such as reading a file of a hung network file system.
    A thread that hangs is left alone: it keeps neither the event loop nor the process from its end.
    There is never more than one.
    """

    def __init__(self) -> None:
        self._running: Future[Any] | None = None

    async def call(self, function: Callable[[], Result], limit_s: float) -> Result:
        """Return what the function returns, or raise what it raises; TimeoutError when it hangs.

        So also where the system has no room for a thread, and at once while an earlier call hangs.
        """
        if self._running is not None and not self._running.done():
            raise TimeoutError
        done = Future[Result]()
        done.set_running_or_notify_cancel()
        try:
            Thread(target=_run, args=(function, done), name="limited", daemon=True).start()
        except RuntimeError as error:
            raise TimeoutError from error
        self._running = done
        async with asyncio.timeout(limit_s):
            return await asyncio.wrap_future(done)


class Reloader:
    """Replaces the configuration in force by `apply` when another one is written.

    `apply` also gets what the files say that the configuration of the start names. `record` gets of
    each load whether it is `ok` or `failed`, where what was in force stays so, and a text.
    """

    def __init__(
        self,
        path: Path,
        config: Config,
        apply: Callable[[Config, Secrets], Awaitable[None]],
        record: Callable[[str, str], None],
    ) -> None:
        self._path = path
        self._files = (path, *named_files(config))
        self._apply = apply
        self._record = record
        self._at_start = self._in_force = config
        self._requested = asyncio.Event()
        self._thread = TimeLimitedThread()
        self._seen = self._digests()
        self._hangs = False
        self._loaded_s = -REQUEST_INTERVAL_S

    def request(self) -> None:
        """Load again soon, changed or not."""
        self._requested.set()

    async def watch(self) -> None:
        """Load when it is requested, or when a file has changed, until cancelled."""
        last = self._seen
        while True:
            try:
                async with asyncio.timeout(WATCH_INTERVAL_S):
                    await self._requested.wait()
            except TimeoutError:
                look = await self._look()
                if look is None:
                    continue
                before, last = last, look
                if last == self._seen or last != before:
                    continue
            else:
                await asyncio.sleep(self._loaded_s + REQUEST_INTERVAL_S - time.monotonic())
            self._requested.clear()
            await self._load()
            self._loaded_s = time.monotonic()

    def _digests(self) -> Look:
        return tuple(map(_digest, self._files))

    async def _look(self) -> Look | None:
        """Return how the files are now, None if they cannot be read in time."""
        try:
            look = await self._thread.call(self._digests, LOOK_LIMIT_S)
        except TimeoutError:
            self._hung(LOOK_LIMIT_S)
            return None
        if self._hangs:  # perhaps a request came to nothing meanwhile
            self._hangs = False
            self.request()
        return look

    async def _load(self) -> None:
        look = await self._look()
        if look is None:
            return
        self._seen = look
        try:
            config, secrets, rules = await self._thread.call(self._read, LOAD_LIMIT_S)
            await self._apply(config, secrets)
        except TimeoutError:
            self._hung(LOAD_LIMIT_S)
        except ConfigError as error:
            self._failed(str(error))
        except BadValueError as error:
            self._failed(f"{error.message}\n    fix: {error.fix}")
        except Exception as error:  # a defect of ours must not end the proxy
            self._failed(f"unexpected error: {error}", error)
        else:
            parts = ((key, attrgetter(key)) for key in NEEDS_RESTART)
            waiting = [key for key, part in parts if part(config) != part(self._at_start)]
            message = f"after a restart: {', '.join(waiting)}" if waiting else "in force"
            message += f"; {rules}" if rules else ""
            self._in_force = config
            self._record("ok", message)
            _log.info("configuration reloaded", message=message)

    def _read(self) -> tuple[Config, Secrets, str]:
        """Return what is written now, and how many rules come and go with it."""
        config = load_config(self._path)
        return config, read_secrets(self._at_start), describe_rule_counts(self._in_force, config)

    def _hung(self, limit_s: float) -> None:
        """Record once that the files hang; when they answer again, a load follows."""
        if not self._hangs:
            self._hangs = True
            text = f"{self._path}: it, or a file that it names, was not read in {limit_s:g} s"
            text += "\n    fix: look at the file system that it is on; name a file, not a pipe; "
            text += "or let this process have more threads (pids.max)"
            self._failed(text)

    def _failed(self, message: str, defect: Exception | None = None) -> None:
        self._record("failed", message)
        about = {"problems": message} if defect is None else {"exc_info": defect}
        _log.error("configuration not reloaded, the old one stays", **about)


def _digest(path: Path) -> bytes:
    try:
        return hashlib.sha256(read_bytes(path)).digest()
    except BadValueError as error:
        return error.message.encode()


def _run(function: Callable[[], Any], done: Future[Any]) -> None:
    try:
        done.set_result(function())
    except Exception as error:  # it belongs to who called
        done.set_exception(error)
