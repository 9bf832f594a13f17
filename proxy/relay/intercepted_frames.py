"""Shows an interceptor the Fetches that the lane has sent on, and their responses, soon after."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from metrics.clock import clock_ms
from proxy.relay.clients import SampledFetchObserver
from proxy.relay.exchange import RequestKind
from proxy.relay.intercept_queue import InterceptQueue
from proxy.relay.interceptor import InterceptedRequest
from proxy.wire.fetch_response import FetchObserver, FetchWalker, fetch_body_start
from proxy.wire.fetch_run import fetch_run_shape
from proxy.wire.layout import UNREADABLE, TooManyElements

ShownRow: TypeAlias = tuple[RequestKind, bytes, bytes, float, int, int, int, int]
"""The kind of a request, its frame, that of its response; when the request was read, in ms. Then,
where it is the last of a run of Fetches, the offset from which that began, else -1; how many bytes
the responses have for which it stands, and their records; and how many these are."""


@dataclass(slots=True, eq=False)
class LaneFrameCopies:
    """Copies of one connection's frames, in the order of the responses."""

    unshown: InterceptQueue
    _on_error: Callable[[Exception], None]
    """Gets what `show` and `request` raise."""
    rows: list[ShownRow] = field(default_factory=list)
    """To be shown. One stands for all that read on from one another."""

    def begin(self) -> None:
        """Have all rows shown soon: there is a first one, whose bytes are counted as unshown."""
        self.unshown.add(clock_ms(), self.show)
        kind, request, response, _, start, *_ = self.rows[0]
        if start < 0:  # what reads on from it may be a run
            at = kind.first.header_end, kind.plan.body_offset
            with suppress(*UNREADABLE):
                kind.run[:] = fetch_run_shape(kind.version, request, at[0], response, at[1])

    def show(self) -> None:
        """Show all that was added: to be called before anything else is shown, or is answered."""
        rows = self.rows[:]
        self.rows.clear()
        self.unshown.cells[0] -= sum([len(row[1]) + len(row[2]) for row in rows])
        try:
            for kind, request, response, read_ms, start, run_bytes, records_bytes, count in rows:
                observers: list[FetchObserver | None] = []
                seen = _seen(kind, request, read_ms)
                if seen is not None:
                    if count > 1:
                        seen.read_from(start)
                    seen.sent(at_once=True)
                    seen.measured(run_bytes)
                    observers.append(seen.observer(clock_ms()))
                if (usage := kind.session.usage) is not None:
                    size = run_bytes + count * len(request)
                    of_run = records_bytes if count > 1 else None
                    sample = SampledFetchObserver(
                        usage.fetched, size, requests=count, records_bytes=of_run
                    )
                    observers.append(sample)
                _record(kind, response, *filter(None, observers))
        except Exception as error:
            self._on_error(error)

    def request(self, kind: RequestKind, frame: bytes, read_ms: float) -> InterceptedRequest | None:
        """Show a request that the lane gives up: who gets the response shows that."""
        try:
            seen = _seen(kind, frame, read_ms)
            if seen is not None:
                seen.sent()
        except Exception as error:
            self._on_error(error)
            return None
        return seen


def _seen(kind: RequestKind, frame: bytes, read_ms: float) -> InterceptedRequest | None:
    if not kind.is_wanted(read_ms):
        return None
    try:
        return kind.session.interceptor.request(kind.first, memoryview(frame), read_ms)
    except TooManyElements:
        return None


def _record(kind: RequestKind, response: bytes, *observers: FetchObserver) -> None:
    if not observers:
        return
    body = memoryview(response)[fetch_body_start(kind.plan, response, len(response)) :]
    walker = FetchWalker(kind.version, len(body), *observers)
    walker.feed(body)
    walker.show()
