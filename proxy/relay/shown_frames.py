"""Shows an interceptor the Fetches that the lane has sent on, and their responses, soon after."""

from collections import deque
from collections.abc import Callable
from struct import Struct

from metrics.clock import clock_ms
from proxy.relay.exchange import RequestKind
from proxy.relay.interceptor import InterceptedRequest
from proxy.wire.fetch_response import FetchWalker, fetch_body

_NUMBER, _NUMBER_AT = Struct(">i"), slice(8, 12)  # the correlation id of a request


class ShownFrames:
    """Copies of one connection's frames, in their order."""

    __slots__ = ("_in_flight", "_on_error", "_show_soon", "_since_ms", "rows")

    def __init__(
        self,
        show_soon: Callable[[Callable[[], None]], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """`show_soon` calls what it is given a little later; `on_error` gets what `show` raises."""
        self._show_soon, self._on_error = show_soon, on_error
        self.rows: list[tuple[RequestKind | None, bytes]] = []
        """What is to be shown."""
        self._in_flight: deque[tuple[RequestKind, bytes, InterceptedRequest | None]] = deque()
        """Requests without a response yet: kind, correlation id, and what is made of them."""
        self._since_ms = 0.0

    def add(self, kind: RequestKind | None, frame: bytes) -> None:
        """Take a request of a kind, or, with None, the response to the oldest one."""
        if not self.rows:
            self._since_ms = clock_ms()
            self._show_soon(self.show)
        self.rows.append((kind, frame))

    def take(self, kind: RequestKind, correlation_id: int) -> InterceptedRequest | None:
        """Give up the oldest request in flight if it is the one that the lane gives up."""
        if not self._in_flight:
            return None
        shown, number, seen = self._in_flight[0]
        if shown is not kind or number != _NUMBER.pack(correlation_id):
            return None
        self._in_flight.popleft()
        return seen

    def show(self) -> None:
        """Show all that was added: to be called before anything else is shown, or is answered."""
        rows, self.rows = self.rows, []
        try:
            for kind, frame in rows:
                if kind is None:
                    self._answered(frame)
                else:
                    self._asked(kind, frame)
        except Exception as error:
            self._on_error(error)

    def _asked(self, kind: RequestKind, frame: bytes) -> None:
        seen, interceptor = None, kind.session.interceptor
        if interceptor is not None and kind.is_wanted(self._since_ms):
            # The time is none too late: what a response says is told again for a short time only.
            seen = interceptor.request(kind.first, memoryview(frame), self._since_ms)
            seen.sent()
        self._in_flight.append((kind, frame[_NUMBER_AT], seen))

    def _answered(self, frame: bytes) -> None:
        kind, _, seen = self._in_flight.popleft()
        if seen is None:
            return
        seen.measured(len(frame))
        start = fetch_body(kind.plan, frame, len(frame))
        walker = FetchWalker(kind.version, len(frame) - start, seen.observer(clock_ms()))
        walker.feed(memoryview(frame)[start:])
        walker.show()
