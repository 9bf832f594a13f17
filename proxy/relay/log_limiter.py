"""Bounds what clients can cause of log lines: the first ones at once, further ones as a sum."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod

from structlog.typing import FilteringBoundLogger

LINES_AT_ONCE = 10
"""Lines of one event about one address and reason in one interval. A client decides how often it is
turned away; what the log takes and costs must not be for it to decide."""

SUM_AFTER_MS = 60_000.0
"""After its first line, what was not written is summed up so much later."""

MAX_PEERS = 100
"""Events, addresses and reasons with lines of their own; beyond so many, those of an event and a
reason share them."""

MORE = "more of the same"


@dataclass(slots=True)
class _Written:
    since_ms: float
    lines: int = 0
    more: int = 0
    """What has no line."""


class LogLimiter:
    """What of the log clients can cause, of all clients. Call `sweep` every second or so."""

    def __init__(self, log: FilteringBoundLogger, clock_ms: Callable[[], float]) -> None:
        self._log, self._clock_ms = log, clock_ms
        self._written: dict[tuple[str, str, str, str | None], _Written] = {}
        """By level, event, reason and address."""

    def _write(
        self, level: str, event: str, /, *, reason: str, peer: str | None = None, **about: object
    ) -> None:
        """Write a line about a client at this address, or that one has caused, or count it."""
        key = level, event, reason, peer
        if key not in self._written and len(self._written) >= MAX_PEERS:
            key = level, event, reason, None
        written = self._written.get(key)
        if written is None:
            written = self._written[key] = _Written(self._clock_ms())
        if written.lines < LINES_AT_ONCE:
            written.lines += 1
            getattr(self._log, level)(event, reason=reason, peer=peer, **about)
        else:
            written.more += 1

    warning, error = partialmethod(_write, "warning"), partialmethod(_write, "error")

    def sweep(self) -> None:
        """Write the sums that are due."""
        now_ms = self._clock_ms()
        for key, written in tuple(self._written.items()):
            if now_ms - written.since_ms >= SUM_AFTER_MS:
                del self._written[key]
                if written.more:
                    level, event, reason, peer = key
                    about = {"of": event, "reason": reason, "peer": peer, "more": written.more}
                    getattr(self._log, level)(MORE, **about)
