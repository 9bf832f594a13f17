"""Looks into Fetch responses beside what an interceptor makes of them."""

from collections.abc import Sequence

from proxy.relay.interceptor import InterceptedRequest
from proxy.wire.fetch import FetchedPartition, TopicKey
from proxy.wire.fetch_response import FetchObserver


class ObservedFetch(InterceptedRequest):
    """Shows an interceptor's request what it would be shown without this.

    Subclasses look at the same and call these methods.
    """

    __slots__ = ("_observer", "_seen")

    takes_whole = False

    def __init__(self, seen: InterceptedRequest | None = None) -> None:
        self._seen = seen
        """What an interceptor, or another one of these, makes of the request."""
        self._observer: FetchObserver | None = None

    def over(self, seen: InterceptedRequest | None) -> InterceptedRequest:
        """Return itself, in front of what is made of the request already."""
        self._seen = seen
        return self

    def held(self, start_ms: float, due_ms: float) -> None:
        """See InterceptedRequest."""
        if self._seen is not None:
            self._seen.held(start_ms, due_ms)

    def observer(self, now_ms: float) -> FetchObserver:
        """See InterceptedRequest."""
        if self._seen is not None:
            self._observer = self._seen.observer(now_ms)
        return self

    def session(self, error_code: int, session_id: int) -> None:
        """See FetchObserver."""
        if self._observer is not None:
            self._observer.session(error_code, session_id)

    def partitions(self, topic: TopicKey, fetched: Sequence[FetchedPartition]) -> None:
        """See FetchObserver."""
        if self._observer is not None:
            self._observer.partitions(topic, fetched)

    def ended(self) -> None:
        """See FetchObserver."""
        if self._observer is not None:
            self._observer.ended()
