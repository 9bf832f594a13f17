"""Loads the configuration again on SIGHUP or when its file has changed, all of it or nothing."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from prometheus_client import Counter
from structlog import get_logger

from proxy.config import Config, ConfigError, load_config

WATCH_INTERVAL_S = 1.0
"""Between two looks at the file, which work with ConfigMap mounts too, where a link is replaced. A
change counts when two looks saw the same: the first may find a file that is just being written."""

KEPT_LOADS = 20
"""How many loads are remembered."""

NEEDS_RESTART = ("cluster", "listeners", "state", "admin", "limits.max_client_entities")
"""What is read at the start only. Of the last one, sensors follow at once and metrics do not."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadAttempt:
    """One attempt to load the configuration, `at_s` in seconds since the epoch."""

    at_s: float
    result: str
    """`ok` or `failed`; then what was in force stays so."""
    message: str


class Reloader:
    """Replaces the configuration in force by `apply` when another one is written."""

    def __init__(
        self,
        path: Path,
        config: Config,
        apply: Callable[[Config], Awaitable[None]],
        counter: Counter,
    ) -> None:
        self._path = path
        self._apply = apply
        self._counter = counter
        self._at_start = config
        self._secrets = _secrets(config)
        self._requested = asyncio.Event()
        self._seen = _content(path)
        self.loads: deque[LoadAttempt] = deque(maxlen=KEPT_LOADS)
        """The latest loads, the newest first."""
        for result in ("ok", "failed"):  # one that is there from the start shows its first increase
            counter.labels(result)
        self.loads.append(LoadAttempt(time.time(), "ok", "loaded at the start"))

    def request(self) -> None:
        """Load again soon, changed or not."""
        self._requested.set()

    async def watch(self) -> None:
        """Load when it is requested, or when the file has changed, until cancelled."""
        last = self._seen
        while True:
            try:
                async with asyncio.timeout(WATCH_INTERVAL_S):
                    await self._requested.wait()
            except TimeoutError:
                before, last = last, _content(self._path)
                if last == self._seen or last != before:
                    continue
            self._requested.clear()
            await self._load()

    async def _load(self) -> None:
        self._seen = _content(self._path)
        try:
            config = await asyncio.to_thread(load_config, self._path)
            await self._apply(config)
        except Exception as error:  # a defect of ours must not end the proxy
            is_ours = not isinstance(error, ConfigError)
            self._remember("failed", f"unexpected error: {error}" if is_ours else str(error))
            details = {"exc_info": error} if is_ours else {"problems": str(error)}
            _log.error("configuration not reloaded, the old one stays", **details)
            return
        parts = ((key, attrgetter(key)) for key in NEEDS_RESTART)
        waiting = [key for key, part in parts if part(config) != part(self._at_start)]
        if _secrets(config) != self._secrets:
            waiting.append("certificates, keys and token")
        message = f"after a restart: {', '.join(waiting)}" if waiting else "in force"
        self._remember("ok", message)
        _log.info("configuration reloaded", message=message)

    def _remember(self, result: str, message: str) -> None:
        self._counter.labels(result).inc()
        self.loads.appendleft(LoadAttempt(time.time(), result, message))


def _secrets(config: Config) -> list[bytes | None]:
    listeners = (listener.tls for listener in config.listeners)
    sections = [config.cluster.tls, *listeners, config.admin.tls]
    names = ("ca_file", "cert_file", "key_file")
    paths = [getattr(section, name, None) for section in sections for name in names]
    tokens = [config.admin.token_file, *(token.token_file for token in config.admin.tokens)]
    return [_content(path) for path in (*paths, *tokens) if path is not None]


def _content(path: Path) -> bytes | None:
    """Return the file's content, None when it can't be read: the load will say why."""
    try:
        return path.read_bytes()
    except OSError:
        return None
