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
from proxy.wire.fetch_run import NO_FRAMES, FetchRun
from proxy.wire.layout import UNREADABLE

_NUMBER, _NUMBER_AT = Struct(">i"), slice(8, 12)  # the correlation id of a request

_Exchange: TypeAlias = tuple[RequestKind, InterceptedRequest, memoryview, FetchRead | None]
"""A request that was shown, the body of its response, and what is in that, None: to be walked."""

TRY_AFTER = 16
"""So many Fetches are read one by one before one is tried for another run: that costs as much."""


class ShownFrames:
    """Copies of one connection's frames, in their order."""

    __slots__ = (
        *("_in_flight", "_on_error", "_run", "_run_kind", "_since_ms"),
        *("_until_run", "rows", "unshown"),
    )

    def __init__(self, unshown: UnshownFrames, on_error: Callable[[Exception], None]) -> None:
        """`on_error` gets what `show` raises."""
        self.unshown, self._on_error = unshown, on_error
        self.rows: list[tuple[RequestKind | None, bytes]] = []
        """To be shown: a request with its kind, or, with None, the response to the oldest one."""
        self._in_flight: deque[tuple[RequestKind, bytes, InterceptedRequest | None]] = deque()
        """Requests without a response yet: kind, correlation id, and what is made of them."""
        self._since_ms = 0.0
        self._run: FetchRun | None = None
        self._run_kind: RequestKind | None = None
        """Of the requests in it."""
        self._until_run = 0
        """How many more Fetches are read one by one before one is tried for another run."""

    def begin(self) -> None:
        """Have all rows shown soon: there is a first one, whose bytes are counted as unshown."""
        self._since_ms = clock_ms()
        self.unshown.add(self._since_ms, self.show)

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
        rows = self.rows[::-1]
        self.rows.clear()
        self.unshown.cells[0] -= sum([len(frame) for _, frame in rows])
        is_running = False
        try:
            while rows:
                kind, frame = rows.pop()
                is_answered = bool(rows) and rows[-1][0] is None and not self._in_flight
                run = self._run if is_answered and kind is self._run_kind else None
                if is_running:
                    if run is not None and run.goes_on(frame, rows[-1][1]):
                        rows.pop()
                        continue
                    self._record_run()
                is_running = run is not None and len(rows) > 1 and run.begins(frame, rows[-1][1])
                if is_running:
                    rows.pop()
                    continue
                seen = None if kind is None else self._seen(kind, frame)
                if kind and seen and is_answered:
                    _, response = rows.pop()
                    exchange = _read(kind, seen, response)
                    self._try_run(exchange, frame, response)
                    _record(exchange)
                elif kind is None:
                    kind, _, seen = self._in_flight.popleft()
                    if seen is not None:
                        _record(_read(kind, seen, frame), is_sent=True)
                else:
                    if seen is not None:
                        seen.sent()
                    self._in_flight.append((kind, frame[_NUMBER_AT], seen))
            if is_running:
                self._record_run()
        except Exception as error:
            self._on_error(error)

    def _try_run(self, exchange: _Exchange, request: bytes, response: bytes) -> None:
        """Have the next Fetches taken for a run if they are like this one."""
        kind, _, body, got = exchange
        self._until_run -= 1
        if got is None or self._until_run > 0:
            return
        at = kind.first.header_end, len(response) - len(body)
        try:
            self._run = FetchRun(kind.version, request, at[0], response, at[1])
        except (ValueError, *UNREADABLE):
            return
        self._until_run, self._run_kind = TRY_AFTER, kind

    def _record_run(self) -> None:
        """Record the last Fetch of a run in place of all."""
        run, kind = self._run, self._run_kind
        assert run is not None
        assert kind is not None
        (request, response), run.latest = run.latest, NO_FRAMES
        seen = self._seen(kind, request)
        if seen is not None:
            seen.read_from(run.start)
            seen.measured(run.passed_bytes)
            _record(_read(kind, seen, response))

    def _seen(self, kind: RequestKind, frame: bytes) -> InterceptedRequest | None:
        interceptor = kind.session.interceptor
        if interceptor is None or not kind.is_wanted(self._since_ms):
            return None
        # The time is none too late: what a response says is told again for a short time only.
        return interceptor.request(kind.first, memoryview(frame), self._since_ms)


def _read(kind: RequestKind, seen: InterceptedRequest, frame: bytes) -> _Exchange:
    seen.measured(len(frame))
    body = memoryview(frame)[fetch_body(kind.plan, frame, len(frame)) :]
    return kind, seen, body, read_at_once(kind.version, body)


def _record(exchange: _Exchange, *, is_sent: bool = False) -> None:
    """Record that the request was sent, if it is not yet, and what it got."""
    kind, seen, body, got = exchange
    if not is_sent:
        seen.sent()
    observer = seen.observer(clock_ms())
    if observer is None:
        return
    if got is not None:
        _show_read(got, observer)
        return
    walker = FetchWalker(kind.version, len(body), observer)
    walker.feed(body)
    walker.show()


def _show_read(read: FetchRead, observer: FetchObserver) -> None:
    observer.session(*read.session)
    for topic, fetched in read.topics:
        if fetched:
            observer.partitions(topic, fetched)
    observer.ended()
