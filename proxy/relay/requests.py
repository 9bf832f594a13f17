"""From the client to the broker: read each request's head, remember it, send it on."""

from asyncio import TimerHandle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct

from metrics.clock import MS_PER_SECOND, clock_ms, cpu_ms
from metrics.lock_free import REQUESTS, VALUE
from proxy.quota.busy import FIRST_USUAL_MS
from proxy.quota.connection_quotas import ConnectionRejected
from proxy.quota.entities import (
    CONSUMER_BYTE_RATE,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    QuotaKind,
)
from proxy.quota.meter import Meter
from proxy.quota.meters import longest_throttle
from proxy.relay.exchange import NO_ACKS, Exchange, RequestKind
from proxy.relay.frame_flow import READ_BYTES_HELD, READ_BYTES_LARGE, FrameFlow, new_scratch
from proxy.relay.interceptor import NotOwnerError
from proxy.relay.lane import (
    ANY_RESPONSE,
    KNOWN_RESPONSE,
    METER_REQUESTS,
    METER_RESPONSES,
    NO_RESPONSE,
    WHOLE_RESPONSE,
    Kind,
    Lane,
    add_plain_kind,
)
from proxy.relay.lifecycle import DRAINING, ReadPauseReason
from proxy.relay.memory_pool import UNCOUNTED_BYTES
from proxy.relay.pair_state import PairState
from proxy.relay.pump import CLOSED, END, OWNER, WaitReason
from proxy.relay.timing import NOT_TIMED
from proxy.wire.apis import (
    FETCH,
    JOIN_GROUP,
    LENGTH_BYTES,
    LIST_OFFSETS,
    PRODUCE,
    Handling,
    api_name,
    forwarded_api_version,
    is_known,
    plan_of,
    set_request_version,
)
from proxy.wire.fetch import TopicKey, fetch_limits, lower_fetch_bytes, max_bytes_position
from proxy.wire.frames import RequestHead, ends_with_frame, parse_request_head, read_int_field
from proxy.wire.layout import TooManyElements
from proxy.wire.produce import names_one_topic, read_produced_bytes

MAX_SEEN_BYTES, MAX_SEEN_ASK_BYTES = 4 << 20, 512 << 10
"""The longest Produce request, and Fetch or ListOffsets, that an interceptor is shown: four times
what producers send by default, and some 10,000 partitions. Of more than MAX_ELEMENTS none."""

MAX_ASKED_BYTES = 64 << 10
"""The longest Fetch that is read for the topics that it asks for: some 2,000 partitions."""

START_BYTES = 12
"""What every request begins with: its length, API key, version and correlation id."""

MAX_KINDS, MAX_KNOWN_BYTES = 64, 512
"""So many API versions of a connection are remembered, each by so many bytes at most: a client uses
some ten, and cannot have much remembered."""

LEFT_IN_FLIGHT = 8
"""Each time that so many more requests are in flight it is looked whether the client has left: who
sends hundreds and leaves has no more of them sent on."""

TEACH_EVERY = 4
"""Of the requests of a client that is near its bound one in so many asks whether it still is."""

_START = Struct(">iIi")  # API key and version together
_API_KEY = slice(4, 6)  # of a frame
_PRODUCE = PRODUCE.to_bytes(2, "big")

_buffer = new_scratch()
_scratch = memoryview(_buffer)


def _plain_response(kind: RequestKind, *, holds: bool) -> int | None:
    """Return which responses the lane may send on, None for none; see `Kind`.

    Without holds a large one of a bounded client is Python's, which limits the next Fetch anew.
    """
    if kind.acks == NO_ACKS:
        return NO_RESPONSE
    if kind.plan.passes:
        is_limited = kind.api_key == FETCH and CONSUMER_BYTE_RATE in kind.session.quotas.matches
        return WHOLE_RESPONSE if is_limited and not holds else ANY_RESPONSE
    return KNOWN_RESPONSE if kind.api_key == PRODUCE else None


def _check_offered(head: RequestHead, *, passes_unknown: bool) -> None:
    """Raise ConnectionRejected for a request that may not reach a broker."""
    api_key, version = head.api_key, head.api_version
    how = plan_of(api_key, version).handling
    if how is Handling.REFUSE or (how is Handling.UNKNOWN and not passes_unknown):
        text = f"{api_name(api_key)} ({api_key}) version {version} is not offered"
        raise ConnectionRejected("unsupported_version", f"{text}: its response may carry addresses")


