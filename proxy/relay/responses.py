"""From the broker to the client: measure each response, hold it if a quota says so, send it on."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from metrics.clock import clock_ms
from metrics.lock_free import VALUE
from proxy.quota.busy import BusyTime
from proxy.quota.delay_queue import NOT_DELAYED
from proxy.quota.entities import CONSUMER_BYTE_RATE, REQUEST_PERCENTAGE
from proxy.quota.meters import ThrottleDecision, longest_throttle
from proxy.relay.clients import SampledFetchObserver
from proxy.relay.exchange import Exchange
from proxy.relay.frame_flow import READ_BYTES_HELD, FrameFlow, new_scratch
from proxy.relay.lane import Lane
from proxy.relay.lifecycle import DRAINING, NO_PAUSE, ReadPauseReason
from proxy.relay.memory_pool import UNCOUNTED_BYTES
from proxy.relay.pair_state import PairState
from proxy.relay.pump import READ, WaitReason
from proxy.relay.requests import MAX_SEEN_BYTES
from proxy.relay.session import ClientSession
from proxy.wire.apis import (
    DESCRIBE_CONFIGS,
    FETCH,
    FIND_COORDINATOR,
    LENGTH_BYTES,
    METADATA,
    PRODUCE,
    Handling,
)
from proxy.wire.fetch import FetchedPartition, TopicKey
from proxy.wire.fetch_response import FetchObserver, FetchWalker, fetch_body_start
from proxy.wire.frames import INT32, MalformedResponse, check_whole_response, parse_response_head
from proxy.wire.layout import Buffer, Steps
from proxy.wire.rewrite import (
    brokers_end,
    empty_broker_response,
    no_address,
    raise_throttle_time,
    rewrite_in_steps,
    with_throttle_time,
    without_config_addresses,
)

MAX_COLLECTED_BYTES = 64 << 20
"""The longest response that is taken into memory: the coordinators of a million groups."""

MAX_HEAD_BYTES = 1 << 20
"""The longest start of a Metadata response: some ten thousand brokers."""

LONGEST_MUTE_MS = 2000.0
"""A client that is told to wait may wait with its heartbeats, too. The gate keeps the rest."""

MIN_HOLD_MS = 0.5
"""Shorter holds are not worth a timer; the quota carries what is left over."""

WAIT_CHECK_MS = 20.0
"""Between two questions to an interceptor whether a response should still wait."""

LAST_KEPT_COORDINATOR_VERSION = 2
"""librdkafka, which asks for no later one, keeps the address of its group's coordinator as long as
that has the same number, also when it is of a dead machine. It forgets it when there is none."""

_scratch = memoryview(new_scratch())


class MoreDataObserver(FetchObserver):
    """Looks for a partition whose records end before its log: nobody waits who has more to send.

    `had_data` is called once if there is one, when all partitions were seen.
    """

    def __init__(self, had_data: Callable[[], None]) -> None:
        self._had_data = had_data
        self._is_cut = False

    def partitions(self, _topic: TopicKey, fetched: Sequence[FetchedPartition]) -> None:
        """See FetchObserver."""
        for _, _, high_watermark, stable, _, records_bytes, end in fetched:
            # A reader of committed records gets none from the last stable offset on. Which one this
            # is is in the request: where the two differ, the answer counts as one at the end.
            log_end = stable if 0 <= stable < high_watermark else high_watermark
            if records_bytes and (end is None or end < log_end):
                self._is_cut = True

    def ended(self) -> None:
        """See FetchObserver."""
        if self._is_cut:
            self._had_data()


class ResponseFlow(FrameFlow):
    """Responses of one connection, in the order of their requests. The oldest may be held."""

    __slots__ = ("_collecting", "_free_ms", "busy_time", "delayed")

    def __init__(self, pair: PairState) -> None:
        super().__init__(pair, _scratch)
        self.delayed = NOT_DELAYED
        """The response that waits in the delay queue."""
        self.busy_time = BusyTime()
        self._collecting: Exchange | None = None
        self._free_ms = 0.0
        """Since when no response is in front of the next one."""

    def shorten_hold(self) -> None:
        """Hold a response for no longer than the client's quotas ask for, which were changed."""
        if self.delayed.waiting:
            exchange = self._pair.next_in_flight[0]
            if exchange.charge is not None:  # else it waits for something else
                quotas, kind = exchange.kind.session.quotas, exchange.charge.meter.kind
                owed_ms = quotas.owed_ms(kind, clock_ms())
                if quotas.walks(kind):
                    of_topics = exchange.kind.session.topics
                    owed_ms = max(owed_ms, of_topics.owed_ms(kind, clock_ms()))
                self.hold_at_most(owed_ms)

    def hold_at_most(self, most_ms: float) -> None:
        """Hold a response that waits for no longer than so many milliseconds from now."""
        due_ms = clock_ms() + most_ms
        if not self.delayed.waiting or due_ms >= self.delayed.due_ms:
            return
        self.delayed.cancel()
        self.busy_time.held(due_ms)
        if most_ms:
            self._pause_until(due_ms, self._pair.next_in_flight[0])
        else:
            self.resume()

    def resume(self) -> None:
        """See FrameFlow."""
        in_flight = self._pair.next_in_flight
        if in_flight:
            in_flight[0].timed.released(clock_ms())
        super().resume()

    def close(self) -> None:
        """See FrameFlow."""
        self.delayed.cancel()
        super().close()

    def _moved(self, _count: int, *, is_whole: bool) -> None:
        if is_whole:
            self._free_ms = clock_ms()

    def _begin_body(self, body_bytes: int) -> None:
        """See FrameFlow."""
        session = self._pair.client.current
        if session is not None:
            self._read_ahead(session.quotas, CONSUMER_BYTE_RATE)
        super()._begin_body(body_bytes)

    def _open_lane(self, lane: Lane) -> None:
        lane.response_bytes = self._lane_bytes if self._is_lane_open else 0

    @property
    def _is_lane_open(self) -> bool:
        pair = self._pair
        return bool(pair.kinds) and pair.life.pauses is NO_PAUSE

    @property
    def _lane_goes_on(self) -> bool:
        """See FrameFlow."""
        return self._is_lane_open and not self._pair.own_answers and self._is_told_of_more

    def _read(self) -> WaitReason | None:
        """See FrameFlow. Between two frames an interceptor's own answers go out."""
        pair = self._pair
        if pair.own_answers and pair.send_own_answer(self._send):
            wait = READ if self.wait is READ and self._is_told_of_more else None
        else:
            wait = super()._read()
        # What was just answered may have let requests be read: they are not waited for.
        return None if wait is READ and pair.own_answer is not None else wait

    def _take(self, view: memoryview) -> int:
        if self._pair.own_answers and self._pair.send_own_answer(self._send):
            return 0  # this frame comes after it
        head = parse_response_head(view)
        if head is None:
            return self._need_more(view)
        frame_bytes, correlation_id = head
        in_flight = self._pair.next_in_flight
        if not in_flight or in_flight[0].correlation_id != correlation_id:
            text = f"a response with correlation id {correlation_id} was not asked for"
            raise MalformedResponse(text)
        exchange = in_flight[0]
        now_ms = clock_ms()
        if not exchange.measured:
            exchange.measured = True
            charge = self._charge(exchange, frame_bytes, now_ms)
            if charge is not None and self._hold(exchange, charge, now_ms):
                return 0
        if exchange.seen is not None and exchange.seen.takes_whole and self._must_wait(exchange):
            return 0
        kind = exchange.kind
        plan = kind.plan
        throttle = plan.throttle_offset if exchange.throttle_ms and not plan.takes_whole else 0
        start = throttle + INT32.size if throttle else plan.body_offset
        if len(view) < start <= frame_bytes:
            return self._need_more(view)
        in_flight.pop(0)
        self._free_ms = now_ms
        if (
            throttle
            and start <= frame_bytes
            and not (plan.is_flexible and view[plan.body_offset - 1])  # where all is as expected
        ):
            raise_throttle_time(view, throttle, exchange.throttle_ms)
            exchange.throttle_ms = 0
        if frame_bytes > READ_BYTES_HELD:
            self._read_ahead(kind.session.quotas, CONSUMER_BYTE_RATE)
        is_shown = exchange.seen is not None or exchange.is_looked_into
        is_plain = not (is_shown or exchange.throttle_ms)
        if is_plain and (plan.passes or self._names_no_broker(exchange, view, frame_bytes)):
            taken = self._forward(view, frame_bytes)
        else:
            taken = self._begin(exchange, view, frame_bytes)
        if self._collecting is None:
            exchange.timed.done(clock_ms())
        # Only now, while the client is at work already.
        kind.relayed.cells[VALUE] += exchange.request_bytes + frame_bytes
        if self._pair.life.pauses is not NO_PAUSE:
            self._pair.on_response()
        return taken

    def _names_no_broker(self, exchange: Exchange, view: memoryview, frame_bytes: int) -> bool:
        """Return whether a response to Produce is like an earlier one that was read."""
        if exchange.kind.api_key != PRODUCE or len(view) < frame_bytes:
            return False
        return self._pair.shapes.knows(exchange.kind.version, view[:frame_bytes])

    def _begin(self, exchange: Exchange, view: memoryview, frame_bytes: int) -> int:
        """Send on, or collect, the frame that starts `view`."""
        kind, seen = exchange.kind, exchange.seen
        plan = kind.plan
        if (
            plan.takes_whole
            or (seen is not None and seen.takes_whole)
            or (exchange.throttle_ms and kind.api_key == PRODUCE)
            or (plan.handling is Handling.PER_BROKER and kind.session.is_at_fallback)
        ):
            if frame_bytes > MAX_COLLECTED_BYTES:
                raise MalformedResponse(f"a response of {frame_bytes} bytes to rewrite")
            self._collecting = exchange
            return self._collect(view, frame_bytes)
        if plan.rewrites_head:
            self._collecting = exchange
            return self._collect(view, min(frame_bytes, len(view)))
        if seen is None and not exchange.is_looked_into:
            return self._forward(view, frame_bytes)
        start = fetch_body_start(plan, view, frame_bytes)
        observers: list[FetchObserver | None] = [seen.observer(clock_ms())] if seen else []
        if exchange.is_wait_doubtful:
            observers.append(MoreDataObserver(partial(self._charge_doubtful_time, kind.session)))
        observers.append(exchange.topics)
        usage, weight = kind.session.usage, 1 if any(observers) else exchange.weight
        if usage is not None and weight:  # what is walked anyway stands for itself alone
            size = exchange.request_bytes + frame_bytes
            observers.append(SampledFetchObserver(usage.fetched, size, weight))
        walked, body_bytes = filter(None, observers), frame_bytes - start
        follows_batches = exchange.is_wait_doubtful  # it asks where each one's records end
        walker = FetchWalker(kind.version, body_bytes, *walked, follows_batches=follows_batches)
        taken = self._forward(view, frame_bytes, walker)
        walker.feed(view[start:taken])
        if taken == frame_bytes:
            walker.show()
        return taken

    def _whole_frame(self, frame: bytearray) -> Iterator[None]:
        exchange = self._collecting
        assert exchange is not None
        exchange.timed.came_whole(clock_ms())
        rewrites_head = exchange.kind.plan.rewrites_head
        send = self._send_from_head if rewrites_head else self._send_rewritten
        yield from send(exchange, frame)

    def _send_from_head(self, exchange: Exchange, start: bytearray) -> Iterator[None]:
        """Send on a response of which only the start is rewritten, as soon as that is there."""
        (length,) = INT32.unpack_from(start)
        frame_bytes, have = LENGTH_BYTES + length, len(start)
        end = yield from brokers_end(exchange.kind.version, start)
        if end is None:
            if have >= min(frame_bytes, MAX_HEAD_BYTES):
                raise MalformedResponse(f"the brokers of Metadata do not end in {have} bytes")
            enough = UNCOUNTED_BYTES if have < UNCOUNTED_BYTES else MAX_HEAD_BYTES
            self._whole_bytes = min(frame_bytes, enough)
            return
        self._pair.services.kept_bytes.shrink(self, have)
        head = yield from self._advertised(exchange, start[:end])
        data = b"".join((head, start[end:]))
        if have < frame_bytes:
            self._send(data, more=True)
            self._send_body(frame_bytes - have)
        else:
            self._send(data)
        self._sent_collected(exchange)

    def _send_rewritten(self, exchange: Exchange, frame: bytearray) -> Iterator[None]:
        kind = exchange.kind
        response: Buffer = frame
        api_key, version, is_login = kind.api_key, kind.version, kind.plan.api.is_login
        if is_login:
            self._pair.client.login_response(api_key, version, bytes(frame))
        if exchange.seen is not None and len(frame) <= MAX_SEEN_BYTES:
            response = exchange.seen.response(version, bytes(frame), clock_ms())
        if kind.plan.handling is not Handling.PASS:
            check_whole_response(response)
            before = response
            response = yield from self._advertised(exchange, response)
            if api_key == PRODUCE and response is before:
                self._pair.shapes.learn(version, bytes(response))
        if exchange.throttle_ms:
            told = with_throttle_time(api_key, version, response, exchange.throttle_ms)
            response = yield from told
        self._send(response)
        self._sent_collected(exchange)
        if is_login:
            self._pair.unpause(ReadPauseReason.LOGIN)

    def _advertised(self, exchange: Exchange, response: Buffer) -> Steps[Buffer]:
        """Return a response with the addresses for its client, in steps; see `rewrite_in_steps`.

        Of what is asked of each broker return what the fallback has, which is nothing; of brokers'
        settings what names no address.
        """
        kind = exchange.kind
        api_key, version, session = kind.api_key, kind.version, kind.session
        if api_key == DESCRIBE_CONFIGS:
            response = yield from without_config_addresses(version, response)
        if kind.plan.handling is Handling.PER_BROKER:
            if session.is_at_fallback:
                response = yield from empty_broker_response(api_key, version, response)
            return response
        is_hidden = (
            api_key == FIND_COORDINATOR
            and version <= LAST_KEPT_COORDINATOR_VERSION
            and session.has_moved
        )
        return (
            yield from rewrite_in_steps(
                api_key,
                version,
                response,
                no_address if is_hidden else partial(self._pair.advertise, session),
                passes_unknown=self._pair.services.passes_unknown_apis,
                fallback=session.fallback() if api_key == METADATA else None,
            )
        )

    def _sent_collected(self, exchange: Exchange) -> None:
        self._collecting = None
        self._free_ms = clock_ms()
        exchange.timed.done(self._free_ms)

    def _hold(self, exchange: Exchange, charge: ThrottleDecision, now_ms: float) -> bool:
        """Start the hold of a response, or mute its client; return whether it must wait."""
        services, api_key = self._pair.services, exchange.kind.api_key
        hold_ms = charge.due_ms - now_ms
        is_draining = self._pair.life.state is DRAINING
        if hold_ms < MIN_HOLD_MS or (is_draining and not self._is_one_of_many()):
            return False
        exchange.charge = charge
        services.count_throttled(charge, hold_ms, exchange.kind.session.usage)
        if exchange.seen is not None:
            exchange.seen.held(now_ms, charge.due_ms)
        if not services.holds:
            mute_ms = min(hold_ms, LONGEST_MUTE_MS)
            exchange.throttle_ms = round(mute_ms)
            self._pair.mute(now_ms + mute_ms, api_key, charge)
            exchange.timed.hold_ms += mute_ms
            return False
        if api_key in (FETCH, PRODUCE) and not exchange.kind.plan.clients_throttle:
            exchange.throttle_ms = round(hold_ms)
        self.busy_time.held(charge.due_ms)
        self._pause_until(charge.due_ms, exchange)
        return True

    def _is_one_of_many(self) -> bool:
        """Return whether a drain holds the next response, as one of many to Fetch.

        Another process does not know what its client has got here. Who stores waits for no Fetch.
        """
        first, *behind = (each.kind.api_key for each in self._pair.in_flight)
        is_many = first == FETCH and FETCH in behind and PRODUCE not in behind
        return is_many and self._pair.services.is_ending

    def _pause_until(self, due_ms: float, exchange: Exchange) -> None:
        self.paused = True
        exchange.timed.held(clock_ms())
        reapers = self._pair.services.reapers
        self.delayed = reapers.add(exchange.kind.api_key, due_ms, self.resume)

    def _must_wait(self, exchange: Exchange) -> bool:
        """Return whether a whole response waits because its interceptor wants it; ask it again."""
        assert exchange.seen is not None
        now_ms = clock_ms()
        wait_ms = exchange.seen.wait_ms(now_ms)
        if wait_ms <= 0 or self._pair.life.state is DRAINING:
            return False
        self._pause_until(now_ms + min(wait_ms, WAIT_CHECK_MS), exchange)
        return True

    def _charge(
        self, exchange: Exchange, frame_bytes: int, now_ms: float
    ) -> ThrottleDecision | None:
        """Charge every quota that applies; return the one with the longest delay."""
        exchange.timed.on_response(now_ms, self._free_ms)
        kind, charge = exchange.kind, exchange.charge  # of another one, what its request has cost
        if kind.api_key == FETCH:
            if exchange.seen is not None:
                exchange.seen.measured(frame_bytes)
            if exchange.expected is not None:
                exchange.expected.answered(frame_bytes)
            charge = kind.session.charge(CONSUMER_BYTE_RATE, frame_bytes, now_ms)
        if exchange.topics is not None:
            charge = longest_throttle((charge, exchange.topics.charge(frame_bytes, now_ms)))
        elif exchange.topic_charge is not None:
            charge = longest_throttle((charge, exchange.topic_charge))
        if kind.plan.costs_time and kind.session.quotas.has(REQUEST_PERCENTAGE):
            busy_ms = self.busy_time.answered(exchange.sent_ms, exchange.wait_ms, now_ms)
            charge = longest_throttle(
                (charge, kind.session.charge(REQUEST_PERCENTAGE, busy_ms, now_ms))
            )
            exchange.is_wait_doubtful = exchange.wait_ms > 0
        return charge

    def _charge_doubtful_time(self, session: ClientSession) -> None:
        """Charge all of the time of the last Fetch: the broker had data for it at once.

        What that holds is the next response.
        """
        session.charge(REQUEST_PERCENTAGE, self.busy_time.had_data(), clock_ms())
