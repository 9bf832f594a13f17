"""What both flows of a connection work on: who the client is, what is in flight, what pauses it."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from metrics.clock import clock_ms
from metrics.lock_free import VALUE
from proxy.cluster.upstream import Address
from proxy.quota.delay_queue import NOT_DELAYED
from proxy.quota.entities import PRODUCER_BYTE_RATE, REQUEST_PERCENTAGE, QuotaKind
from proxy.quota.gate import Gate, GateWaiter
from proxy.quota.meter import Meter
from proxy.quota.meters import ThrottleDecision
from proxy.quota.turns import TURN_BYTES
from proxy.relay.exchange import NO_ACKS, Exchange
from proxy.relay.intercepted_frames import LaneFrameCopies
from proxy.relay.lane import Kind, Lane
from proxy.relay.lifecycle import NO_PAUSE, OPEN, UNANSWERED, PairLifecycle, ReadPauseReason
from proxy.relay.listener import ClientOrigin
from proxy.relay.services import Services
from proxy.relay.session import ClientIdentityTracker, ClientSession
from proxy.wire.apis import FETCH
from proxy.wire.frames import RequestHead
from proxy.wire.produce import AddressFreeResponseShapes

AdvertiseTo = Callable[[ClientSession, int, str, int], Address | None]


class _Flow(Protocol):
    """A flow, as the pauses need it."""

    paused: bool

    @property
    def under_way(self) -> bool: ...
    def resume(self) -> None: ...
    def run(self) -> None: ...


class PairState:
    """The state of a pair, and what its flows ask of the connection."""

    __slots__ = (
        *("_gated", "_gated_api", "_in_flight", "advertise", "began_ms", "client", "kinds", "lane"),
        *("life", "muted", "muted_for", "origin", "own_answers", "services", "shapes", "shown"),
        *("__weakref__", "waiter"),
    )

    requests: _Flow
    responses: _Flow
    close_ended: Callable[[object], None]
    """Closes the pair, in its turn, for the end of what the flow reads that is given."""
    close_failed: Callable[[Exception], None]
    """Closes the pair for an exception of a flow, or of dialling."""
    close_stuck: Callable[[object], None]
    """Closes the pair for a frame that a flow keeps in memory, which others need."""
    finish_if_drained: Callable[[], None]
    """Closes the client's side of a draining pair when all that is due has been sent."""
    session_of: Callable[[RequestHead], ClientSession | None]
    """Returns the session of a request that begins unlike earlier ones; None: it is taken later.

    The first one of a connection waits for the broker's, and for the client's connection_rate.
    Raises ConnectionRejected when the client may not have this connection.
    """
    send_on: Callable[[], None]
    """Takes no further requests, and lets the client go soon: it is to ask its owner."""

    def __init__(
        self, services: Services, origin: ClientOrigin, user: str | None, advertise: AdvertiseTo
    ) -> None:
        self.services = services
        self.life = PairLifecycle()
        self.client = ClientIdentityTracker(services, origin, user)
        self._in_flight: list[Exchange] = []
        self.own_answers = 0
        """Of them, how many an interceptor has answered: the broker has not got them."""
        self.lane: Lane | None = None
        """Sends on what is plain. None before there are both ends, and where it cannot."""
        self.kinds: list[Kind] = []
        """What it sends on, the latest first."""
        self.shown = LaneFrameCopies(services.unshown, self.close_failed)
        """What an interceptor is to see of what the lane has sent on."""
        self.shapes = AddressFreeResponseShapes()
        """Of responses to Produce that name no broker."""
        self.advertise = advertise
        self.origin = origin
        self.began_ms = clock_ms()
        self.muted = NOT_DELAYED
        """Until its client's throttle time is over."""
        self.muted_for: ThrottleDecision | None = None
        """What the client was muted for last."""
        self.waiter = GateWaiter(self._wake_at)
        self._gated = NOT_DELAYED
        self._gated_api = FETCH

    @property
    def in_flight(self) -> list[Exchange]:
        """Requests without a response yet, the oldest first."""
        if self.lane is not None and self.lane.waiting:
            self._take_from_lane(self.lane.waiting)
        return self._in_flight

    @property
    def next_in_flight(self) -> list[Exchange]:
        """The oldest of them at least: the others stay in the lane."""
        if not self._in_flight and self.lane is not None:
            self._take_from_lane(1)
        return self._in_flight

    def _take_from_lane(self, most: int) -> None:
        assert self.lane is not None
        self.shown.show()
        for kind, correlation_id, request_bytes, sent_ms, shown in self.lane.take(most):
            exchange = Exchange(kind, correlation_id, request_bytes, sent_ms)
            if shown is not None:
                exchange.seen = self.shown.request(kind, shown, sent_ms)
            if kind.max_bytes:  # from now on it counts as one that was admitted by itself
                self.grant(exchange, kind.max_bytes, clock_ms())
                if exchange.expected is not None:
                    exchange.expected.limit = kind.max_bytes  # it has asked for what was lent
            self._in_flight.append(exchange)

    def grant(
        self,
        exchange: Exchange,
        asked_bytes: int,
        now_ms: float,
        paid: dict[Gate, int] | None = None,
    ) -> int:
        """Return how many bytes a Fetch may ask for; its response counts until it comes.

        `paid`: what its turns have cost, if it had any; see GateWaiter.
        """
        session, holds = exchange.kind.session, self.services.holds
        granted_bytes, exchange.expected = session.quotas.grant(
            asked_bytes, session.fetch_sizes, now_ms, holds=holds, paid=paid
        )
        return granted_bytes

    def shut_lane(self) -> None:
        """Send nothing on but from Python, until its flows are run again."""
        if self.lane is not None:
            self.lane.request_bytes = self.lane.response_bytes = 0

    def admits(self, exchange: Exchange, came: int, topics: Iterable[Meter] = ()) -> bool:
        """Return whether quotas let a request be sent on; if not, it is read again later.

        `came`: how many bytes of it are there. It waits at the gates of `topics`, too. A bounded
        client gets no data here when another member owns it: all members at once would give it a
        burst each. What a drain still sends on waits for nothing.
        """
        if self.life.state is not OPEN:
            return True
        kind = exchange.kind
        session, bounded_by = kind.session, kind.bounded_by
        is_used_up = kind.plan.costs_time and session.quotas.is_paced(REQUEST_PERCENTAGE)
        if is_used_up and self.in_flight:
            self._leave_gate()  # others need not wait for its answer
            self.pause(ReadPauseReason.SERIAL)
            return False
        waits = kind.acks == NO_ACKS or not session.has_asked
        if kind.plan.costs_time and waits and (owed_ms := self._owed_time_ms(exchange)):
            self.pause(ReadPauseReason.GATED)
            self._gated_api = kind.api_key
            self._wake_at(exchange.sent_ms + owed_ms)
            return False
        if bounded_by is None:
            return True
        if session.must_go and session.quotas.has(bounded_by):
            self._leave_gate()
            self.pause(ReadPauseReason.GATED)
            return False
        return self._passes_gate(exchange, bounded_by, exchange.sent_ms, came, topics)

    def _owed_time_ms(self, exchange: Exchange) -> float:
        """Return for how long a request waits for `request_percentage` that no hold can slow down.

        That is one without a response, and a connection's first one, for one hold at most: its
        client may have left others before they were answered, or while that was held.
        """
        session, now_ms = exchange.kind.session, exchange.sent_ms
        if exchange.kind.acks == NO_ACKS:
            return session.quotas.owed_ms(REQUEST_PERCENTAGE, now_ms)
        session.has_asked = True
        return session.quotas.next_hold_ms(REQUEST_PERCENTAGE, now_ms)

    def admits_more(self, exchange: Exchange) -> bool:
        """Return whether more of a Produce request may be read; if not, it goes on later."""
        if self.life.state is not OPEN:
            return True
        return self._passes_gate(exchange, PRODUCER_BYTE_RATE, clock_ms(), 0)

    def _passes_gate(
        self,
        exchange: Exchange,
        kind: QuotaKind,
        now_ms: float,
        came: int,
        topics: Iterable[Meter] = (),
    ) -> bool:
        waiter, session = self.waiter, exchange.kind.session
        holds = self.services.holds
        self._gated_api = exchange.kind.api_key
        is_fetch = self._gated_api == FETCH
        # Of what a request announces no more than a turn: the rest counts when it comes.
        announced = min(exchange.request_bytes, TURN_BYTES)
        size = session.fetch_sizes.last_bytes if is_fetch else announced
        counted = None if is_fetch else came
        if not session.quotas.admit(
            kind, waiter, size, now_ms, holds=holds, came=counted, topics=topics
        ):
            self.pause(ReadPauseReason.GATED)
            return False
        since_ms, waiter.since_ms = waiter.since_ms, None
        if since_ms is not None and since_ms < now_ms:
            exchange.gated_ms = waited_ms = now_ms - since_ms
            charge = ThrottleDecision(now_ms, round(waited_ms), waiter.meter)
            self.services.count_throttled(charge, waited_ms, session.usage)
            if is_fetch:
                session.interceptor.gated(since_ms, now_ms)
        return True

    def _leave_gate(self) -> None:
        """Give the turn at a quota's gate up, so that others come sooner."""
        self.waiter.leave(clock_ms())
        self._gated.cancel()

    def _wake_at(self, at_ms: float) -> None:
        """Read the request that waits at a gate again at that time, and not before."""
        self._gated.cancel()
        due_ms = max(at_ms, clock_ms())
        self._gated = self.services.reapers.add(self._gated_api, due_ms, self._ask_again)

    def _ask_again(self) -> None:
        """Read on at a quota's gate: the next request, or the body that waits there."""
        self.unpause(ReadPauseReason.GATED)
        if self.requests.under_way:  # whatever else keeps requests from being read
            self.requests.run()

    @property
    def own_answer(self) -> bytes | None:
        """The answer to the oldest request in flight if that is an interceptor's, else None.

        It waits like any other: the client gets its responses in the order of its requests.
        """
        seen = self._in_flight[0].seen if self.own_answers else None
        return None if seen is None else seen.answer

    def send_own_answer(self, send: Callable[[bytes], None]) -> bool:
        """Send the answer to the oldest request in flight if it is the interceptor's own.

        Return whether it was. One for each call: `send` may keep a part that is to be sent first.
        """
        if (answer := self.own_answer) is None:
            return False
        exchange, self.own_answers = self._in_flight.pop(0), self.own_answers - 1
        send(answer)
        exchange.kind.relayed.cells[VALUE] += exchange.request_bytes + len(answer)
        if self.life.pauses is not NO_PAUSE:
            self.on_response()
        return True

    def on_response(self) -> None:
        """Read requests again if there were too many unanswered ones."""
        pauses = self.life.pauses
        if pauses & UNANSWERED and not (self.in_flight and ReadPauseReason.SERIAL in pauses):
            self.unpause(UNANSWERED)

    def mute(self, due_ms: float, api_key: int, charge: ThrottleDecision) -> None:
        """Read no requests until `due_ms`, for what was charged."""
        self.muted_for = charge
        if self.muted.waiting and self.muted.due_ms >= due_ms:
            return
        self.muted.cancel()
        self.pause(ReadPauseReason.MUTED)
        go_on = partial(self.unpause, ReadPauseReason.MUTED)
        self.muted = self.services.reapers.add(api_key, due_ms, go_on)

    def pause(self, reason: ReadPauseReason) -> None:
        """Read no further requests. Only when the pair is open."""
        self.life.pause(reason)
        self.requests.paused = True
        self.shut_lane()

    def unpause(self, reason: ReadPauseReason) -> None:
        """Read requests again, if there is no other reason against it."""
        if self.life.unpause(reason):
            self.requests.resume()
