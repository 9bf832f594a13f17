"""Holds responses as long as a quota or an interceptor says, or has the client wait by itself."""

from metrics.clock import clock_ms
from proxy.quota.busy import BusyTime
from proxy.quota.delay_queue import Delayed
from proxy.quota.meters import ThrottleTime
from proxy.relay.frame_flow import FrameFlow
from proxy.relay.lifecycle import DRAINING
from proxy.relay.pair_state import PairState
from proxy.relay.services import ThrottleMode
from proxy.relay.session import Exchange
from proxy.wire.apis import FETCH, PRODUCE

LONGEST_MUTE_MS = 2000.0
"""A client that is told to wait may wait with its heartbeats, too. The gate keeps the rest."""

MIN_HOLD_MS = 0.5
"""Shorter holds are not worth a timer; the quota carries what is left over."""

WAIT_CHECK_MS = 20.0
"""Between two questions to an interceptor whether a response should still wait."""


class HeldResponses(FrameFlow):
    """A flow of which the oldest response may be held."""

    __slots__ = ("_busy_time", "_delayed")

    def __init__(self, pair: PairState, scratch: memoryview) -> None:
        super().__init__(pair, scratch)
        self._delayed: Delayed | None = None
        self._busy_time = BusyTime()

    @property
    def held(self) -> bool:
        """Whether a response waits in the delay queue."""
        return self._delayed is not None and self._delayed.waiting

    @property
    def held_until_ms(self) -> float | None:
        """When the response that waits in the delay queue is due; None when none does."""
        return self._delayed.due_ms if self._delayed is not None and self.held else None

    def shorten_hold(self) -> None:
        """Hold a response for no longer than the client's quotas ask for, which were changed."""
        if self._delayed is None or not self._delayed.waiting:
            return
        exchange, now_ms = self._pair.in_flight[0], clock_ms()
        if exchange.charge is None:  # it waits for something else
            return
        owed_ms = exchange.session.quotas.owed_ms(exchange.charge.kind, now_ms)
        if now_ms + owed_ms >= self._delayed.due_ms:
            return
        self._delayed.cancel()
        self._busy_time.held(now_ms + owed_ms)
        if owed_ms:
            self._pause_until(now_ms + owed_ms, exchange)
        else:
            self.resume()

    def hold_at_most(self, most_ms: float) -> None:
        """Hold a response that waits for no longer than so many milliseconds from now."""
        due_ms = clock_ms() + most_ms
        if self._delayed is not None and self._delayed.waiting and due_ms < self._delayed.due_ms:
            self._delayed.cancel()
            self._busy_time.held(due_ms)
            self._pause_until(due_ms, self._pair.in_flight[0])

    def resume(self) -> None:
        """See FrameFlow."""
        in_flight = self._pair.in_flight
        if in_flight and in_flight[0].timed is not None:
            in_flight[0].timed.released(clock_ms())
        super().resume()

    def close(self) -> None:
        """See FrameFlow."""
        if self._delayed is not None:
            self._delayed.cancel()
        super().close()

    def _hold(self, exchange: Exchange, charge: ThrottleTime, now_ms: float) -> bool:
        """Start the hold of a response, or mute its client; return whether it must wait."""
        services, api_key = self._pair.services, exchange.api_key
        hold_ms = charge.due_ms - now_ms
        if hold_ms < MIN_HOLD_MS or self._pair.life.state is DRAINING:
            return False
        exchange.charge = charge
        services.count_throttled(charge, hold_ms)
        if exchange.seen is not None:
            exchange.seen.held(now_ms, charge.due_ms)
        if services.mode is ThrottleMode.MUTE:
            mute_ms = min(hold_ms, LONGEST_MUTE_MS)
            exchange.throttle_ms = round(mute_ms)
            self._pair.mute(now_ms + mute_ms, api_key, charge)
            if exchange.timed is not None:
                exchange.timed.told_to_wait(mute_ms)
            return False
        if api_key in (FETCH, PRODUCE) and not exchange.plan.clients_throttle:
            exchange.throttle_ms = round(hold_ms)
        self._busy_time.held(charge.due_ms)
        self._pause_until(charge.due_ms, exchange)
        return True

    def _pause_until(self, due_ms: float, exchange: Exchange) -> None:
        self.paused = True
        if exchange.timed is not None:
            exchange.timed.held(clock_ms())
        reaper = self._pair.services.reapers.for_api(exchange.api_key)
        self._delayed = reaper.add(due_ms, self.resume)

    def _must_wait(self, exchange: Exchange) -> bool:
        """Return whether a whole response waits because its interceptor wants it; ask it again."""
        assert exchange.seen is not None
        now_ms = clock_ms()
        wait_ms = exchange.seen.wait_ms(now_ms)
        if wait_ms <= 0 or self._pair.life.state is DRAINING:
            return False
        self._pause_until(now_ms + min(wait_ms, WAIT_CHECK_MS), exchange)
        return True
