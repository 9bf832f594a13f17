"""Which log lines are written: chosen by the configuration, and changed by an operator."""

from typing import Any, Final

from structlog import DropEvent

from proxy.admin.replies import bad_request, read_object

LEVELS: Final = ("debug", "info", "warning", "error")
"""Of each, the lines of those behind it are written as well."""

LOG_LEVEL_PATH = "/v1/log_level"


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
    level = read_object(body, ("level",), '{"level": "debug"}').get("level")
    if level not in LEVELS:
        raise bad_request("the level is not known", f"use {', '.join(LEVELS)}")
    return str(level)
