"""Holds responses as long as a quota or an interceptor says, or has the client wait by itself."""

from metrics.clock import clock_ms
from proxy.quota.busy import BusyTime
from proxy.quota.delay_queue import NOT_DELAYED
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

    __slots__ = ("_busy_time", "delayed")

    def __init__(self, pair: PairState, scratch: memoryview) -> None:
        super().__init__(pair, scratch)
        self.delayed = NOT_DELAYED
        """The response that waits in the delay queue."""
        self._busy_time = BusyTime()

    def shorten_hold(self) -> None:
        """Hold a response for no longer than the client's quotas ask for, which were changed."""
        if self.delayed.waiting:
            exchange = self._pair.in_flight[0]
            if exchange.charge is not None:  # else it waits for something else
                owed_ms = exchange.session.quotas.owed_ms(exchange.charge.kind, clock_ms())
                self.hold_at_most(owed_ms)

    def hold_at_most(self, most_ms: float) -> None:
        """Hold a response that waits for no longer than so many milliseconds from now."""
        due_ms = clock_ms() + most_ms
        if not self.delayed.waiting or due_ms >= self.delayed.due_ms:
            return
        self.delayed.cancel()
        self._busy_time.held(due_ms)
        if most_ms:
            self._pause_until(due_ms, self._pair.in_flight[0])
        else:
            self.resume()

    def resume(self) -> None:
        """See FrameFlow."""
        in_flight = self._pair.in_flight
        if in_flight and in_flight[0].timed is not None:
            in_flight[0].timed.released(clock_ms())
        super().resume()

    def close(self) -> None:
        """See FrameFlow."""
        self.delayed.cancel()
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
        self.delayed = reaper.add(due_ms, self.resume)

    def _must_wait(self, exchange: Exchange) -> bool:
        """Return whether a whole response waits because its interceptor wants it; ask it again."""
        assert exchange.seen is not None
        now_ms = clock_ms()
        wait_ms = exchange.seen.wait_ms(now_ms)
        if wait_ms <= 0 or self._pair.life.state is DRAINING:
            return False
        self._pause_until(now_ms + min(wait_ms, WAIT_CHECK_MS), exchange)
        return True
