"""Shows an interceptor the Fetches that the lane has sent on, and their responses, soon after."""

from collections import deque
from collections.abc import Callable
from struct import Struct
from typing import TypeAlias

from metrics.clock import clock_ms
from proxy.relay.exchange import RequestKind
from proxy.relay.interceptor import InterceptedRequest
from proxy.relay.unshown_frames import UnshownFrames
from proxy.wire.fetch import FetchRead
from proxy.wire.fetch_response import FetchObserver, FetchWalker, fetch_body, read_at_once

_NUMBER, _NUMBER_AT = Struct(">i"), slice(8, 12)  # the correlation id of a request

_Exchange: TypeAlias = tuple[InterceptedRequest, int, memoryview, FetchRead | None]
"""A request that was shown; version and body of its response, and what is in that, None: it is to
be walked."""


class ShownFrames:
    """Copies of one connection's frames, in their order."""

    __slots__ = ("_all", "_bytes", "_in_flight", "_on_error", "_since_ms", "rows")

    def __init__(self, every: UnshownFrames, on_error: Callable[[Exception], None]) -> None:
        """`on_error` gets what `show` raises."""
        self._all, self._on_error = every, on_error
        self._bytes = 0
        """Of the rows."""
        self.rows: list[tuple[RequestKind | None, bytes]] = []
        """What is to be shown."""
        self._in_flight: deque[tuple[RequestKind, bytes, InterceptedRequest | None]] = deque()
        """Requests without a response yet: kind, correlation id, and what is made of them."""
        self._since_ms = 0.0

    def add(self, kind: RequestKind | None, frame: bytes) -> None:
        """Take a request of a kind, or, with None, the response to the oldest one."""
        if not self.rows:
            self._since_ms = clock_ms()
            self._all.add(self._since_ms, self.show)
        self.rows.append((kind, frame))
        self._bytes += len(frame)
        self._all.bytes += len(frame)

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
        """Show all that was added: to be called before anything else is shown, or is answered.

        Of Fetches that each go on where the one before ended, one is recorded.
        """
        rows, self.rows = self.rows[::-1], []
        self._all.bytes -= self._bytes
        self._bytes = 0
        last: _Exchange | None = None
        try:
            while rows:
                kind, frame = rows.pop()
                seen = None if kind is None else self._seen(kind, frame)
                if kind and seen and rows and rows[-1][0] is None and not self._in_flight:
                    exchange = _read(kind, seen, rows.pop()[1])
                    if last and not _goes_on(exchange, last):
                        _record(last)
                    last = exchange
                    continue
                if last is not None:
                    _record(last)
                    last = None
                if kind is None:
                    kind, _, seen = self._in_flight.popleft()
                    if seen is not None:
                        _record(_read(kind, seen, frame), is_sent=True)
                else:
                    if seen is not None:
                        seen.sent()
                    self._in_flight.append((kind, frame[_NUMBER_AT], seen))
            if last is not None:
                _record(last)
        except Exception as error:
            self._on_error(error)

    def _seen(self, kind: RequestKind, frame: bytes) -> InterceptedRequest | None:
        interceptor = kind.session.interceptor
        if interceptor is None or not kind.is_wanted(self._since_ms):
            return None
        # The time is none too late: what a response says is told again for a short time only.
        return interceptor.request(kind.first, memoryview(frame), self._since_ms)


def _read(kind: RequestKind, seen: InterceptedRequest, frame: bytes) -> _Exchange:
    seen.measured(len(frame))
    body = memoryview(frame)[fetch_body(kind.plan, frame, len(frame)) :]
    return seen, kind.version, body, read_at_once(kind.version, body)


def _goes_on(exchange: _Exchange, last: _Exchange) -> bool:
    (seen, _, _, got), (before, _, _, got_before) = exchange, last
    return got is not None and got_before is not None and seen.goes_on(got, before, got_before)


def _record(exchange: _Exchange, *, is_sent: bool = False) -> None:
    """Record that the request was sent, if it is not yet, and what it got."""
    seen, version, body, got = exchange
    if not is_sent:
        seen.sent()
    observer = seen.observer(clock_ms())
    if observer is None:
        return
    if got is not None:
        _show_read(got, observer)
        return
    walker = FetchWalker(version, len(body), observer)
    walker.feed(body)
    walker.show()


def _show_read(read: FetchRead, observer: FetchObserver) -> None:
    observer.session(*read.session)
    for topic, fetched in read.topics:
        if fetched:
            observer.partitions(topic, fetched)
    observer.ended()
