"""Sends drivers on to the member that owns their query: their look-ups are not answered."""

from proxy.wire.list_offsets import LATEST, OffsetLookup

SENT_ON_MS = 10_000.0
"""For so long look-ups of a driver are not answered; then its query reads without a bound, as it
would stand still otherwise."""

FORGOTTEN_MS = 60_000.0
"""A driver that asked for nothing in this time begins anew."""

MAX_VISITORS = 10_000


class DriverVisits:
    """The drivers of queries that another member owns.

    What is advertised to them binds the batches of their query, and its owner alone knows what was.
    Here they would be told the ends of the logs, and plan all that is there. So a look-up of an end
    is not answered, and its connection is let go, as by a broker that restarts: the client looks up
    where that is, which is at the owner, and asks there.
    """

    def __init__(self) -> None:
        self._refused: dict[str, tuple[float, float]] = {}
        """By client id: when it was sent on first, and last."""

    def sends_on(self, client_id: str, ask: OffsetLookup, now_ms: float) -> bool:
        """Return whether a driver is to ask elsewhere; if not, its look-up is to be answered."""
        return LATEST in ask.timestamps.values() and self._is_sent_on(client_id, now_ms)

    def forget(self) -> None:
        """Begin anew with all drivers: owners have changed."""
        self._refused.clear()

    def _is_sent_on(self, client_id: str, now_ms: float) -> bool:
        first_ms, latest_ms = self._refused.pop(client_id, (now_ms, now_ms))
        if now_ms - latest_ms > FORGOTTEN_MS:
            first_ms = now_ms
        if len(self._refused) >= MAX_VISITORS:
            del self._refused[next(iter(self._refused))]
        self._refused[client_id] = first_ms, now_ms
        return now_ms - first_ms < SENT_ON_MS
