"""From the client to the broker: read each request's head, remember it, send it on."""

from metrics.clock import clock_ms
from proxy.quota.entities import QuotaKind
from proxy.relay.exchange import Exchange
from proxy.relay.flow import Flow, new_scratch
from proxy.relay.following import FOLLOWED_APIS
from proxy.relay.pair import Pair
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
    FetchLimits,
    fetch_limits,
    lower_fetch_bytes,
    produce_acks,
    session_timeout_ms,
)

MAX_LOGIN_BYTES = 512 * 1024
"""The longest SASL request; Kafka's own limit (sasl.server.max.receive.size)."""

MAX_FOLLOWED_BYTES = 4 << 20
"""The longest request of a followed client that is read as a whole: a Fetch of some 100,000
partitions, four times what a producer sends by default. A longer one is not followed."""

NO_ACKS = 0
"""Of a Produce request that gets no response."""

FULL_BYTES = 1 << 20
"""The default limit of a partition in a Fetch (max.partition.fetch.bytes). A response of half of
that, or of what was asked for, shows that the broker did not wait for data."""


_API_KEY_END = 6
_PRODUCE = PRODUCE.to_bytes(2, "big")


class RequestRefused(Exception):  # noqa: N818 - named for what happened, as in the logs
    """A request that may not reach a broker; its connection is closed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RequestFlow(Flow):
    """Requests of one connection."""

    __slots__ = ("_conn", "_followed", "_login")

    _scratch = new_scratch()

    watches_end = True

    def __init__(self, conn: Pair) -> None:
        super().__init__(conn.services.loop, conn.services.pipes)
        self._conn = conn
        self._login: RequestHead | None = None
        self._followed: tuple[RequestHead, Exchange] | None = None

    def _ended(self, *, mid_frame: bool) -> None:
        whole = not mid_frame and ends_with_frame(self._stash)
        self._conn.close_client_ended(mid_frame=not whole)

    def _failed(self, error: Exception) -> None:
        self._conn.close_failed(error)

    def _idle(self) -> None:
        self._conn.flow_idle()

    def _take(self, view: memoryview) -> int:
        conn = self._conn
        limits = conn.services.limits
        head = parse_request_head(view, max_request_bytes=limits.max_request_bytes)
        if head is None:
            return self._need_more(view)
        if not conn.upstream_ready():
            return 0
        api_key, version = head.api_key, head.api_version
        plan = plan_of(api_key, version)
        if plan.handling is Handling.REFUSE or (
            plan.handling is Handling.UNKNOWN and not conn.services.passes_unknown_apis
        ):
            raise RequestRefused(
                "unsupported_version",
                f"{api_name(api_key)} ({api_key}) version {version} is not offered: "
                "its response may carry addresses",
            )
        acks: int | None = None
        if api_key == PRODUCE:
            acks = produce_acks(head, view)
            if acks is None:
                return self._need_more(view)
        elif api_key == API_VERSIONS and downgrade_api_versions(view, version):
            version = 0
        exchange = Exchange(conn.session(head.client_id), head, version, clock_ms())
        if exchange.session.quotas.is_bounded and not self._is_admitted(head, view, exchange):
            return 0
        if plan.api.is_login:
            taken = self._collect_login(head, view)
        elif api_key in FOLLOWED_APIS and acks != NO_ACKS and self._follow(head, exchange):
            # Read before it is sent on: the answer must not come first.
            self._note(exchange, acks)
            if len(view) < head.frame_bytes:
                self._followed = head, exchange
                return self._collect(view, head.frame_bytes)
            _read_followed(head, exchange, view[: head.frame_bytes])
            return self._forward(view, head.frame_bytes)
        else:
            taken = self._forward(view, head.frame_bytes)
        # Only now, while the broker is at work already.
        self._note(exchange, acks)
        return taken

    def _is_admitted(self, head: RequestHead, view: memoryview, exchange: Exchange) -> bool:
        """Say whether the client's quotas let a request pass; if so, limit what a Fetch asks for.

        If not, or if more bytes are needed, the request is read again later.
        """
        session, api_key = exchange.session, head.api_key
        asked: FetchLimits | None = None
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

    def _follow(self, head: RequestHead, exchange: Exchange) -> bool:
        """Say whether what this request asks for is to be read."""
        if not is_known(head.api_key, head.api_version) or head.frame_bytes > MAX_FOLLOWED_BYTES:
            return False
        watch = exchange.session.watch
        if watch is None or not watch.wants(head.api_key):
            return False
        exchange.watch = watch
        return True

    def _note(self, exchange: Exchange, acks: int | None) -> None:
        """Remember a request that was sent on; a Produce request's bytes are charged now."""
        if acks is not None:
            exchange.charge = exchange.session.quotas.charge(
                QuotaKind.PRODUCER_BYTE_RATE, exchange.request_bytes, exchange.sent_ms
            )
        if acks == NO_ACKS:
            self._conn.unanswered(exchange)
        else:
            self._conn.asked(exchange)

    def _gives_up_rest(self) -> bool:
        """See Flow. Kafka appends what was sent before an orderly end: Produce waits its turn."""
        return not (len(self._stash) >= _API_KEY_END and self._stash[4:_API_KEY_END] == _PRODUCE)

    def _collect_login(self, head: RequestHead, view: memoryview) -> int:
        if head.frame_bytes > MAX_LOGIN_BYTES:
            raise RequestRefused("too_long", f"a login of {head.frame_bytes} bytes")
        self._login = head
        # What follows is read when it is known who sends it.
        self._conn.login_begins()
        return self._collect(view, head.frame_bytes)

    def _whole_frame(self, frame: bytearray) -> None:
        if self._followed is not None:
            followed, self._followed = self._followed, None
            _read_followed(*followed, memoryview(frame))
        else:
            head, self._login = self._login, None
            assert head is not None
            self._conn.login_asked(head, bytes(frame))
        self._send(frame)


def _read_followed(head: RequestHead, exchange: Exchange, frame: memoryview) -> None:
    """Show the request to who follows the client, and keep what it asks for."""
    assert exchange.watch is not None
    exchange.asked = exchange.watch.asked(head, frame, exchange.sent_ms)
