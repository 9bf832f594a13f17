"""One client connection and the broker connection that belongs to it: their common life.

Its states are in `lifecycle`. Whatever ends it, both sockets are closed, what is held leaves the
delay queue, and one log line and one count say why.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial

from structlog import get_logger

from metrics.clock import MS_PER_SECOND, clock_ms
from proxy.cluster.upstream import UpstreamError
from proxy.quota.busy import FIRST_USUAL_MS, BusyTime
from proxy.quota.connection_quotas import TOO_MANY, ConnectionRejected
from proxy.quota.delay_queue import NOT_DELAYED
from proxy.quota.entities import CONSUMER_BYTE_RATE, REQUEST_PERCENTAGE
from proxy.quota.meter import NS_PER_SECOND
from proxy.relay.channel import Channel, ChannelLost, ConnectionRates
from proxy.relay.exchange import Exchange
from proxy.relay.frame_flow import SLOW_FRAME_S
from proxy.relay.interceptor import NotOwnerError
from proxy.relay.lane import Lane
from proxy.relay.lifecycle import OPEN, PairPhase, ReadPauseReason
from proxy.relay.listener import ClientOrigin
from proxy.relay.pair_state import AdvertiseTo, PairState
from proxy.relay.requests import RequestFlow
from proxy.relay.responses import ResponseFlow
from proxy.relay.services import Services
from proxy.relay.session import ClientSession
from proxy.wire.apis import API_VERSIONS, FETCH, LIST_OFFSETS, PRODUCE, api_of
from proxy.wire.frames import MalformedFrame, MalformedResponse, RequestHead

GIVE_WAY_S = 10.0
"""Without traffic for so long, a connection is closed for one of its client from elsewhere, where a
rule allows no more. Members of a group have a heartbeat every 3 s by default."""

CLOSE_WAIT_S = 1.0
"""For so long a drained connection waits for the client to close its side."""

FIRST_REQUEST_S = 30.0
"""A connection begins its first request within this time. All Kafka clients do so at once."""

MIN_VISIT_S = 1.0
"""No connection is let go that is younger: a client that ignores addresses makes no hot loop."""

LAST_HOLD_MS = 1000.0
"""For how long a response that is held when its client is let go is held at most. What it owes is
known to the owner, too."""

DATA_APIS = frozenset({PRODUCE, FETCH, LIST_OFFSETS})
"""Which belong on a connection to a broker. One that came to a bootstrap port and sends none of
them may stay: it asks where to go."""

_discarded = memoryview(bytearray(4096))
_log = get_logger(__name__)


class VisitorEviction:
    """How long the client of a connection stays: for good, or until it is to go to its owner."""

    __slots__ = ("_carries_data", "_is_decided", "_is_sent_on", "_pair", "_timer")

    def __init__(self, pair: Connection) -> None:
        self._pair = pair
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
        pair.drain()
        pair.responses.hold_at_most(LAST_HOLD_MS)


class Connection(PairState):
    """A client, the broker it talks to, and the flow of frames each way.

    `channel` is the client's, `user` whom its TLS certificate names. `dial` connects to the broker
    for the first request, of this client id, or raises UpstreamError; `advertise` returns the
    address that a client is told for a broker; `on_heard` is called once, with its first request or
    before its end, and `on_close` before both sides are closed.
    """

    __slots__ = (
        *("_close_wait", "_dial", "_dialling", "_on_close", "_on_heard", "channel", "crowded"),
        *("eviction", "number", "requests", "responses", "traffic", "upstream"),
    )

    def __init__(
        self,
        services: Services,
        channel: Channel,
        origin: ClientOrigin,
        user: str | None,
        *,
        dial: Callable[[Connection, str | None], Awaitable[Channel]],
        advertise: AdvertiseTo,
        on_heard: Callable[[], object],
        on_close: Callable[[Connection], None],
    ) -> None:
        super().__init__(services, origin, user, advertise)
        self.number = next(services.numbers)
        self.traffic = ConnectionRates(self.began_ms)
        self.channel = channel
        self.upstream: Channel | None = None
        self._dial = dial
        self._dialling: asyncio.Task[None] | None = None
        self._on_heard: Callable[[], object] | None = on_heard
        self._on_close = on_close
        self.crowded = NOT_DELAYED
        """Until its client's connection_rate lets it go on."""
        self._close_wait: asyncio.TimerHandle | None = None
        self.eviction = VisitorEviction(self)
        self.requests: RequestFlow = RequestFlow(self)
        self.responses: ResponseFlow = ResponseFlow(self)

    def start(self) -> None:
        """Begin to read requests."""
        self.requests.connect(self.channel, None)
        self.requests.run()

    def drain(self) -> None:
        """Take no further requests; close when all answers are out.

        An answer that is held goes out when it is due, or when its reaper releases everything.
        """
        if self.life.state is PairPhase.OPEN:
            self.life.move(PairPhase.DRAINING)
            self.requests.paused = True
            self.shut_lane()
            self._leave_gate()
            self.requests.run()  # what was begun waits no longer
        elif self.life.state not in (PairPhase.DRAINING, PairPhase.LINGERING):
            self.close("drained")

    def check_idle(self, now_s: float, timeout_s: float) -> None:
        """Close the pair if nothing has moved for too long, unless we hold it back ourselves."""
        owed_since_s = self.requests.owed_since_s
        if owed_since_s is not None and now_s - owed_since_s >= min(SLOW_FRAME_S, timeout_s):
            self._reject("slow_frame", "a request was begun and not finished")
            return
        if self.life.is_held_back and self.channel.is_reset:  # it is not read from meanwhile
            self.close_abandoned("client lost")
            return
        last = self._last_active
        if self.life.state is PairPhase.NEW:
            timeout_s = min(timeout_s, FIRST_REQUEST_S)
        if now_s - last < timeout_s or self.responses.delayed.waiting or self.life.is_held_back:
            return
        if self.responses.sending_blocked:
            self._reject("client_not_reading", "the client takes no data")
        elif self.requests.sending_blocked or self._answers_due:
            self._upstream_error("timeout", "the broker does not answer")
        elif self.life.state is PairPhase.NEW:
            self._reject("no_request", "the client sends nothing")
        else:
            self.close("idle")

    def close_stuck(self, flow: object) -> None:
        """See PairState."""
        if flow is self.responses and self.responses.sending_blocked:
            self._reject("client_not_reading", "the client takes no data, and others wait for room")
        elif flow is self.requests and not self.requests.sending_blocked:
            self._reject("slow_frame", "a request is not finished, and others wait for room")
        else:
            self._upstream_error("timeout", "the broker does not go on, and others wait for room")

    def close(self, reason: str) -> None:
        """Close both sides at once. Does nothing the second time."""
        if self.life.state is PairPhase.CLOSED:
            return
        self.life.move(PairPhase.CLOSED)
        self._heard()
        self.shown.show()
        _log.debug("connection closed", reason=reason, **self.origin.about)
        self.requests.close()
        self.responses.close()
        self.muted.cancel()
        self._leave_gate()
        self.eviction.close()
        for exchange in self.in_flight:
            for each in (exchange.expected, exchange.topics):
                if each is not None:
                    each.cancel()
        if self._close_wait is not None:
            self._close_wait.cancel()
            self.services.loop.remove_reader(self.channel.fd)
        if self._dialling is not None:
            self._dialling.cancel()
        self.client.leave()
        self.crowded.cancel()
        self.in_flight.clear()
        self._on_close(self)
        self.channel.sock.close()
        if self.upstream is not None:
            self.upstream.sock.close()
        self.services.loop.call_soon(self._forget_parts)

    def _forget_parts(self) -> None:
        """Forget all that refers back, so that it needs no garbage collector to be freed.

        Not within `close`: one of the flows may be what calls it.
        """
        del self.requests, self.responses, self.waiter, self.eviction, self.shown
        if self.lane is not None:
            self.lane.close()
        self.kinds.clear()
        self._close_wait = None

    def _forget_dialling(self, _: asyncio.Task[None]) -> None:
        self._dialling = None

    def close_abandoned(self, reason: str) -> None:
        """Close both sides with answers due, which are charged: the broker sends them anyway.

        Does nothing the second time.
        """
        if self.life.state is PairPhase.CLOSED:
            return
        now_ms, kind = clock_ms(), CONSUMER_BYTE_RATE
        due = [each for each in self.in_flight if not each.measured]
        for exchange in due:
            if exchange.expected is not None:
                exchange.expected.cancel()
                exchange.kind.session.charge(kind, exchange.expected.size, now_ms)
        costly = [
            each
            for each in due
            if each.kind.plan.costs_time and each.kind.session.quotas.has(REQUEST_PERCENTAGE)
        ]
        upstream, busy_time = self.upstream, self.responses.busy_time
        if costly:
            self.upstream = None
        self.close(reason)
        if costly and upstream is not None:
            self.services.abandoned.keep(upstream, partial(_charge_time, busy_time, costly))

    async def closed(self) -> None:
        """Wait for what `close` cancelled."""
        if self._dialling is not None:
            await asyncio.gather(self._dialling, return_exceptions=True)

    def close_ended(self, flow: object) -> None:
        """See PairState. No Kafka client closes one side only."""
        close = self._close_upstream_ended
        if flow is self.requests:
            close = partial(self._close_client_ended, mid_frame=self.requests.is_cut_off)
        self.services.paced_steps.add(close, self.origin.ip)

    def _close_client_ended(self, *, mid_frame: bool) -> None:
        if mid_frame:
            self._reject("truncated_frame", "the client closed within a request")
        else:
            self.close_abandoned("client closed")

    def _close_upstream_ended(self, detail: str = "the broker closed the connection") -> None:
        """Close for the end of the broker's stream; an error only when answers were due."""
        if self.life.state is PairPhase.CLOSED:
            return
        if self._answers_due:
            self._upstream_error("closed", f"{detail}, with answers due")
        else:
            self.close("broker closed")

    def close_failed(self, error: Exception) -> None:
        """See PairState. A broker that ends loses thousands at once: each is closed in its turn."""
        in_turn = self.services.paced_steps.add
        match error:
            case MalformedFrame() | ConnectionRejected():
                self._reject(error.reason, str(error))
            case UpstreamError():
                in_turn(partial(self._upstream_error, error.reason, str(error)))
            case MalformedResponse():
                self._upstream_error("bad_response", str(error))
            case ChannelLost(channel=channel) if channel is self.upstream:
                in_turn(partial(self._close_upstream_ended, f"connection lost: {error}"))
            case OSError():
                in_turn(partial(self.close_abandoned, "client lost"))
            case NotOwnerError():
                in_turn(partial(self.close, "sent on to its owner"))
            case _:
                reason = "internal_error"
                log = self.services.log
                log.error("unexpected error", exc_info=error, reason=reason, **self.origin.about)
                self._reject(reason, str(error))

    @property
    def _last_active(self) -> float:
        """When something was read last, in the loop's time."""
        last = max(self.requests.last_active, self.responses.last_active)
        return last if self.lane is None else max(last, self.lane.active_ns / NS_PER_SECOND)

    @property
    def _answers_due(self) -> bool:
        return bool(self.in_flight) or self.responses.mid_frame

    def _reject(self, reason: str, detail: str) -> None:
        if self.life.state is not PairPhase.CLOSED:
            self.services.count_rejected(reason, **self.origin.about, detail=detail)
            self.close_abandoned(reason)

    def _upstream_error(self, reason: str, detail: str) -> None:
        if self.life.state is not PairPhase.CLOSED:
            node_id = self.origin.node_id
            self.services.count_upstream_error(reason, node_id, **self.origin.about, detail=detail)
            self.close(reason)

    def session_of(self, head: RequestHead) -> ClientSession | None:
        """See PairState."""
        is_open = self.life.state is OPEN
        if not is_open and self.life.state is not PairPhase.NEW:
            return None
        wait_ms = self.client.enter(head.api_key, head.client_id, clock_ms(), self._give_way)
        go_on = partial(self.unpause, ReadPauseReason.CROWDED)
        if not is_open:
            self.life.move(PairPhase.DIALLING)
            self._heard()
            self.requests.paused = True
            go_on = partial(self._begin_dialling, head.client_id)
        elif wait_ms:
            self.pause(ReadPauseReason.CROWDED)
        if wait_ms:
            self.crowded = self.services.reapers.add(head.api_key, clock_ms() + wait_ms, go_on)
        elif not is_open:
            go_on()
        if wait_ms or not is_open:
            return None
        session = self.client.session(head.client_id)
        self.eviction.requested(head.api_key)
        return session

    def _heard(self) -> None:
        if self._on_heard is not None:
            self._on_heard()
            self._on_heard = None

    def _begin_dialling(self, client_id: str | None) -> None:
        self._dialling = self.services.loop.create_task(self._connect(client_id))
        self._dialling.add_done_callback(self._forget_dialling)

    def follow_changes(self) -> None:
        """Wait for no longer than the client's quotas ask for now; send it on if it is to go.

        Either may have changed: the quotas, or which member owns the client.
        """
        slot, session, charge = self.client.slot, self.client.current, self.muted_for
        self.requests.forget_lane()
        self.eviction.follow()
        self.responses.shorten_hold()
        is_to_go = session is not None and session.must_go
        if ReadPauseReason.GATED in self.life.pauses and self.waiter.gate is None and not is_to_go:
            self._gated.cancel()  # without a turn, it just waits
            self._ask_again()
        if slot is not None and self.crowded.waiting:
            now_ms = clock_ms()
            due_ms = now_ms + self.services.connection_quotas.still_ms(slot, now_ms)
            if due_ms < self.crowded.due_ms and (go_on := self.crowded.cancel()):
                self.crowded = self.services.reapers.add(API_VERSIONS, due_ms, go_on)
        elif (
            session is not None
            and charge is not None
            and self.muted.waiting
            and not session.quotas.owed_ms(charge.meter.kind, clock_ms())
        ):
            self.muted.release_now()

    def send_on(self) -> None:
        """See PairState."""
        if self.life.state is OPEN:
            self.pause(ReadPauseReason.SENT_ON)
            self.eviction.send_on()

    def _give_way(self) -> bool:
        """Close an idle connection for one of its client from an address with fewer."""
        is_busy = self._answers_due or self.requests.owed_since_s is not None
        is_held_back = self.life.state is not OPEN or self.life.is_held_back
        if is_busy or is_held_back or self.services.loop.time() - self._last_active < GIVE_WAY_S:
            return False
        self._reject(TOO_MANY, "idle, and its address had most of its client's")
        return True

    async def _connect(self, client_id: str | None) -> None:
        try:
            upstream = await self._dial(self, client_id)
        except Exception as error:  # whatever it is, it ends this pair only
            self.close_failed(error)
            return
        if self.life.state is not PairPhase.DIALLING:
            upstream.sock.close()
            return
        self.upstream = upstream
        self.services.paced_steps.add(self._open, self.origin.ip)

    def _open(self) -> None:
        """Send the first request on, unless the connection has been closed since."""
        upstream = self.upstream
        if self.life.state is not PairPhase.DIALLING or upstream is None:
            return
        self.life.move(PairPhase.OPEN)
        services, requests, responses = self.services, self.requests, self.responses
        requests.connect(self.channel, upstream)
        responses.connect(upstream, self.channel)
        if Lane is not None and services.lane:
            by_tls = [None if each.is_plain else each for each in (self.channel, upstream)]
            self.lane = lane = Lane(
                self.channel.fd,
                upstream.fd,
                services.limits.max_in_flight_requests,
                (self._in_flight, self.kinds, requests.leave_lane, responses.leave_lane, *by_tls),
            )
            ready = (requests, lane.requests_ready), (responses, lane.responses_ready)
            for flow, run in ready:
                flow.ready = partial(flow.run_lane, run) if any(by_tls) else run
        responses.run()
        self.unpause(ReadPauseReason.NONE)

    def finish_if_drained(self) -> None:
        """See PairState."""
        if self.requests.under_way or self.requests.is_unanswered_next or self._answers_due:
            return
        self.life.move(PairPhase.LINGERING)
        self.requests.close()
        self.responses.close()
        try:
            self.channel.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.close("client lost")
            return
        loop = self.services.loop
        self._close_wait = loop.call_later(CLOSE_WAIT_S, self.close, "drained")
        loop.add_reader(self.channel.fd, self._discard)

    def _discard(self) -> None:
        """Read on until the client closes: closing first could cost it our last answer."""
        try:
            got = self.channel.recv_into(_discarded)
        except OSError:
            got = 0
        if not got:
            self.close("drained")


def _charge_time(busy_time: BusyTime, exchanges: list[Exchange]) -> None:
    """Charge the time that requests took whose client has left: the first is answered now.

    A broker drops most of what is behind it when the connection ends.
    """
    now_ms = clock_ms()
    first, *behind = exchanges
    busy_ms = busy_time.answered(first.sent_ms, first.wait_ms, now_ms)
    first.kind.session.charge(REQUEST_PERCENTAGE, busy_ms, now_ms)
    for exchange in behind:
        exchange.kind.session.charge(REQUEST_PERCENTAGE, FIRST_USUAL_MS, now_ms)
