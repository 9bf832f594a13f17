"""Which log lines are written: chosen by the configuration, and changed by an operator."""

import json
from typing import Any, Final

from structlog import DropEvent

from proxy.admin.replies import ApiError

LEVELS: Final = ("debug", "info", "warning", "error")
"""Of each, the lines of those behind it are written as well."""

LOG_LEVEL_PATH = "/v1/log_level"

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
