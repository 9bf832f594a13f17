"""For how long a broker is at work for the requests of one connection."""

from dataclasses import dataclass

FIRST_USUAL_MS = 1.0
"""Of an answer that may have waited for data, before one showed more; of a request without one."""

USUAL_STEP = 1.25
"""Factor by which each answer that shows it moves the usual time: to the median, not to a slow
one."""


@dataclass(slots=True)
class BusyTime:
    """Measures the service time of one connection's requests, for `request_percentage`.

    A broker takes them one after another, so what is in flight together counts once, and the
    proxy's own holds do not count. Of an answer that may have waited for data the usual time
    counts, and the rest when it shows that the data was there. All times are monotonic, in
    milliseconds.
    """

    _free_ms: float = 0.0
    """Since when the broker is at work for nothing but what is still in flight."""
    _held_until_ms: float = 0.0
    _last_ms: float = 0.0
    _usual_ms: float = FIRST_USUAL_MS
    _doubtful_ms: float = 0.0
    """What the last answer may have waited for data."""

    def answered(self, sent_ms: float, wait_ms: float, now_ms: float) -> float:
        """Return for how long the broker was at work for a request whose response is there now.

        It was sent on at `sent_ms`; for `wait_ms` the broker may have had no data. One that came
        while another was held was not seen to come: it counts like the last one that was.
        """
        took_ms = max(now_ms - max(sent_ms, self._free_ms), 0.0)
        if sent_ms < self._held_until_ms:
            took_ms = max(took_ms, min(self._last_ms, now_ms - sent_ms))
        busy_ms = took_ms
        if wait_ms:
            busy_ms = max(took_ms - wait_ms, min(took_ms, self._usual_ms))
        self._free_ms = now_ms
        self._last_ms, self._doubtful_ms = busy_ms, took_ms - busy_ms
        return busy_ms

    def had_data(self) -> float:
        """Return what the last answer counts beyond that: the broker did not wait for data."""
        rest_ms, self._doubtful_ms = self._doubtful_ms, 0.0
        self._last_ms += rest_ms
        is_longer = self._last_ms > self._usual_ms
        self._usual_ms *= USUAL_STEP if is_longer else 1 / USUAL_STEP
        return rest_ms

    def held(self, until_ms: float) -> None:
        """Record that a response is held, and with it what comes behind it."""
        self._free_ms = self._held_until_ms = until_ms
