"""Bounds what clients and failing brokers cause of log lines: further ones are written as a sum."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partialmethod

from structlog.typing import FilteringBoundLogger

from metrics.clock import MS_PER_SECOND

LINES_AT_ONCE = 10
"""Lines of one event about one address and reason in one interval. A client decides how often it is
turned away; what the log takes and costs must not be for it to decide."""

SUM_AFTER_MS = 60_000.0
"""After its first line, what was not written is summed up so much later."""

MAX_PEERS = 100
"""Events, addresses and reasons with lines of their own; beyond so many, those of an event and a
reason share them."""

MORE = "more of the same"

SUM_INTERVAL_MS = 60_000.0
"""Between two lines about one broker while it goes on failing."""

OVER_AFTER_MS = 30_000.0
"""An outage is over when the broker has not failed for so long. That a connection succeeds is no
sign: a broker may take connections and close them."""

MAX_BROKERS = 1000
"""Clients may ask for brokers that are not there; beyond so many they share an entry."""

FAILING, OVER = "upstream goes on failing", "upstream fails no longer"

Write = Callable[..., object]
"""Takes an event and what it is about, as a log does."""


@dataclass(slots=True)
class _Written:
    since_ms: float
    lines: int = 0
    more: int = 0
    """What has no line."""


class LogLimiter:
    """What of the log clients can cause, of all clients."""

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

    info, warning = partialmethod(_write, "info"), partialmethod(_write, "warning")
    error = partialmethod(_write, "error")

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


@dataclass(slots=True)
class _Outage:
    since_ms: float
    last_ms: float
    told_ms: float
    """When the last line was written."""
    untold: Counter[str] = field(default_factory=Counter)
    """Failures since, by reason."""
    failures: int = 1


class OutageLog:
    """The failures of all brokers: of each the first one at once, further ones as a sum."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._outages: dict[int | None, _Outage] = {}

    def failed(
        self, node_id: int | None, reason: str, event: str, about: dict[str, object], now_ms: float
    ) -> None:
        """Record a failure of a broker, None for the bootstrap servers; write it if it is new."""
        if node_id not in self._outages and len(self._outages) >= MAX_BROKERS:
            node_id = None
        outage = self._outages.get(node_id)
        if outage is None:
            self._outages[node_id] = _Outage(now_ms, now_ms, now_ms)
            self._write(event, node_id=node_id, reason=reason, **about)
            return
        outage.last_ms = now_ms
        outage.failures += 1
        outage.untold[reason] += 1

    def sweep(self, now_ms: float) -> None:
        """Write the sums that are due, and which outages are over."""
        for node_id, outage in tuple(self._outages.items()):
            is_over = now_ms - outage.last_ms >= OVER_AFTER_MS
            if is_over:
                del self._outages[node_id]
            if outage.untold and (is_over or now_ms - outage.told_ms >= SUM_INTERVAL_MS):
                self._write(
                    OVER if is_over else FAILING,
                    node_id=node_id,
                    failures=outage.failures,
                    more=outage.untold.total(),
                    reasons=dict(outage.untold),
                    lasted_s=round((outage.last_ms - outage.since_ms) / MS_PER_SECOND, 1),
                )
                outage.untold.clear()
                outage.told_ms = now_ms
