"""Write down that a broker fails: its first failure at once, further ones as a sum."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from metrics.clock import MS_PER_SECOND

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
class _Outage:
    since_ms: float
    last_ms: float
    told_ms: float
    """When the last line was written."""
    untold: Counter[str] = field(default_factory=Counter)
    """Failures since, by reason."""
    failures: int = 1


class OutageLog:
    """The failures of all brokers. Call `sweep` every second or so."""

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
