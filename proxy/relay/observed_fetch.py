"""Looks into Fetch responses beside what an interceptor is shown of them."""

from collections.abc import Callable, Sequence

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


class FetchWait(ObservedFetch):
    """Looks for a partition whose records end before its log: nobody waits who has more to send.

    `had_data` is called once if there is one, when all partitions were seen.
    """

    __slots__ = ("_had_data", "_is_cut")

    def __init__(self, had_data: Callable[[], None], observer: FetchObserver | None) -> None:
        super().__init__(observer)
        self._had_data = had_data
        self._is_cut = False

    def partitions(self, topic: TopicKey, fetched: Sequence[FetchedPartition]) -> None:
        """See FetchObserver."""
        for _, _, high_watermark, stable, _, records_bytes, end in fetched:
            # A reader of committed records gets none from the last stable offset on. Which one this
            # is is in the request: where the two differ, the answer counts as one at the end.
            log_end = stable if 0 <= stable < high_watermark else high_watermark
            if records_bytes and (end is None or end < log_end):
                self._is_cut = True
        super().partitions(topic, fetched)

    def ended(self) -> None:
        """See FetchObserver."""
        super().ended()
        if self._is_cut:
            self._had_data()
