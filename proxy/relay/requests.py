"""From the client to the broker: read each request's head, remember it, send it on."""

from metrics.clock import clock_ms
from proxy.quota.entities import QuotaKind
from proxy.relay.frame_flow import FrameFlow, new_scratch
from proxy.relay.interceptor import INTERCEPTED_APIS
from proxy.relay.lifecycle import Pause, State
from proxy.relay.pump import Wait
from proxy.relay.session import Exchange
from proxy.wire.apis import (
    API_VERSIONS,
    FETCH,
    JOIN_GROUP,
    PRODUCE,
    Handling,
    api_name,
    downgrade_api_versions,
    is_known,
    plan_of,
)
from proxy.wire.frames import RequestHead, ends_with_frame, parse_request_head
from proxy.wire.request_fields import (
    fetch_limits,
    lower_fetch_bytes,
    produce_acks,
    session_timeout_ms,
)

MAX_LOGIN_BYTES = 512 * 1024
"""The longest SASL request; Kafka's own limit (sasl.server.max.receive.size)."""

MAX_SEEN_BYTES = 4 << 20
"""The longest request that is read as a whole for an interceptor: a Fetch of some 100,000
partitions, four times what a producer sends by default. A longer one is not shown."""

NO_ACKS = 0  # of a Produce request that gets no response

FULL_BYTES = 1 << 20
"""The default limit of a partition in a Fetch (max.partition.fetch.bytes). A response of half of
that, or of what was asked for, shows that the broker did not wait for data."""

_API_KEY = slice(4, 6)  # of a frame
_PRODUCE = PRODUCE.to_bytes(2, "big")


class RequestRefused(Exception):  # noqa: N818 - named for what happened, as in the logs
    """A request that may not reach a broker; its connection is closed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RequestFlow(FrameFlow):
    """Requests of one connection."""

    __slots__ = ("_collecting",)

    _scratch = new_scratch()
    _collecting: tuple[RequestHead, Exchange]
    """What is taken whole: a login, or what an interceptor is to see."""

    def _ended(self) -> None:
        is_whole = not (self._starved or self.under_way) and ends_with_frame(self.stash)
        self._conn.close_client_ended(mid_frame=not is_whole)

    def _take(self, view: memoryview) -> int:
        conn = self._conn
        services = conn.services
        head = parse_request_head(view, max_request_bytes=services.limits.max_request_bytes)
        if head is None:
            return self._need_more(view)
        if conn.life.state is not State.OPEN:
            conn.dial()
            return 0
        api_key, version = head.api_key, head.api_version
        plan = plan_of(api_key, version)
        how = plan.handling
        if how is Handling.REFUSE or (how is Handling.UNKNOWN and not services.passes_unknown_apis):
            text = f"{api_name(api_key)} ({api_key}) version {version} is not offered"
            raise RequestRefused("unsupported_version", f"{text}: its response may carry addresses")
        acks = None
        if api_key == PRODUCE:
            acks = produce_acks(head, view)
            if acks is None:
                return self._need_more(view)
        elif api_key == API_VERSIONS and downgrade_api_versions(view, version):
            version, plan = 0, plan_of(api_key, 0)
        session = conn.client.session(head.client_id)
        frame_bytes = head.frame_bytes
        exchange = Exchange(
            session, plan, api_key, version, head.correlation_id, frame_bytes, clock_ms()
        )
        if session.quotas.is_bounded and not self._is_admitted(head, view, exchange):
            return 0
        interceptor = session.interceptor
        if (
            api_key in INTERCEPTED_APIS
            and interceptor is not None
            and acks != NO_ACKS
            and frame_bytes <= MAX_SEEN_BYTES
            and interceptor.wants(api_key, exchange.sent_ms)
        ):
            # Read before it is sent on: the answer must not come first.
            self._count(exchange, acks)
            if len(view) < frame_bytes:
                self._collecting = head, exchange
                return self._collect(view, frame_bytes)
            exchange.seen = interceptor.request(head, view[:frame_bytes], exchange.sent_ms)
            if exchange.seen.answer is not None:
                conn.responses.run()
                return frame_bytes
            return self._forward(view, frame_bytes)
        if plan.api.is_login:
            if frame_bytes > MAX_LOGIN_BYTES:
                raise RequestRefused("too_long", f"a login of {frame_bytes} bytes")
            self._collecting = head, exchange
            # What follows is read when it is known who sends it.
            conn.pause(Pause.LOGIN)
            taken = self._collect(view, frame_bytes)
        else:
            taken = self._forward(view, frame_bytes)
        # Only now, while the broker is at work already.
        self._count(exchange, acks)
        return taken

    def _is_admitted(self, head: RequestHead, view: memoryview, exchange: Exchange) -> bool:
        """Return whether quotas let a request pass, if not read again later; limit a Fetch."""
        session, api_key = exchange.session, head.api_key
        asked = None
        if api_key == FETCH:
            asked = fetch_limits(head, view)
            if asked is None:
                self._need_more(view)
                return False
        elif api_key == JOIN_GROUP and is_known(api_key, head.api_version):
            timeout_ms = session_timeout_ms(head, view)
            if timeout_ms is None:
                self._need_more(view)
                return False
            session.quotas.joined(timeout_ms)
        if not self._conn.admits(exchange):
            return False
        if asked is not None:
            granted_bytes, exchange.expected = session.quotas.grant(
                asked.max_bytes, session.last_fetch_bytes, exchange.sent_ms
            )
            if granted_bytes < asked.max_bytes:
                lower_fetch_bytes(head, view, granted_bytes)
            exchange.wait_ms = max(asked.max_wait_ms, 0)
            exchange.full_bytes = min(granted_bytes, FULL_BYTES) // 2
        return True

    def _count(self, exchange: Exchange, acks: int | None) -> None:
        """Record a request that is sent on; a Produce request's bytes are charged now."""
        conn, session = self._conn, exchange.session
        conn.services.count_request(exchange.api_key, exchange.version)
        if acks is not None:
            exchange.charge = session.quotas.charge(
                QuotaKind.PRODUCER_BYTE_RATE, exchange.request_bytes, exchange.sent_ms
            )
        if acks == NO_ACKS:  # without a response; what can be held is the next request
            session.count_bytes(exchange.api_key, exchange.request_bytes)
            return
        conn.in_flight.append(exchange)
        if len(conn.in_flight) >= conn.services.limits.max_in_flight_requests:
            conn.pause(Pause.FULL)

    def _wait_paused(self) -> Wait:
        """See FrameFlow. Until the client sends more, its end is watched for.

        Kafka appends what came before an orderly end: a Produce request waits its turn.
        """
        if self.wait is not Wait.END:
            return Wait.END
        assert self._source is not None
        is_produce = self.stash[_API_KEY] == _PRODUCE
        return Wait.OWNER if is_produce or not self._source.has_ended() else Wait.CLOSED

    def _whole_frame(self, frame: bytearray) -> None:
        head, exchange = self._collecting
        if not exchange.plan.api.is_login:
            interceptor = exchange.session.interceptor
            assert interceptor is not None
            exchange.seen = interceptor.request(head, memoryview(frame), exchange.sent_ms)
            if exchange.seen.answer is not None:
                self._conn.responses.run()
                return
        elif self._conn.client.login_request(head, bytes(frame)):
            raise RequestRefused("unsupported_sasl", "SaslHandshake version 0, use version 1")
        self._send(frame)
