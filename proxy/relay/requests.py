"""From the client to the broker: read each request's head, remember it, send it on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.quota.entities import QuotaKind
from proxy.relay.exchange import LOGIN_APIS, Exchange
from proxy.relay.flow import Flow, new_scratch
from proxy.relay.services import clock_ms
from proxy.wire.apis import (
    API_VERSIONS,
    FETCH,
    PRODUCE,
    Handling,
    api_name,
    downgrade_api_versions,
    handling,
)
from proxy.wire.frames import RequestHead, parse_request_head
from proxy.wire.prefix import fetch_max_wait_ms, produce_acks

if TYPE_CHECKING:
    from proxy.relay.connection import Connection

MAX_LOGIN_BYTES = 512 * 1024
"""The longest SASL request; Kafka's own limit (sasl.server.max.receive.size)."""

NO_ACKS = 0
"""Of a Produce request that gets no response."""

_shared_scratch = new_scratch()


class RequestRefused(Exception):  # noqa: N818 - named for what happened, as in the logs
    """A request that may not reach a broker; its connection is closed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RequestFlow(Flow):
    """Requests of one connection."""

    __slots__ = ("_conn", "_login")

    def __init__(self, conn: Connection) -> None:
        super().__init__(conn.services.loop, conn.services.pipes)
        self._conn = conn
        self._login: RequestHead | None = None

    def _scratch(self) -> memoryview:
        return _shared_scratch

    def _ended(self, *, mid_frame: bool) -> None:
        self._conn.close_client_ended(mid_frame=mid_frame)

    def _failed(self, error: Exception) -> None:
        self._conn.close_failed(error)

    def _idle(self) -> None:
        self._conn.requests_idle()

    def _take(self, view: memoryview) -> int:
        conn = self._conn
        limits = conn.services.limits
        head = parse_request_head(view, max_request_bytes=limits.max_request_bytes)
        if head is None:
            return self._need_more()
        if not conn.upstream_ready():
            return 0
        api_key, version = head.api_key, head.api_version
        how = handling(api_key, version)
        if how is Handling.REFUSE:
            raise RequestRefused(
                "unsupported_version",
                f"{api_name(api_key)} version {version} carries addresses that can't be rewritten",
            )
        exchange = Exchange(
            conn.session(head.client_id),
            api_key=api_key,
            version=version,
            correlation_id=head.correlation_id,
            handling=how,
            request_bytes=head.frame_bytes,
            sent_ms=clock_ms(),
        )
        if api_key == PRODUCE:
            acks = produce_acks(head, view)
            if acks is None:
                return self._need_more()
            self._charge_produce(exchange)
            if acks == NO_ACKS:
                conn.unanswered(exchange)
                return self._forward(view, head.frame_bytes)
        elif api_key == FETCH:
            if not self._note_wait(exchange, head, view):
                return self._need_more()
        elif api_key == API_VERSIONS and downgrade_api_versions(view, version):
            exchange.version = 0
        conn.asked(exchange)
        if api_key in LOGIN_APIS:
            if head.frame_bytes > MAX_LOGIN_BYTES:
                raise RequestRefused("too_long", f"a login of {head.frame_bytes} bytes")
            self._login = head
            return self._collect(view, head.frame_bytes)
        return self._forward(view, head.frame_bytes)

    def _charge_produce(self, exchange: Exchange) -> None:
        """Charge the request's own bytes now; what they cost is waited for at the response."""
        exchange.charge = exchange.session.quotas.charge(
            QuotaKind.PRODUCER_BYTE_RATE, exchange.request_bytes, exchange.sent_ms
        )

    def _note_wait(self, exchange: Exchange, head: RequestHead, view: memoryview) -> bool:
        """Note how long a Fetch may wait for data: that time is no load. False: more is needed."""
        if not exchange.session.quotas.has(QuotaKind.REQUEST_PERCENTAGE):
            return True
        wait_ms = fetch_max_wait_ms(head, view)
        if wait_ms is None:
            return False
        exchange.wait_ms = max(wait_ms, 0)
        return True

    def _whole_frame(self, frame: bytearray) -> None:
        head, self._login = self._login, None
        assert head is not None
        self._conn.login_asked(head, bytes(frame))
        self._send(frame)
