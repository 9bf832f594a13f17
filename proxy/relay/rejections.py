"""Write down which clients are turned away: the first ones at once, further ones as a sum."""

from collections.abc import Callable
from dataclasses import dataclass

LINES_AT_ONCE = 10
"""Lines about one address and reason in one interval. A client decides how often it is turned
away; what the log takes and costs must not be for it to decide."""

REJECTION_INTERVAL_MS = 60_000.0
"""After its first line, what was not written is summed up so much later."""

MAX_PEERS = 100
"""Addresses and reasons with lines of their own; beyond so many, those of a reason share them."""

REJECTED, MORE_REJECTED = "client rejected", "more clients rejected"

Write = Callable[..., object]
"""Takes an event and what it is about, as a log does."""


@dataclass(slots=True)
class _Told:
    since_ms: float
    lines: int = 0
    more: int = 0
    """Rejections without a line."""


class RejectionLog:
    """The rejections of all clients. Call `sweep` every second or so."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._told: dict[tuple[str, str | None], _Told] = {}

    def rejected(
        self, reason: str, peer: str | None, about: dict[str, object], now_ms: float
    ) -> None:
        """Record that a client at this address was turned away; write it, or count it."""
        if (reason, peer) not in self._told and len(self._told) >= MAX_PEERS:
            peer = None
        told = self._told.setdefault((reason, peer), _Told(now_ms))
        if told.lines < LINES_AT_ONCE:
            told.lines += 1
            self._write(REJECTED, reason=reason, **about)
        else:
            told.more += 1

    def sweep(self, now_ms: float) -> None:
        """Write the sums that are due."""
        for (reason, peer), told in tuple(self._told.items()):
            if now_ms - told.since_ms >= REJECTION_INTERVAL_MS:
                del self._told[reason, peer]
                if told.more:
                    self._write(MORE_REJECTED, reason=reason, peer=peer, more=told.more)
