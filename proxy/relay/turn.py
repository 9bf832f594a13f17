"""The wait of a connection's next request for its turn at the gates of its client's quotas."""

from collections.abc import Callable

from metrics.clock import MS_PER_SECOND, clock_ms
from proxy.quota.client_quotas import ThrottleTime
from proxy.quota.delay_queue import Delayed
from proxy.quota.entities import QuotaKind
from proxy.quota.gate import Waiter
from proxy.relay.services import Services, ThrottleMode
from proxy.relay.session import ClientSession
from proxy.wire.apis import FETCH


class Turn:
    """Waits at the gates for the next request of a connection.

    Args:
        services: of the proxy.
        read_again: is called when the request that waits is to be read again.

    """

    __slots__ = ("_api_key", "_delayed", "_read_again", "_services", "_waiter")

    def __init__(self, services: Services, read_again: Callable[[], None]) -> None:
        self._services = services
        self._read_again = read_again
        self._waiter = Waiter(self._wake_at)
        self._delayed: Delayed | None = None
        self._api_key = FETCH

    def has_come(self, session: ClientSession, kinds: tuple[QuotaKind, ...], api_key: int) -> bool:
        """Return whether a request may be sent on now; if not, it waits until `read_again`."""
        waiter, now_ms = self._waiter, clock_ms()
        is_delayed = self._services.mode is ThrottleMode.DELAY
        self._api_key = api_key
        if not session.quotas.admit(kinds, waiter, now_ms, holds=is_delayed):
            return False
        since_ms, waiter.since_ms = waiter.since_ms, None
        if since_ms is not None and waiter.kind is not None and since_ms < now_ms:
            waited_ms = now_ms - since_ms
            charge = ThrottleTime(now_ms, round(waited_ms), waiter.kind, waiter.entity)
            self._services.count_throttled(charge, waited_ms / MS_PER_SECOND)
            if api_key == FETCH and session.interceptor is not None:
                session.interceptor.gated(since_ms, now_ms)
        return True

    def give_up(self) -> None:
        """Leave the gate, so that others come sooner."""
        self._waiter.leave(clock_ms())
        if self._delayed is not None:
            self._delayed.cancel()
            self._delayed = None

    def _wake_at(self, at_ms: float) -> None:
        if self._delayed is not None:
            self._delayed.cancel()
        reaper = self._services.reapers.for_api(self._api_key)
        self._delayed = reaper.add(max(at_ms, clock_ms()), self._woken)

    def _woken(self) -> None:
        self._delayed = None
        self._read_again()
