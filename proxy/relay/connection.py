"""One client connection and the broker connection that belongs to it: their common life.

The pair is in one of few states: waiting for a first request (no upstream yet), dialling, open,
draining (no further requests, answers in flight still go out), closed. Whatever ends it, both
sockets are closed, what is held leaves the delay queue, and one log line and one count say why.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from enum import Enum, Flag, auto
from zlib import crc32

from structlog import get_logger

from metrics.clock import clock_ms
from proxy.quota.delay_queue import Delayed
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.relay.channel import BLOCKED, Channel, ChannelLost
from proxy.relay.exchange import QUOTA_KINDS, ClientSession, Exchange
from proxy.relay.flow import SLOW_FRAME_S
from proxy.relay.requests import RequestFlow, RequestRefused
from proxy.relay.responses import ResponseFlow
from proxy.relay.services import Services
from proxy.relay.turn import Turn
from proxy.relay.upstream import UpstreamError
from proxy.wire.frames import RequestHead
from proxy.wire.malformed import MalformedFrame, MalformedResponse
from proxy.wire.sasl import SaslExchange

LINGER_S = 1.0
"""How long a drained connection waits for the client to close its side."""

MAX_CLIENT_ID_CHARS = 255
"""A longer client id is known by its start and a checksum: it goes into labels and log lines."""

_discarded = memoryview(bytearray(4096))

_log = get_logger(__name__)


class State(Enum):
    """Where the pair is in its life."""

    NEW = "new"
    DIALLING = "dialling"
    OPEN = "open"
    LINGERING = "lingering"
    CLOSED = "closed"


class Pause(Flag):
    """Why requests are not read."""

    NONE = 0
    DIALLING = auto()
    FULL = auto()
    MUTED = auto()
    DRAINING = auto()
    LOGIN = auto()
    """Who the client is shows with the answer to its login."""
    GATED = auto()
    """The client owes a quota too much."""
    SERIAL = auto()
    """The client is over its request_percentage: one request at a time, as a broker takes them."""


_UNANSWERED = Pause.FULL | Pause.SERIAL
"""Pauses that end when requests are answered."""

_HELD_BACK = Pause.MUTED | Pause.GATED
"""Pauses that a client cannot end."""


class Connection:
    """A client, the broker it talks to, and the flow of frames each way."""

    def __init__(
        self,
        services: Services,
        client: Channel,
        *,
        listener: str,
        node_id: int | None,
        peer: str,
        user: str | None,
        dial: Callable[[Connection], Awaitable[Channel]],
        advertise: Callable[[int, str, int], tuple[str, int] | None],
        on_close: Callable[[Connection], None],
    ) -> None:
        self.services = services
        self.listener = listener
        self._node_id = node_id
        self.advertise = advertise
        """Returns the address that clients of this listener are told for a broker."""
        self.peer = peer
        self.in_flight: deque[Exchange] = deque()
        self.state = State.NEW
        self._client = client
        self._upstream: Channel | None = None
        self._dial = dial
        self._dialling: asyncio.Task[None] | None = None
        self._on_close = on_close
        self._user = user
        self._session: ClientSession | None = None
        self._client_id: str | None = None
        self._changes_id = False
        self._sasl: SaslExchange | None = None
        self._pauses = Pause.NONE
        self._muted: Delayed | None = None
        self._turn = Turn(services, lambda: self._unpause(Pause.GATED))
        self._linger: asyncio.TimerHandle | None = None
        self._requests = RequestFlow(self)
        self._responses = ResponseFlow(self)

    # Life

    def start(self) -> None:
        """Begin to read requests."""
        self._requests.connect(self._client, None)
        self._requests.run()

    @property
    def draining(self) -> bool:
        """Whether no further requests are taken; answers are held no more."""
        return Pause.DRAINING in self._pauses

    def drain(self) -> None:
        """Take no further requests; close when all answers are out.

        An answer that is held goes out when it is due, or when its reaper releases everything.
        """
        if self.state is State.OPEN:
            self._pause(Pause.DRAINING)
            self._unpause(_HELD_BACK)
            self._turn.give_up()
            self._finish_if_drained()
        elif self.state is not State.LINGERING:
            self.close("drained")

    def shorten_hold(self) -> None:
        """Hold a response for no longer than the client's quotas ask for, which were changed."""
        self._responses.shorten_hold()

    def check_idle(self, now_s: float, timeout_s: float) -> None:
        """Close the pair if nothing has moved for too long, unless we hold it back ourselves.

        A request that was begun must go on sooner, see SLOW_FRAME_S.
        """
        owed_since_s = self._requests.owed_since_s
        if owed_since_s is not None and now_s - owed_since_s >= min(SLOW_FRAME_S, timeout_s):
            self._reject("slow_frame", "a request was begun and not finished")
            return
        last = max(self._requests.last_active, self._responses.last_active)
        held_back = self._responses.held or bool(self._pauses & _HELD_BACK)
        if now_s - last < timeout_s or held_back or self.state is State.DIALLING:
            return
        if self._responses.sending_blocked:
            self._reject("client_not_reading", "the client takes no data")
        elif self._requests.sending_blocked or self._answers_due:
            self._upstream_error("timeout", "the broker does not answer")
        elif self.state is State.NEW:
            self._reject("no_request", "the client sends nothing")
        else:
            self.close("idle")

    def close(self, reason: str) -> None:
        """Close both sides at once. Does nothing the second time."""
        if self.state is State.CLOSED:
            return
        if self.state is State.LINGERING:
            self.services.loop.remove_reader(self._client.fd)
        self.state = State.CLOSED
        _log.debug("connection closed", **self._about(reason))
        self._requests.close()
        self._responses.close()
        if self._muted is not None:
            self._muted.cancel()
        self._turn.give_up()
        for exchange in self.in_flight:
            if exchange.expected is not None:
                exchange.expected.cancel()
        if self._linger is not None:
            self._linger.cancel()
        if self._dialling is not None:
            self._dialling.cancel()
        if self._session is not None:
            self._session.close()
        self.in_flight.clear()
        self._client.sock.close()
        if self._upstream is not None:
            self._upstream.sock.close()
        self._on_close(self)

    async def closed(self) -> None:
        """Wait for what `close` cancelled."""
        if self._dialling is not None:
            await asyncio.gather(self._dialling, return_exceptions=True)

    # What ends it

    def close_client_ended(self, *, mid_frame: bool) -> None:
        """Handle the end of the client's stream.

        No Kafka client closes one side only, so nobody waits for the answers that are due.
        """
        self._charge_abandoned()
        if mid_frame:
            self._reject("truncated_frame", "the client closed within a request")
        else:
            self.close("client closed")

    def close_upstream_ended(self, detail: str = "the broker closed the connection") -> None:
        """Handle the end of the broker's stream; an error only when answers were due."""
        if self._answers_due:
            self._upstream_error("closed", f"{detail}, with answers due")
        else:
            self.close("broker closed")

    def close_failed(self, error: Exception) -> None:
        """Close for an exception of a flow."""
        match error:
            case MalformedFrame() | RequestRefused():
                self._reject(error.reason, str(error))
            case UpstreamError():
                self._upstream_error(error.reason, str(error))
            case MalformedResponse():
                self._upstream_error("bad_response", str(error))
            case ChannelLost(channel=channel) if channel is self._upstream:
                self.close_upstream_ended(f"connection lost: {error}")
            case OSError():
                self._charge_abandoned()
                self.close("client lost")
            case _:
                _log.error("unexpected error", exc_info=error, **self._about("internal_error"))
                self._reject("internal_error", str(error))

    @property
    def _answers_due(self) -> bool:
        return bool(self.in_flight) or self._responses.mid_frame

    def _reject(self, reason: str, detail: str) -> None:
        if self.state is not State.CLOSED:
            self.services.instruments.connections_rejected_total.labels(reason).inc()
            _log.warning("client rejected", **self._about(reason), detail=detail)
            self.close(reason)

    def _upstream_error(self, reason: str, detail: str) -> None:
        if self.state is not State.CLOSED:
            self.services.instruments.upstream_errors_total.labels(reason).inc()
            _log.warning("upstream failed", **self._about(reason), detail=detail)
            self.close(reason)

    def _about(self, reason: str) -> dict[str, str]:
        return {"reason": reason, "peer": self.peer, "listener": self.listener}

    # Upstream

    def upstream_ready(self) -> bool:
        """Say whether requests can be sent on; start to dial with the first one."""
        if self.state is State.OPEN:
            return True
        if self.state is State.NEW:
            self.state = State.DIALLING
            self._pause(Pause.DIALLING)
            self._dialling = self.services.loop.create_task(self._connect())
        return False

    async def _connect(self) -> None:
        try:
            upstream = await self._dial(self)
        except Exception as error:  # whatever it is, it ends this pair only
            self._dialling = None
            self.close_failed(error)
            return
        self._dialling = None
        if self.state is not State.DIALLING:
            upstream.sock.close()
            return
        self.state = State.OPEN
        self._upstream = upstream
        self._requests.connect(self._client, upstream)
        self._responses.connect(upstream, self._client)
        self._responses.run()
        self._unpause(Pause.DIALLING)

    # Requests

    def session(self, client_id: str | None) -> ClientSession:
        """Return the client's session. The first client id that is not empty counts from then on.

        Kafka's clients use one for each connection. With several a client could have a quota for
        each request.
        """
        session = self._session
        if session is not None:
            if client_id == self._client_id:
                return session
            if self._client_id:
                if not self._changes_id:
                    self._changes_id = True
                    _log.warning(
                        "client id changes within a connection, the first one counts",
                        first=self._client_id,
                        now=_shortened(client_id),
                        **self._about("client_id"),
                    )
                return session
            session.close()
        self._client_id = client_id
        identity = ClientIdentity(self.listener, self._user, _shortened(client_id))
        self._session = ClientSession(self.services, identity, self._node_id)
        return self._session

    def admits(self, exchange: Exchange) -> bool:
        """Say whether quotas let a request be sent on; if not, read it again later."""
        plan, session = exchange.plan, exchange.session
        is_used_up = plan.costs_time and session.quotas.is_paced(QuotaKind.REQUEST_PERCENTAGE)
        if is_used_up and self.in_flight:
            self._turn.give_up()  # others need not wait for its answer
            self._pause(Pause.SERIAL)
            return False
        byte_rate = plan.api.byte_rate
        if byte_rate is None or self._turn.has_come(
            session, QUOTA_KINDS[byte_rate], exchange.api_key
        ):
            return True
        self._pause(Pause.GATED)
        return False

    def _charge_abandoned(self) -> None:
        """Charge what a client has asked for and does not wait for: the broker sends it anyway."""
        now_ms = clock_ms()
        for exchange in self.in_flight:
            expected = exchange.expected
            if expected is not None and not exchange.measured:
                expected.cancel()
                quotas = exchange.session.quotas
                quotas.charge(QuotaKind.CONSUMER_BYTE_RATE, expected.size, now_ms)

    def asked(self, exchange: Exchange) -> None:
        """Remember a request that is sent on and will be answered."""
        self.services.count_request(exchange.api_key, exchange.version)
        self.in_flight.append(exchange)
        if len(self.in_flight) >= self.services.limits.max_in_flight_requests:
            self._pause(Pause.FULL)

    def answered(self) -> None:
        """Go on reading requests if there were too many unanswered ones."""
        if self._pauses & _UNANSWERED and not (self.in_flight and Pause.SERIAL in self._pauses):
            self._unpause(_UNANSWERED)

    def unanswered(self, exchange: Exchange) -> None:
        """Count a Produce request without acknowledgement: what can be held is the next one."""
        self.services.count_request(exchange.api_key, exchange.version)
        exchange.session.count_bytes(exchange.api_key, exchange.request_bytes)

    def mute(self, due_ms: float, api_key: int) -> None:
        """Do not read requests until `due_ms`."""
        if self._muted is not None and self._muted.waiting:
            if self._muted.due_ms >= due_ms:
                return
            self._muted.cancel()
        self._pause(Pause.MUTED)
        self._muted = self.services.reapers.for_api(api_key).add(
            due_ms, lambda: self._unpause(Pause.MUTED)
        )

    def _pause(self, reason: Pause) -> None:
        self._pauses |= reason
        self._requests.paused = True

    def _unpause(self, reason: Pause) -> None:
        self._pauses &= ~reason
        if self.state is State.OPEN and not self._pauses:
            self._requests.resume()

    # Logins

    def login_begins(self) -> None:
        """Read no further request until the SASL request that is sent on is answered."""
        self._pause(Pause.LOGIN)

    def login_asked(self, head: RequestHead, frame: bytes) -> None:
        """Read a SASL request that is sent on."""
        if self._sasl is None:
            self._sasl = SaslExchange()
        self._sasl.request(head, frame)
        if self._sasl.is_raw:
            raise RequestRefused("unsupported_sasl", "SaslHandshake version 0, use version 1")

    def login_answered(self, exchange: Exchange, frame: bytes) -> None:
        """Read a SASL response; after the last one the user is known."""
        assert self._sasl is not None
        self._sasl.response(exchange.api_key, exchange.version, frame)
        principal = self._sasl.principal
        if principal is not None and principal != self._user:
            self._user = principal
            if self._session is not None:
                self._session.close()
                self._session = None

    def login_ends(self) -> None:
        """Read requests again."""
        self._unpause(Pause.LOGIN)

    # The end of a drained pair

    def flow_idle(self) -> None:
        """Handle that one of the flows has nothing to do."""
        if self.draining:
            self._finish_if_drained()

    def _finish_if_drained(self) -> None:
        if self.state is not State.OPEN or self._answers_due or self._requests.under_way:
            return
        self.state = State.LINGERING
        self._requests.close()
        self._responses.close()
        loop = self.services.loop
        try:
            self._client.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.close("client lost")
            return
        self._linger = loop.call_later(LINGER_S, self.close, "drained")
        loop.add_reader(self._client.fd, self._discard)

    def _discard(self) -> None:
        """Read on until the client closes: closing first could cost it our last answer."""
        try:
            got = self._client.recv_into(_discarded)
        except OSError:
            got = 0
        if got != BLOCKED and not got:
            self.close("drained")


def _shortened(client_id: str | None) -> str | None:
    if client_id is None or len(client_id) <= MAX_CLIENT_ID_CHARS:
        return client_id
    return f"{client_id[:MAX_CLIENT_ID_CHARS]}~{crc32(client_id.encode()):08x}"
