"""From the client to the broker: read each request's head, remember it, send it on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING

from metrics import CounterChild
from metrics.clock import clock_ms
from proxy.quota.entities import PRODUCER_BYTE_RATE, QuotaKind
from proxy.relay.frame_flow import READ_BYTES_HELD, FrameFlow, new_scratch
from proxy.relay.interceptor import INTERCEPTED_APIS, ClientSentOn
from proxy.relay.lifecycle import Pause
from proxy.relay.pump import CLOSED, END, OWNER, Wait
from proxy.relay.services import ThrottleMode
from proxy.relay.session import ClientSession, Exchange
from proxy.relay.timing import ApiTimes, ExchangeTimes
from proxy.wire.apis import (
    API_VERSIONS,
    FETCH,
    JOIN_GROUP,
    LENGTH_BYTES,
    PRODUCE,
    ApiPlan,
    Handling,
    api_name,
    downgrade_api_versions,
    is_known,
    plan_of,
)
from proxy.wire.frames import RequestHead, ends_with_frame, parse_request_head
from proxy.wire.request_fields import (
    acks_end,
    fetch_limits,
    fetch_limits_end,
    lower_fetch_bytes,
    produce_acks,
    session_timeout_ms,
)

if TYPE_CHECKING:
    from proxy.relay.connection import Connection

MAX_LOGIN_BYTES = 512 * 1024
"""The longest SASL request; Kafka's own limit (sasl.server.max.receive.size)."""

MAX_SEEN_BYTES = 4 << 20
"""The longest request that is read as a whole for an interceptor: a Fetch of some 100,000
partitions, four times what a producer sends by default. A longer one is not shown."""

NO_ACKS = 0  # of a Produce request that gets no response

FULL_BYTES = 1 << 20
"""The default limit of a partition in a Fetch (max.partition.fetch.bytes). A response of half of
that, or of what was asked for, shows that the broker did not wait for data."""

START_BYTES = 12
"""What every request begins with: its length, API key, version and correlation id."""

MAX_KINDS, MAX_KNOWN_BYTES = 64, 512
"""So many API versions of a connection are remembered, each by so many bytes at most: a client uses
some ten, and cannot have much remembered."""

_START = Struct(">iIi")  # API key and version together
_API_KEY = slice(4, 6)  # of a frame
_PRODUCE = PRODUCE.to_bytes(2, "big")
_DELAY = ThrottleMode.DELAY

_buffer = new_scratch()
_scratch = memoryview(_buffer)


class RequestRefused(Exception):  # noqa: N818 - named for what happened, as in the logs
    """A request that may not reach a broker; its connection is closed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class _RequestKind:
    """What a connection's requests have in common that begin with the same bytes."""

    session: ClientSession
    plan: ApiPlan
    api_key: int
    version: int
    """Of the response: where the broker answers in another one, that one."""
    client_id: str | None
    header_end: int
    start: bytes
    """The bytes behind the correlation id by which the kind is known."""
    end: int
    """Where they end in the frame."""
    acks: int | None
    """That a Produce request asks for; None: it is another one."""
    is_intercepted: bool
    """Whether an interceptor may ask for it."""
    count: CounterChild
    times: ApiTimes
    bounded_by: QuotaKind | None
    """At whose gate it waits."""
    plain_start: bytes | None
    """As `start`, of those that quotas alone may keep from being sent on as they are, None for
    others: of a Fetch up to its limits, once they are known."""
    max_bytes: int | None
    """The limit of such a Fetch, None before it is known; 0 for another request."""
    wait_ms: int = 0
    """For how long such a Fetch may wait for data."""

    def head(self, frame_bytes: int, correlation_id: int) -> RequestHead:
        """Return the header of one of them."""
        return RequestHead(
            frame_bytes,
            self.api_key,
            self.version,
            correlation_id,
            self.client_id,
            self.header_end,
        )


