"""Looks into Fetch responses beside what an interceptor is shown of them."""

from collections.abc import Sequence

from proxy.wire.fetch import FetchedPartition, TopicKey
from proxy.wire.fetch_response import FetchObserver


class ObservedFetch:
    """Shows `observer` what it would be shown without this; subclasses look at the same."""

    __slots__ = ("_observer",)

    def __init__(self, observer: FetchObserver | None = None) -> None:
        self._observer = observer

    def over(self, observer: FetchObserver | None) -> FetchObserver:
        """Return itself, in front of another one."""
        self._observer = observer
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