class RequestFlow(FrameFlow):
    """Requests of one connection."""

    __slots__ = ("_collecting", "_is_shown", "_kinds", "_login", "_produced", "_timed")

    _collecting: Exchange
    """What is taken whole: a login, what an interceptor is to see, or what rules with topics are
    charged for."""

    def __init__(self, pair: PairState) -> None:
        super().__init__(pair, _scratch)
        self._is_shown = False
        """Whether an interceptor is to see it."""
        self._kinds: dict[int, RequestKind] = {}
        """The latest of each API and version."""
        self._produced: Exchange | None = None
        """The Produce request whose body is on its way."""
        self._timed = NOT_TIMED
        """Of the request whose body is on its way."""
        self._login: TimerHandle | None = None
        """Reads a login that waits for others of its address."""

    def _open_lane(self, lane: Lane) -> None:
        most_bytes = self._pair.services.limits.max_request_bytes
        lane.request_bytes = min(self._lane_bytes, most_bytes) if self._pair.kinds else 0

    @property
    def _lane_goes_on(self) -> bool:
        """See FrameFlow. Else a frame that came in two parts has all behind it sent one by one."""
        reads = bool(self._pair.kinds) and self.read_bytes > READ_BYTES_LARGE
        return reads and self._is_told_of_more

    def forget_lane(self) -> None:
        """Have no request sent on by the lane before another one of its kind was by Python."""
        if self._pair.lane is not None:
            self._pair.kinds.clear()
            for kind in self._kinds.values():
                kind.is_in_lane = False
                if kind.turn is not None:
                    kind.turn.lane = None
                if kind.lent is not None:
                    kind.lent.cancel()

    def _teach_lane(self, kind: RequestKind, now_ms: float) -> None:
        """Have the lane send on requests of a kind, if nothing but quotas may keep them."""
        session, api_key, version = kind.session, kind.api_key, kind.version
        start, response = kind.plain_start, _plain_response(kind, holds=self._pair.services.holds)
        shown = self._pair.shown
        kind.until_taught = TEACH_EVERY
        kind.is_shown = api_key == FETCH and kind.is_wanted(now_ms)
        turn = None if kind.is_shown else kind.turn  # what is shown is walked, all of it
        is_walked = turn is not None and turn.sampler.weight == 1
        if start is None or response is None or is_walked:
            return
        limit_at: int | None = 0
        if api_key == FETCH and session.quotas.matches:
            limit_at = (
                max_bytes_position(version, kind.first.header_end) if kind.max_bytes else None
            )
        if limit_at is None or not self._may_pass(kind, now_ms):
            return
        kind.lease = lease = session.quotas.lease(kind.bounded_by)
        kind.is_in_lane = True
        lane_kind = Kind(
            kind,
            api_key << 16 | version,
            start,
            self._renew,
            kind.times.observe,
            kind.count.cells,
            kind.relayed.cells,
            None if lease is None else lease.cells,
            0 if lease is None else METER_RESPONSES if api_key == FETCH else METER_REQUESTS,
            response,
            limit_at,
            self._pair.shapes.pairs(version),
            shown.rows if kind.is_shown else None,
            kind.run,
            shown.unshown.cells if kind.is_shown else None,
            shown.begin if kind.is_shown else None,
        )
        if turn is not None:
            turn.join(lane_kind)
        add_plain_kind(self._pair.kinds, lane_kind)

    def _may_pass(self, kind: RequestKind, now_ms: float) -> bool:
        """Return whether nothing but the lease keeps requests of a kind from being sent on."""
        pair, session = self._pair, kind.session
        return (
            kind.plain_start is not None
            and session is pair.client.current
            and session.owner is None
            and kind.is_wanted(now_ms) is kind.is_shown
            and session.quotas.lends(kind.bounded_by, pair.waiter, now_ms)
        )

    def _renew(self, kind: RequestKind, lane_kind: Kind) -> bool:
        """Return whether requests of a kind may go by the lane for a while."""
        quotas, now_ms, limit = kind.session.quotas, clock_ms(), 0
        if kind.lent is not None:
            kind.lent.cancel()
        may_pass = (
            kind.is_in_lane
            and self._may_pass(kind, now_ms)
            and quotas.lease(kind.bounded_by) is kind.lease
        )
        if may_pass and (asked := kind.max_bytes):
            sizes, holds = kind.session.fetch_sizes, self._pair.services.holds
            limit, kind.lent = quotas.lend_fetches(asked, sizes, now_ms, holds=holds)
            may_pass = limit > 0
        if not may_pass:
            self.forget_lane()  # what is read for nothing costs more than to learn others anew
        lane_kind.limit = limit
        return may_pass

    def close(self) -> None:
        """See FrameFlow."""
        super().close()
        self.forget_lane()
        if self._login is not None:
            self._login.cancel()
            self._login = None

    def _may_move(self, left: int) -> bool:
        exchange = self._produced
        if exchange is None:
            return self._whole is None or not self._login_waits()
        return not left or self._pair.admits_more(exchange)

    def _moved(self, count: int, *, is_whole: bool) -> None:
        """See FrameFlow. The body of a Produce request is charged and counted as it flows."""
        exchange, now_ms = self._produced, clock_ms()
        if exchange is not None and count:
            session = exchange.kind.session
            exchange.charge = session.charge(PRODUCER_BYTE_RATE, count, now_ms)
            session.quotas.took(PRODUCER_BYTE_RATE, count, self._pair.waiter)
            exchange.kind.relayed.cells[VALUE] += count
        if not is_whole:
            return
        if exchange is not None:
            self._produced = None
            exchange.sent_ms = now_ms  # before that the broker was not at work for it
        self._timed.sent_ms = now_ms
        self._timed = NOT_TIMED

    def _login_waits(self) -> bool:
        """Return whether a login waits for others of its address; it goes on later by itself."""
        if self._work is not None or not self._collecting.kind.plan.api.is_login:
            return False
        services = self._pair.services
        wait_ms = services.login_pace.wait_ms(self._pair.origin.ip, clock_ms())
        if self._login is not None:
            self._login.cancel()
        self._login = self._loop.call_later(wait_ms / MS_PER_SECOND, self.run) if wait_ms else None
        return wait_ms > 0

    def _is_raw_login(self, exchange: Exchange, frame: bytearray) -> bool:
        """Read a login; return whether raw tokens follow. Record what that takes."""
        pair, began_ms = self._pair, cpu_ms()
        sasl = pair.client.sasl
        try:
            sasl.request(exchange.head(len(frame)), bytes(frame))
            return sasl.is_raw
        finally:
            pair.services.login_pace.took(pair.origin.ip, cpu_ms() - began_ms, clock_ms())

    @property
    def is_cut_off(self) -> bool:
        """Whether what was read ends within a request."""
        return self._starved or self.under_way or not ends_with_frame(self.stash)

    def _take(self, view: memoryview) -> int:
        pair = self._pair
        kind = self._known_kind(view) or self._new_kind(view)
        if kind is None:
            return 0
        length, _, correlation_id = _START.unpack_from(view)
        frame_bytes: int = LENGTH_BYTES + length
        quotas, now_ms = kind.session.quotas, clock_ms()
        exchange = Exchange(kind, correlation_id, frame_bytes, now_ms)
        if quotas.is_bounded and not self._is_admitted(exchange, view):
            return 0
        if kind.version != kind.first.api_version:
            set_request_version(view, kind.version)
        if frame_bytes > READ_BYTES_HELD or (kind.acks is not None and len(view) > frame_bytes):
            self._read_ahead(quotas, PRODUCER_BYTE_RATE)
        if kind.turn is not None and (weight := kind.turn.taken()):
            self._sample(exchange, view[:frame_bytes], weight)
        is_read = len(view) >= frame_bytes and not exchange.has_more_topics
        if exchange.topic_sizes is not None and (is_read or frame_bytes > MAX_SEEN_BYTES):
            self._charge_topics(exchange, exchange.topic_sizes)
        most_seen = MAX_SEEN_ASK_BYTES if kind.acks is None else MAX_SEEN_BYTES
        is_shown = frame_bytes <= most_seen and kind.is_wanted(now_ms)
        if is_shown or exchange.topic_sizes is not None:
            taken = self._take_read(exchange, view, is_shown=is_shown)
        elif kind.plan.api.is_login:
            return self._take_login(exchange, view)
        else:
            taken = self._forward(view, frame_bytes)
            # Only now, while the broker is at work already.
            self._count(exchange, taken)
        if pair.lane is not None and not kind.is_in_lane:
            kind.until_taught -= 1
            if kind.until_taught < 0:
                self._teach_lane(kind, now_ms)
        return taken

    def _take_read(self, exchange: Exchange, view: memoryview, *, is_shown: bool) -> int:
        """Read a request before it is sent on: the answer must not come first."""
        frame_bytes = exchange.request_bytes
        self._count(exchange, len(view))
        if frame_bytes > UNCOUNTED_BYTES and exchange.kind.acks is None:
            self._pair.pause(
                ReadPauseReason.SERIAL
            )  # what it asks for is kept until it is answered
        api_key = exchange.kind.api_key
        is_short = api_key == LIST_OFFSETS and frame_bytes <= READ_BYTES_HELD
        if len(view) < frame_bytes or not (api_key == FETCH or is_short):
            self._collecting, self._is_shown = exchange, is_shown
            return self._collect(view, frame_bytes)
        if not self._is_for_broker(exchange, view[:frame_bytes]):
            return frame_bytes
        taken = self._forward(view, frame_bytes)
        exchange.timed.sent_on(clock_ms())
        if exchange.seen is not None:
            exchange.seen.sent()
        return taken

    def _sample(self, exchange: Exchange, view: memoryview, weight: int) -> None:
        """Have a request walked that stands for so many; `view` is what is there of it."""
        kind = exchange.kind
        if kind.api_key == FETCH:
            exchange.weight = weight
        elif exchange.topic_sizes is None:
            exchange.weight, start = weight, kind.first.header_end
            sizes, is_all = self._read_topics(exchange, view), len(view) >= exchange.request_bytes
            is_one = not exchange.has_more_topics and names_one_topic(kind.version, view[start:])
            if is_one and not is_all:  # it need not be read whole
                self._charge_topics(exchange, sizes)

    @staticmethod
    def _read_topics(exchange: Exchange, view: memoryview) -> dict[TopicKey, int]:
        """Return what a Produce request has of its first topics; of all if it is not read whole."""
        kind, frame_bytes = exchange.kind, exchange.request_bytes
        start = kind.first.header_end
        parts = read_produced_bytes(kind.version, view[start:frame_bytes], frame_bytes - start)
        exchange.topic_sizes = sizes = next(parts, {})
        exchange.has_more_topics = next(parts, None) is not None
        if exchange.has_more_topics and frame_bytes > MAX_SEEN_BYTES:
            sizes[next(reversed(sizes))] += frame_bytes - start - sum(sizes.values())
        return sizes

    def _charge_topics(self, exchange: Exchange, sizes: Mapping[TopicKey, int]) -> None:
        """Charge a Produce request of few topics, or that is not read whole, in one step."""
        for _ in self._charging_topics(exchange, (sizes,), exchange.request_bytes):
            pass

    @staticmethod
    def _charging_topics(
        exchange: Exchange, parts: Iterable[Mapping[TopicKey, int]], frame_bytes: int
    ) -> Iterator[None]:
        """Charge a Produce request to the rules for its topics, in steps; record them."""
        session, weight = exchange.kind.session, exchange.weight
        exchange.topic_sizes, exchange.weight = None, 0
        produced = None if session.usage is None else session.usage.produced
        if not weight:  # it is read for the rules, as all are
            exchange.topic_charge = session.topics.begin_write(clock_ms())
        for sizes in parts:
            if not weight:
                charge = session.topics.written(sizes, clock_ms())
                exchange.topic_charge = longest_throttle((exchange.topic_charge, charge))
            if produced is not None:
                produced.add_all(sizes, weight or 1)
            yield
        if produced is not None:
            produced.walked(frame_bytes, weight or 1)

    def _take_login(self, exchange: Exchange, view: memoryview) -> int:
        """Take the whole of a login. Raises ConnectionRejected for one that is too long."""
        pair, frame_bytes = self._pair, exchange.request_bytes
        max_bytes = pair.client.sasl.max_bytes(exchange.kind.api_key)
        if frame_bytes > max_bytes:
            text = f"a login of {frame_bytes} bytes, more than {max_bytes}"
            raise ConnectionRejected("too_long", text)
        self._count(exchange, frame_bytes)
        self._collecting = exchange
        self.forget_lane()
        # What follows is read when it is known who sends it.
        pair.pause(ReadPauseReason.LOGIN)
        return self._collect(view, frame_bytes)

    def _known_kind(self, view: memoryview) -> RequestKind | None:
        """Return the kind of a request that begins like an earlier one, None for another."""
        if len(view) < START_BYTES:
            return None
        length, api, _ = _START.unpack_from(view)
        kind = self._kinds.get(api)
        if (
            kind is None
            or view[START_BYTES : kind.end] != kind.start
            or kind.session is not self._pair.client.current
            or LENGTH_BYTES + length < kind.end
            or length > self._pair.services.limits.max_request_bytes
        ):
            return None
        return kind

    def _new_kind(self, view: memoryview) -> RequestKind | None:
        """Return the kind of any request, and remember it; None: the request is taken later."""
        pair, services = self._pair, self._pair.services
        head = parse_request_head(view, max_request_bytes=services.limits.max_request_bytes)
        if head is None:
            self._need_more(view)
            return None
        _check_offered(head, passes_unknown=services.passes_unknown_apis)
        before, session = pair.client.current, pair.session_of(head)
        if session is None:
            return None
        if session is not before:
            self.forget_lane()
        api_key = head.api_key
        version = forwarded_api_version(api_key, head.api_version)
        plan = plan_of(api_key, version)
        acks, end = None, head.header_end
        if api_key == PRODUCE:
            found = read_int_field(head, view, "acks")
            if found is None:
                self._need_more(view)
                return None
            acks, end = found
        start = bytes(view[START_BYTES:end])
        is_changed = version != head.api_version
        is_looked_into = plan.api.is_login or api_key == JOIN_GROUP
        byte_rate = plan.api.byte_rate
        kind = RequestKind(
            session=session,
            plan=plan,
            api_key=api_key,
            version=version,
            first=head,
            start=start,
            end=end,
            acks=acks,
            count=services.request_counter(api_key, head.api_version),
            relayed=services.clients.byte_counter(session.identity, api_key),
            times=services.times_of(api_key),
            bounded_by=None if byte_rate is None else QuotaKind(byte_rate),
            plain_start=None if is_looked_into or is_changed else start,
            max_bytes=None if api_key == FETCH else 0,
            turn=None if session.usage is None else session.usage.turn(api_key),
        )
        _, api, _ = _START.unpack_from(view)
        has_room = api in self._kinds or len(self._kinds) < MAX_KINDS
        if has_room and end <= MAX_KNOWN_BYTES:
            self._kinds[api] = kind
        return kind

    def _is_admitted(self, exchange: Exchange, view: memoryview) -> bool:
        """Return whether quotas let a request pass, if not read again later; limit a Fetch."""
        kind = exchange.kind
        session, api_key, start = kind.session, kind.api_key, kind.first.header_end
        asked, frame_bytes = None, exchange.request_bytes
        topics: Sequence[Meter] = ()
        walks = kind.bounded_by in session.quotas.topic_kinds
        if api_key == FETCH:
            asked = fetch_limits(kind.version, view, start, frame_bytes)
            is_cut = walks and len(view) < frame_bytes <= MAX_ASKED_BYTES
            if asked is None or is_cut:
                self._need_more(view)
                return False
            if walks:
                session.topics.asks(kind.version, view[start:frame_bytes], exchange.sent_ms)
                topics = session.topics.fetched(exchange.sent_ms)
        elif api_key == PRODUCE and walks:
            sizes = self._read_topics(exchange, view)
            is_short = frame_bytes <= MAX_SEEN_BYTES or names_one_topic(kind.version, view[start:])
            unread_bytes = 0 if is_short else frame_bytes - len(view)
            topics = session.topics.writes(sizes, unread_bytes, exchange.sent_ms)
        elif api_key == JOIN_GROUP and is_known(api_key, kind.version):
            head = exchange.head(exchange.request_bytes)
            timeout = read_int_field(head, view, "session_timeout_ms")
            if timeout is None:
                self._need_more(view)
                return False
            session.quotas.joined(timeout[0])
        if not self._pair.admits(exchange, min(len(view), frame_bytes), topics):
            return False
        if asked is not None:
            max_wait_ms, max_bytes, end = asked
            exchange.wait_ms = max(max_wait_ms, 0)
            if kind.max_bytes is None and kind.plain_start is not None:
                kind.plain_start = bytes(view[START_BYTES:end])
                kind.max_bytes = max_bytes
            paid = self._pair.waiter.paid
            granted_bytes = self._pair.grant(exchange, max_bytes, exchange.sent_ms, paid)
            if walks:
                granted_bytes, exchange.topics = session.topics.expect(
                    *(granted_bytes, exchange.sent_ms), holds=self._pair.services.holds, paid=paid
                )
            paid.clear()  # what is left is of gates that are gone
            if granted_bytes < max_bytes:
                frame = view[: exchange.request_bytes]
                lower_fetch_bytes(kind.version, frame, start, granted_bytes)
        return True

    def _count(self, exchange: Exchange, have: int) -> None:
        """Record a request that is sent on, of which so many bytes are there, or more.

        Those of a Produce request are charged now, what it announces beyond them when it flows.
        """
        pair, kind = self._pair, exchange.kind
        kind.count.cells[VALUE] += 1
        kind.relayed.cells[REQUESTS] += 1
        if kind.acks is not None:
            if have < exchange.request_bytes:
                exchange.request_bytes = have
                self._produced = exchange
            exchange.charge = kind.session.charge(
                PRODUCER_BYTE_RATE, exchange.request_bytes, exchange.sent_ms
            )
            if kind.acks == NO_ACKS:  # without a response; what can be held is the next request
                if kind.session.quotas.has(REQUEST_PERCENTAGE):
                    kind.session.charge(REQUEST_PERCENTAGE, FIRST_USUAL_MS, exchange.sent_ms)
                kind.relayed.cells[VALUE] += exchange.request_bytes
                return
        in_flight = pair.in_flight
        in_flight.append(exchange)
        times = kind.times
        times.left -= 1
        if times.left <= 0 or exchange.sent_ms >= times.due_ms:
            exchange.timed = times.begin(exchange.sent_ms, exchange.gated_ms, clock_ms())
            if self._is_sending:
                self._timed = exchange.timed
        count = len(in_flight)
        if count >= pair.services.limits.max_in_flight_requests or (
            count % LEFT_IN_FLIGHT == 0 and self._source is not None and self._source.sends_no_more
        ):
            pair.pause(ReadPauseReason.FULL)

    @property
    def is_unanswered_next(self) -> bool:
        """Whether a request without a response was read and not sent on."""
        kind = self._known_kind(memoryview(self.stash))
        return kind is not None and kind.acks == NO_ACKS

    def _wait_paused(self) -> WaitReason | None:
        """See FrameFlow. Until the client sends more, its end is watched for.

        Kafka appends what came before an orderly end: a Produce request waits its turn. In a drain
        one without a response goes on, as its client does not send it again.
        """
        if self._pair.life.state is DRAINING and self.is_unanswered_next:
            have = len(self.stash)
            self._scratch[:have] = self.stash
            return self._handle(have, drained=False)
        if self.wait is not END:
            return END
        assert self._source is not None
        has_ended = self._source.has_ended()
        if has_ended is None:  # it is run for another reason
            return END
        return CLOSED if has_ended and self.stash[_API_KEY] != _PRODUCE else OWNER

    def _is_for_broker(self, exchange: Exchange, frame: memoryview) -> bool:
        """Show a request, the latest of those in flight; return whether it is to be sent on."""
        pair, interceptor = self._pair, exchange.kind.session.interceptor
        try:
            exchange.seen = interceptor.request(exchange.head(len(frame)), frame, exchange.sent_ms)
        except NotOwnerError:
            pair.in_flight.pop()
            pair.send_on()
            return False
        except TooManyElements:  # it passes unread, as one that is too long
            return True
        if exchange.seen.answer is None:
            return True
        pair.own_answers += 1
        pair.responses.run()
        return False

    def _whole_frame(self, frame: bytearray) -> Iterator[None]:
        exchange = self._collecting
        exchange.timed.read_anew(clock_ms())
        kind = exchange.kind
        if exchange.topic_sizes is not None:
            body = memoryview(frame)[kind.first.header_end :]
            parts = read_produced_bytes(kind.version, body, len(body))
            yield from self._charging_topics(exchange, parts, len(frame))
        if not kind.plan.api.is_login:
            if self._is_shown and not self._is_for_broker(exchange, memoryview(frame)):
                return
        elif self._is_raw_login(exchange, frame):
            raise ConnectionRejected("unsupported_sasl", "SaslHandshake version 0, use version 1")
        self._send(frame)
        exchange.timed.sent_on(clock_ms())
        if exchange.seen is not None:
            exchange.seen.sent()
