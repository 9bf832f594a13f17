"""Measure where the time of a request goes: to the broker, to the proxy, or to holds.

What is measured is a sample. So the clock may be read at each step, and it costs less than 1 % of
the time of a small Fetch. A body's way is in none of the three: that is the network's time, the
client's and the broker's.
"""

from metrics import HistogramChild, Instruments
from metrics.clock import MS_PER_SECOND

SAMPLE_EVERY = 67
"""Of an API's requests one in so many is measured. A prime: no client's habits have that period."""

SAMPLE_AFTER_MS = 250.0
"""So is one that comes so long after the last one measured: else few are of a rare API."""


class ApiTimes:
    """The histograms of one API, and which of its requests is measured next.

    `left` is counted down with each request; at 0, or from `due_ms` on, the request is measured.
    """

    __slots__ = ("broker", "due_ms", "hold", "left", "proxy")

    def __init__(self, instruments: Instruments, api: str) -> None:
        self.broker: HistogramChild = instruments.broker_seconds.of(api)
        self.proxy: HistogramChild = instruments.proxy_seconds.of(api)
        self.hold: HistogramChild = instruments.hold_seconds.of(api)
        self.left = 0
        self.due_ms = 0.0

    def observe(self, broker_ms: float, proxy_ms: float) -> None:
        """Record a request that was sent on at once, as its response was."""
        self.broker.observe(broker_ms / MS_PER_SECOND)
        self.proxy.observe(proxy_ms / MS_PER_SECOND)
        self.hold.observe(0.0)

    def begin(self, read_ms: float, hold_ms: float, now_ms: float) -> "ExchangeTimes":
        """Return the times of a request: when it was read, held until then, and sent on by now."""
        self.left = SAMPLE_EVERY
        self.due_ms = read_ms + SAMPLE_AFTER_MS
        return ExchangeTimes(self, read_ms, hold_ms, now_ms)


class ExchangeTimes:
    """Where the time of one request goes; in milliseconds."""

    __slots__ = ("_broker_ms", "_from_ms", "_is_held", "_proxy_ms", "_times", "hold_ms", "sent_ms")

    def __init__(
        self, times: ApiTimes | None, read_ms: float, hold_ms: float, now_ms: float
    ) -> None:
        self._times = times
        self.hold_ms = hold_ms
        self._broker_ms = 0.0
        self._is_held = False
        self._from_ms = read_ms
        """Since when the time is the proxy's or, if it is held, the hold's."""
        self.sent_on(now_ms)

    def read_anew(self, now_ms: float) -> None:
        """Forget how long the request took to come."""
        self._from_ms = now_ms

    def sent_on(self, now_ms: float) -> None:
        """Record that the request's start was sent on; `sent_ms` is set later if a body follows."""
        self._proxy_ms = now_ms - self._from_ms
        self.sent_ms = now_ms

    def on_response(self, now_ms: float, free_ms: float) -> None:
        """Record that the response's head was read, and since when nothing was in front of it.

        A broker handles one request of a connection after the other, and a response that waits
        behind an earlier one, which is held or not taken, is no slow one.
        """
        self._broker_ms = max(now_ms - max(self.sent_ms, free_ms), 0.0)
        self._from_ms = now_ms

    def held(self, now_ms: float) -> None:
        """Record that the response is held from now on."""
        if not self._is_held:
            self._proxy_ms += now_ms - self._from_ms
            self._from_ms, self._is_held = now_ms, True

    def released(self, now_ms: float) -> None:
        """Record that the response is held no longer, if it was."""
        if self._is_held:
            self.hold_ms += now_ms - self._from_ms
            self._from_ms, self._is_held = now_ms, False

    def came_whole(self, now_ms: float) -> None:
        """Record that a response is there that had to be waited for as a whole."""
        self._broker_ms += now_ms - self._from_ms
        self._from_ms = now_ms

    def done(self, now_ms: float) -> None:
        """Record that the response, or its start, was sent on; a second time does nothing."""
        times, self._times = self._times, None
        if times is None:
            return
        times.broker.observe(self._broker_ms / MS_PER_SECOND)
        times.proxy.observe((self._proxy_ms + now_ms - self._from_ms) / MS_PER_SECOND)
        times.hold.observe(self.hold_ms / MS_PER_SECOND)


NOT_TIMED = ExchangeTimes(None, 0.0, 0.0, 0.0)
"""Stands for those of a request that is not measured: nothing comes of it."""
