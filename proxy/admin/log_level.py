"""Which log lines are written: chosen by the configuration, and changed by an operator."""

import json
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web
from structlog import DropEvent

from proxy.admin.audit import AuditLog
from proxy.admin.changes import audited, log_change
from proxy.admin.replies import ApiError, answer, json_body

LEVELS: Final = ("debug", "info", "warning", "error")
"""Of each, the lines of those behind it are written as well."""

LOG_LEVEL_PATH = "/v1/log_level"

MAX_LEVEL_BYTES = 1024
"""The longest body that names a level."""

_EXAMPLE = 'send {"level": "debug"}'


class LogLevel:
    """The level in force."""

    def __init__(self) -> None:
        self.name = "info"
        self._unwanted: frozenset[str] = frozenset(("debug",))

    def set(self, name: str) -> None:
        """Write lines of one of LEVELS and above from now on. Raises ValueError for another."""
        if name not in LEVELS:
            raise ValueError(f"{name!r} is not one of {', '.join(LEVELS)}")
        self._unwanted = frozenset(LEVELS[: LEVELS.index(name)])
        self.name = name

    def process(self, _: Any, method: str, event: Any) -> Any:
        """Drop a line below the level: the first of structlog's processors."""
        if method in self._unwanted:
            raise DropEvent
        return event


log_level: Final = LogLevel()
"""Of this process, as the log is."""


@dataclass(frozen=True, slots=True)
class LogLevelRoutes:
    """The handlers of `/v1/log_level`."""

    audit: AuditLog

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers by method and path."""
        return [web.get(LOG_LEVEL_PATH, self._get_level), web.put(LOG_LEVEL_PATH, self._put_level)]

    async def _get_level(self, _: web.Request) -> web.Response:
        return answer({"level": log_level.name})

    async def _put_level(self, request: web.Request) -> web.Response:
        before, name = log_level.name, parse_level(await json_body(request, MAX_LEVEL_BYTES))
        async with audited(self.audit, "log level", lambda: log_level.name):
            log_level.set(name)
        # As an error it is written at every level: the log should say why it says less.
        level = "error" if name == "error" else "warning"
        log_change("log level changed", level, before=before, after=name)
        return answer({"level": name})


def parse_level(body: bytes) -> str:
    """Read a body such as `{"level": "debug"}`. Raises ApiError with status 400 for another."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON", _EXAMPLE) from None
    if not isinstance(document, dict) or set(document) != {"level"}:
        raise ApiError(400, "the body has one key, level", _EXAMPLE)
    if document["level"] not in LEVELS:
        raise ApiError(400, "the level is not known", f"use {', '.join(LEVELS)}")
    return str(document["level"])
