"""For how long a broker is at work for the requests of one connection."""

from dataclasses import dataclass


@dataclass(slots=True)
class BusyTime:
    """Measures the service time of requests, for `request_percentage`.

    A broker takes the requests of a connection one after another, so what is in flight together
    counts once; and the proxy's own holds do not count. All times are monotonic, in milliseconds.
    """

    _free_ms: float = 0.0
    """Since when the broker is at work for nothing but what is still in flight."""
    _held_until_ms: float = 0.0
    _last_ms: float = 0.0

    def answered(self, sent_ms: float, idle_ms: float, now_ms: float) -> float:
        """Return for how long the broker was at work for a request; its response is there now.

        One that came while another was held was not seen to come: it counts like the last one that
        was. The request was sent on at `sent_ms`; for `idle_ms` the broker may have had no data.
        """
        busy_ms = now_ms - max(sent_ms, self._free_ms) - idle_ms
        if sent_ms < self._held_until_ms:
            busy_ms = max(busy_ms, min(self._last_ms, now_ms - sent_ms))
        self._free_ms = now_ms
        self._last_ms = max(busy_ms, 0.0)
        return self._last_ms

    def held(self, until_ms: float) -> None:
        """Record that a response is held, and with it what comes behind it."""
        self._free_ms = self._held_until_ms = until_ms