class RequestFlow(FrameFlow):
    """Requests of one connection."""

    __slots__ = ("_collecting", "_kinds", "_timed")

    _collecting: tuple[RequestHead, Exchange]
    """What is taken whole: a login, or what an interceptor is to see."""

    def __init__(self, conn: Connection) -> None:
        super().__init__(conn, _scratch)
        self._kinds: dict[int, _RequestKind] = {}
        """The latest of each API and version."""
        self._timed: ExchangeTimes | None = None
        """Of the request whose body is on its way."""

    def _sent_rest(self) -> None:
        """See FrameFlow."""
        if self._timed is not None:
            self._timed.sent_ms = clock_ms()
            self._timed = None

    def _ended(self) -> None:
        is_whole = not (self._starved or self.under_way) and ends_with_frame(self.stash)
        conn = self._conn
        conn.services.paced_steps.add(partial(conn.close_client_ended, mid_frame=not is_whole))

    def _take(self, view: memoryview) -> int:
        conn = self._conn
        kind = self._known_kind(view)
        if kind is None:
            limit_bytes = conn.services.limits.max_request_bytes
            head = parse_request_head(view, max_request_bytes=limit_bytes)
            if head is None:
                return self._need_more(view)
            if not conn.takes(head):
                return 0
            kind = self._new_kind(head, view)
            if kind is None:
                return self._need_more(view)
        length, _, correlation_id = _START.unpack_from(view)
        frame_bytes: int = LENGTH_BYTES + length
        session, plan = kind.session, kind.plan
        exchange = Exchange(
            session, plan, kind.api_key, kind.version, correlation_id, frame_bytes, clock_ms()
        )
        if session.quotas.is_bounded and not self._is_admitted(kind, view, exchange):
            return 0
        if frame_bytes > READ_BYTES_HELD:
            self._read_ahead(session.quotas, PRODUCER_BYTE_RATE)
        interceptor = session.interceptor
        if (
            kind.is_intercepted
            and interceptor is not None
            and frame_bytes <= MAX_SEEN_BYTES
            and interceptor.wants(kind.api_key, exchange.sent_ms)
        ):
            # Read before it is sent on: the answer must not come first.
            self._count(kind, exchange)
            head = kind.head(frame_bytes, correlation_id)
            if len(view) < frame_bytes:
                self._collecting = head, exchange
                return self._collect(view, frame_bytes)
            if not self._is_for_broker(head, exchange, view[:frame_bytes]):
                return frame_bytes
            taken = self._forward(view, frame_bytes)
            if exchange.timed is not None:
                exchange.timed.sent_on(clock_ms())
            assert exchange.seen is not None
            exchange.seen.sent()
            return taken
        if plan.api.is_login:
            if frame_bytes > MAX_LOGIN_BYTES:
                raise RequestRefused("too_long", f"a login of {frame_bytes} bytes")
            self._collecting = kind.head(frame_bytes, correlation_id), exchange
            # What follows is read when it is known who sends it.
            conn.pause(Pause.LOGIN)
            taken = self._collect(view, frame_bytes)
        else:
            taken = self._forward(view, frame_bytes)
        # Only now, while the broker is at work already.
        self._count(kind, exchange)
        return taken

    def _pass_on(self, have: int) -> bool:
        """See FrameFlow."""
        if have < START_BYTES:
            return False
        conn, scratch = self._conn, self._scratch
        length, api, correlation_id = _START.unpack_from(scratch)
        kind = self._kinds.get(api)
        if kind is None or length != have - LENGTH_BYTES:
            return False
        start, session = kind.plain_start, kind.session
        if (
            start is None
            or have < START_BYTES + len(start)
            or not _buffer.startswith(start, START_BYTES)
            or session is not conn.client.current
            or length > conn.services.limits.max_request_bytes
        ):
            return False
        quotas, now_ms, holds = session.quotas, clock_ms(), conn.services.mode is _DELAY
        asked_bytes = kind.max_bytes
        if not quotas.admits_whole(kind.bounded_by, conn.waiter, asked_bytes, now_ms, holds=holds):
            return False
        self._send(scratch[:have])
        if have > READ_BYTES_HELD:
            self._read_ahead(quotas, PRODUCER_BYTE_RATE)
        self.read_bytes = self.first_bytes
        exchange = Exchange(
            session, kind.plan, kind.api_key, kind.version, correlation_id, have, now_ms
        )
        if kind.max_bytes:
            granted_bytes, exchange.expected = quotas.grant(
                kind.max_bytes, session.last_fetch_bytes, now_ms, holds=holds
            )
            exchange.wait_ms = kind.wait_ms
            exchange.full_bytes = min(granted_bytes, FULL_BYTES) // 2
        self._count(kind, exchange)
        return True

    def _known_kind(self, view: memoryview) -> _RequestKind | None:
        """Return the kind of a request that begins like an earlier one, None for another."""
        if len(view) < START_BYTES:
            return None
        length, api, _ = _START.unpack_from(view)
        kind = self._kinds.get(api)
        if (
            kind is None
            or view[START_BYTES : kind.end] != kind.start
            or kind.session is not self._conn.client.current
            or LENGTH_BYTES + length < kind.end
            or length > self._conn.services.limits.max_request_bytes
        ):
            return None
        return kind

    def _new_kind(self, head: RequestHead, view: memoryview) -> _RequestKind | None:
        """Return the kind of any request, None while more bytes are needed; remember it.

        Raises RequestRefused for one that may not reach a broker.
        """
        services, api_key, version = self._conn.services, head.api_key, head.api_version
        plan, end = plan_of(api_key, version), head.header_end
        how = plan.handling
        if how is Handling.REFUSE or (how is Handling.UNKNOWN and not services.passes_unknown_apis):
            text = f"{api_name(api_key)} ({api_key}) version {version} is not offered"
            raise RequestRefused("unsupported_version", f"{text}: its response may carry addresses")
        acks = None
        if api_key == PRODUCE:
            acks = produce_acks(head, view)
            if acks is None:
                return None
            end = acks_end(head, view)
        is_changed = api_key == API_VERSIONS and downgrade_api_versions(view, version)
        if is_changed:
            version, plan = 0, plan_of(api_key, 0)
        session = self._conn.client.session(head.client_id)
        if self._conn.stay is not None:
            self._conn.stay.requested(api_key)
        start = bytes(view[START_BYTES:end])
        is_intercepted = api_key in INTERCEPTED_APIS and acks != NO_ACKS
        is_looked_into = plan.api.is_login or api_key == JOIN_GROUP
        is_looked_into |= is_intercepted and session.interceptor is not None
        byte_rate = plan.api.byte_rate
        kind = _RequestKind(
            session=session,
            plan=plan,
            api_key=api_key,
            version=version,
            client_id=head.client_id,
            header_end=head.header_end,
            start=start,
            end=end,
            acks=acks,
            is_intercepted=is_intercepted,
            count=services.request_counter(api_key, version),
            times=services.times.of(api_key),
            bounded_by=None if byte_rate is None else QuotaKind(byte_rate),
            plain_start=None if is_looked_into else start,
            max_bytes=None if api_key == FETCH else 0,
        )
        _, api, _ = _START.unpack_from(view)
        has_room = api in self._kinds or len(self._kinds) < MAX_KINDS
        if has_room and end <= MAX_KNOWN_BYTES and not is_changed:
            self._kinds[api] = kind
        return kind

    def _is_admitted(self, kind: _RequestKind, view: memoryview, exchange: Exchange) -> bool:
        """Return whether quotas let a request pass, if not read again later; limit a Fetch."""
        session, api_key, start = kind.session, kind.api_key, kind.header_end
        asked = None
        if api_key == FETCH:
            asked = fetch_limits(kind.version, view, start, exchange.request_bytes)
            if asked is None:
                self._need_more(view)
                return False
        elif api_key == JOIN_GROUP and is_known(api_key, kind.version):
            head = kind.head(exchange.request_bytes, exchange.correlation_id)
            timeout_ms = session_timeout_ms(head, view)
            if timeout_ms is None:
                self._need_more(view)
                return False
            session.quotas.joined(timeout_ms)
        if not self._conn.admits(exchange):
            return False
        if asked is not None:
            max_wait_ms, max_bytes = asked
            wait_ms = max(max_wait_ms, 0)
            granted_bytes, exchange.expected = session.quotas.grant(
                max_bytes,
                session.last_fetch_bytes,
                exchange.sent_ms,
                holds=self._conn.services.mode is _DELAY,
            )
            if granted_bytes < max_bytes:
                head = kind.head(exchange.request_bytes, exchange.correlation_id)
                lower_fetch_bytes(head, view, granted_bytes)
            elif kind.max_bytes is None and kind.plain_start is not None:
                end = fetch_limits_end(kind.version, start)
                kind.plain_start = bytes(view[START_BYTES:end])
                kind.max_bytes, kind.wait_ms = max_bytes, wait_ms
            exchange.wait_ms = wait_ms
            exchange.full_bytes = min(granted_bytes, FULL_BYTES) // 2
        return True

    def _count(self, kind: _RequestKind, exchange: Exchange) -> None:
        """Record a request that is sent on; a Produce request's bytes are charged now."""
        conn, session = self._conn, exchange.session
        kind.count.value += 1
        if kind.acks is not None:
            exchange.charge = session.charge(
                PRODUCER_BYTE_RATE, exchange.request_bytes, exchange.sent_ms
            )
            if kind.acks == NO_ACKS:  # without a response; what can be held is the next request
                session.count_bytes(exchange.api_key, exchange.request_bytes)
                return
        conn.in_flight.append(exchange)
        times = kind.times
        times.left -= 1
        if times.left <= 0 or exchange.sent_ms >= times.due_ms:
            exchange.timed = times.begin(exchange.sent_ms, exchange.gated_ms, clock_ms())
            if self._is_sending:
                self._timed = exchange.timed
        if len(conn.in_flight) >= conn.services.limits.max_in_flight_requests:
            conn.pause(Pause.FULL)

    def send_unanswered(self) -> bool:
        """Send on requests without a response that were read, whatever they wait for.

        Their client does not send them again. Return whether none is left; else there is one on
        its way, or this was called from within `run`, which is not done.
        """
        if self._running:
            return False
        try:
            self._take_unanswered()
        except Exception as error:  # whatever it is, it ends this pair only
            self._conn.close_failed(error)
            return False
        if self.under_way:
            self.run()
            return False
        return True

    def _take_unanswered(self) -> None:
        while self.stash and not self.under_way:
            have = len(self.stash)
            self._scratch[:have] = self.stash
            view = self._scratch[:have]
            kind = self._known_kind(view)
            if kind is None or kind.acks != NO_ACKS:
                return
            taken = self._take(view)
            if not taken:
                return
            self.stash = bytes(view[taken:])

    def _wait_paused(self) -> Wait:
        """See FrameFlow. Until the client sends more, its end is watched for.

        Kafka appends what came before an orderly end: a Produce request waits its turn.
        """
        if self.wait is not END:
            return END
        assert self._source is not None
        is_produce = self.stash[_API_KEY] == _PRODUCE
        return OWNER if is_produce or not self._source.has_ended() else CLOSED

    def _is_for_broker(self, head: RequestHead, exchange: Exchange, frame: memoryview) -> bool:
        """Show a request, the latest of those in flight; return whether it is to be sent on."""
        conn, interceptor = self._conn, exchange.session.interceptor
        assert interceptor is not None
        try:
            exchange.seen = interceptor.request(head, frame, exchange.sent_ms)
        except ClientSentOn:
            conn.in_flight.pop()
            conn.send_on()
            return False
        if exchange.seen.answer is None:
            return True
        conn.own_answers += 1
        conn.responses.run()
        return False

    def _whole_frame(self, frame: bytearray) -> None:
        head, exchange = self._collecting
        timed = exchange.timed
        if timed is not None:
            timed.read_anew(clock_ms())
        if not exchange.plan.api.is_login:
            if not self._is_for_broker(head, exchange, memoryview(frame)):
                return
        elif self._conn.client.login_request(head, bytes(frame)):
            raise RequestRefused("unsupported_sasl", "SaslHandshake version 0, use version 1")
        self._send(frame)
        if timed is not None:
            timed.sent_on(clock_ms())
        if exchange.seen is not None:
            exchange.seen.sent()
