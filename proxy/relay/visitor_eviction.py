"""How long the client of a connection stays: for good, or until it is to go to its owner."""

import asyncio
from collections.abc import Callable

from structlog import get_logger

from metrics.clock import MS_PER_SECOND, clock_ms
from proxy.relay.lifecycle import OPEN
from proxy.relay.pair_state import PairState
from proxy.wire.apis import API_VERSIONS, FETCH, LIST_OFFSETS, PRODUCE, api_of

MIN_VISIT_S = 1.0
"""No connection is let go that is younger: a client that ignores addresses makes no hot loop."""

LAST_HOLD_MS = 1000.0
"""For how long a response that is held when its client is let go is held at most. What it owes is
known to the owner, too."""

DATA_APIS = frozenset({PRODUCE, FETCH, LIST_OFFSETS})
"""Which belong on a connection to a broker. One that came to a bootstrap port and sends none of
them may stay: it asks where to go."""

_log = get_logger(__name__)


class VisitorEviction:
    """One connection's; there is none without steering."""

    __slots__ = ("_carries_data", "_drain", "_is_decided", "_is_sent_on", "_pair", "_timer")

    def __init__(self, pair: PairState, drain: Callable[[], None]) -> None:
        self._pair = pair
        self._drain = drain
        self._is_decided = self._carries_data = self._is_sent_on = False
        self._timer: asyncio.TimerHandle | None = None

    def requested(self, api_key: int) -> None:
        """Record what the client asks for. Until it has logged in it is not known."""
        if api_key == API_VERSIONS or api_of(api_key).is_login:
            return
        self._is_decided = True
        self._carries_data |= api_key in DATA_APIS
        self.follow()

    def follow(self) -> None:
        """Send the client on soon if it has an owner elsewhere or is to ask anew; else it stays."""
        session = self._pair.client.current
        if session is None or not self._is_decided or self._is_sent_on:
            return
        session.follow_owner()
        only_asks = self._pair.origin.node_id is None and not self._carries_data
        if not only_asks and (session.must_go or session.lacks_fallback):
            self._let_go_soon()
        else:
            self.close()

    def send_on(self) -> None:
        """Send the client on soon, whoever owns it then: it gets no more answers here."""
        self._is_sent_on = True
        self._let_go_soon()

    def _let_go_soon(self) -> None:
        if self._timer is None:
            age_s = (clock_ms() - self._pair.began_ms) / MS_PER_SECOND
            delay_s = max(MIN_VISIT_S - age_s, 0.0)
            self._timer = self._pair.services.loop.call_later(delay_s, self._let_go)

    def close(self) -> None:
        """Send nobody on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _let_go(self) -> None:
        pair, self._timer = self._pair, None
        session = pair.client.current
        if session is None or pair.life.state is not OPEN:
            return
        if session.owner is None and not (self._is_sent_on or session.lacks_fallback):
            return
        pair.services.instruments.steered_connections_total.inc()
        owner = session.owner.name if session.owner is not None else None
        about = {"owner": owner, "client_id": session.identity.client_id}
        _log.debug("client let go to its owner", **about, **pair.origin.about)
        self._drain()
