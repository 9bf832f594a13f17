"""What the lane sends on is what Python would have sent on, and is counted as that is."""

import asyncio
import socket
from collections import deque
from contextlib import suppress
from operator import itemgetter
from struct import pack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parts.interceptors import AllShown
from parts.sensor_views import sensors_in_use
from relaylab import frames
from relaylab.lab import End, Lab, open_lab, turns, until

from metrics import CounterChild
from metrics.clock import clock_ms
from proxy.quota.entities import QuotaKind
from proxy.quota.gate import LEAST_GRANT_BYTES
from proxy.quota.meter import LEASE_MS
from proxy.quota.rules import QuotaManagerSettings, Rule
from proxy.relay.interceptor import InterceptedRequest
from proxy.relay.lane import Kind, Lane
from proxy.relay.services import Limits
from proxy.relay.timing import SAMPLE_EVERY
from proxy.wire.apis import FETCH, PRODUCE
from proxy.wire.layout import TooManyElements

pytestmark = pytest.mark.skipif(Lane is None, reason="there was no compiler")

CONSUMER, PRODUCER = QuotaKind.CONSUMER_BYTE_RATE, QuotaKind.PRODUCER_BYTE_RATE
FAR, NEAR = 1e12, 2e6
"""Bounds: the second is near when much is fetched, and nothing that these tests move exceeds it."""
HEARTBEAT = 12


def rules(bound: float, *, enforce: bool = True) -> tuple[Rule, ...]:
    bounds = {CONSUMER: bound, PRODUCER: bound}
    return (Rule(client_id="test", bounds=bounds, enforce=enforce),)


RULES = {
    "none": (),
    "far": rules(FAR),
    "near": rules(NEAR),
    "observed": rules(NEAR, enforce=False),
}
PRODUCED = pack(">i", 1) + pack(">h", 1) + b"t" + pack(">iihqqq", 1, 0, 0, 5, -1, 0) + pack(">i", 0)
"""The body of a response to Produce 7: one topic of one partition."""
REQUESTS = {
    "fetch": (frames.fetch_request, frames.fetch_response),
    "other fetch": (lambda n: frames.fetch_request(n, max_bytes=5000), frames.fetch_response),
    "shown fetch": (
        lambda n: frames.fetch_request(n, version=15),
        lambda n, size: frames.fetch_partitions(n, [bytes(size)]),
    ),
    "acks 1": (
        lambda n: frames.produce_request(n, acks=1),
        lambda n, _: frames.response(PRODUCE, 7, n, PRODUCED),
    ),
    "large acks 1": (
        lambda n: frames.produce_request(n, acks=1, record_bytes=9_000),
        lambda n, _: frames.response(PRODUCE, 7, n, PRODUCED),
    ),
    "acks 0": (lambda n: frames.produce_request(n, acks=0), None),
    "metadata": (frames.metadata_request, lambda n, _: frames.metadata_response(n, {})),
    "heartbeat": (
        lambda n: frames.request(HEARTBEAT, 2, n, b"anything"),
        lambda n, size: frames.response(HEARTBEAT, 2, n, bytes(size)),
    ),
}
PLAIN = st.sampled_from(["fetch", "acks 1", "acks 0", "heartbeat"])
CUTS = st.lists(st.floats(0, 1, exclude_max=True), max_size=2)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.lists(PLAIN, min_size=1, max_size=12), CUTS),
        st.tuples(st.just("ask"), st.lists(st.sampled_from(sorted(REQUESTS)), max_size=5), CUTS),
        st.tuples(st.just("answer"), st.lists(st.sampled_from([0, 50, 3000, 70_000])), CUTS),
        st.tuples(st.just("rules"), st.sampled_from(sorted(RULES)), st.just([])),
        st.tuples(st.just("wait"), st.just([]), st.just([])),
    ),
    max_size=12,
)
SHOWN = st.sampled_from(["shown fetch", "shown fetch", "acks 1", "heartbeat"])
SHOWN_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.lists(SHOWN, min_size=1, max_size=8), CUTS),
        st.tuples(st.just("answer"), st.lists(st.sampled_from([0, 50, 3000, 70_000])), CUTS),
        st.tuples(st.just("wait"), st.just([]), st.just([])),
    ),
    max_size=12,
)
KNOWN_AFTER = 8
"""Requests on a connection that are waited for as a newcomer's, and are known then."""
ENDS = ["client", "broker", "mid-request", "mid-response", "unasked"]
TLS_SIDES = ([], [], ["client_tls"], ["upstream_tls"], ["client_tls", "upstream_tls"])


def measured(lab: Lab) -> dict[QuotaKind, int]:
    """What each sensor has measured, in bytes."""
    rows = list(sensors_in_use(lab.services.quotas, clock_ms))
    return {row.kind: round(row.rate * row.window_ms / 1000) for row in rows}


class ShownFetch(InterceptedRequest):
    """Writes down what it is shown, with the number of its request."""

    takes_whole = False

    def __init__(self, log, number):
        self.log, self.number = log, number
        self.note("asked")

    def note(self, *what):
        self.log.append((self.number, *what))

    def sent(self, **_):
        self.note("sent")

    def measured(self, count):
        self.note("measured", count)

    def observer(self, _now_ms):
        return self

    def session(self, error_code, session_id):
        self.note("session", error_code, session_id)

    def partitions(self, topic, fetched):
        self.note(topic, fetched)

    def ended(self):
        self.note("ended")


class Shown(AllShown):
    """An interceptor of all Fetches."""

    def __init__(self):
        self.log = []

    def wants(self, api_key, _now_ms):
        return api_key == FETCH

    def request(self, _head, frame, _now_ms):
        return ShownFetch(self.log, int.from_bytes(frame[8:12], "big"))


class History:
    """One client and its broker: what each got, and what was counted."""

    def __init__(self, lab: Lab, fetch: str = "fetch") -> None:
        self.lab, self.fetch = lab, fetch
        self.number = 0
        self.due: list[tuple[str, int]] = []
        self.at_broker = self.at_client = b""

    async def run(self, steps, end: str) -> dict[str, object]:
        self.client, self.broker = await self.lab.pair(REQUESTS[self.fetch][0](0))
        self.due.append((self.fetch, 0))
        for what, how, cuts in steps:
            if what == "ask":
                await self.ask(how, cuts)
            elif what == "answer":
                await self.answer(how, cuts)
            elif what == "rules":
                self.lab.services.quotas.update(QuotaManagerSettings(rules=RULES[how]))
            else:
                await asyncio.sleep(LEASE_MS / 1000)
        await self.answer([50] * len(self.due), [])
        before = measured(self.lab)
        await self.end(end)
        return {
            "at broker": self.at_broker,
            "at client": self.at_client,
            "measured": before,
            "counted": sorted(
                (sample.name, tuple(sample.labels.items()), sample.value)
                for family in self.lab.metrics.collect()
                for sample in family.samples
                if sample.name.endswith(COUNTED) and sample.value
            ),
        }

    async def ask(self, kinds, cuts) -> None:
        sent = b""
        for kind in kinds:
            self.number += 1
            request, response = REQUESTS[kind]
            sent += request(self.number)
            if response is not None:
                self.due.append((kind, self.number))
        await self.client.send(*frames.in_pieces(sent, cuts, []))
        self.at_broker += await self.broker.receive(len(sent))

    async def answer(self, sizes, cuts) -> None:
        due, self.due = self.due[: len(sizes)], self.due[len(sizes) :]
        pairs = zip(due, sizes, strict=False)
        sent = b"".join(REQUESTS[kind][1](number, size) for (kind, number), size in pairs)
        if sent:
            await self.broker.send(*frames.in_pieces(sent, cuts, []))
            self.at_client += await self.client.receive(len(sent))

    async def end(self, how: str) -> None:
        cut = frames.fetch_request(99)[:-1]
        if how == "client":
            await self.client.close()
        elif how == "broker":
            await self.broker.close()
        elif how == "mid-request":
            await self.client.send(cut)
            await self.client.close()
        elif how == "mid-response":
            await self.ask([self.fetch], [])
            await self.broker.send(REQUESTS[self.fetch][1](self.number, 100)[:-1])
            await self.broker.close()
        else:
            await self.ask([self.fetch], [])
            await self.broker.send(REQUESTS[self.fetch][1](self.number + 1, 100))
        for end in (self.client, self.broker):
            with suppress(OSError):
                await end.ended()
        await until(lambda: not self.lab.relay.connected)


COUNTED = ("requests_total", "bytes_total", "rejected_total", "errors_total", "violations_total")


async def history(steps, end: str, *, first: str, lane: bool, **tls) -> dict[str, object]:
    async with open_lab(rules=RULES[first], lane=lane, **tls) as lab:
        return await History(lab).run(steps, end)


async def shown_history(steps, end: str, *, first: str, lane: bool) -> dict[str, object]:
    async with open_lab(rules=RULES[first], lane=lane, sample_every=50) as lab:
        shown, history = Shown(), History(lab, "shown fetch")
        lab.services.interceptor = lambda *_: shown
        passed = await history.run(steps, end)
        ended = [number for number, what, *_ in shown.log if what == "ended"]
        # The lane shows a request with its response: of each there is the same, in the same order.
        usage = [each.fetched for each in lab.services.clients.usage.values()]
        walked = [(each.total_bytes, each.is_sampled) for each in usage]
        log = sorted(shown.log, key=itemgetter(0))
        return {"shown": log, "ended": ended, "walked": walked, **passed}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=STEPS,
    end=st.sampled_from(ENDS),
    first=st.sampled_from(sorted(RULES)),
    sides=st.sampled_from(TLS_SIDES),
)
def test_any_history_is_the_same_with_and_without_it(certificates, steps, end, first, sides):
    tls = dict.fromkeys(sides, certificates)
    ways = [
        asyncio.run(history(steps, end, first=first, lane=lane, **tls)) for lane in (True, False)
    ]
    assert ways[0] == ways[1]


@settings(max_examples=40)
@given(
    steps=SHOWN_STEPS,
    end=st.sampled_from(ENDS),
    first=st.sampled_from(sorted(RULES)),
)
def test_an_interceptor_is_shown_the_same_with_and_without_it(steps, end, first):
    ways = [
        asyncio.run(shown_history(steps, end, first=first, lane=lane)) for lane in (True, False)
    ]
    assert ways[0] == ways[1]


async def test_what_was_shown_goes_with_a_request_that_python_takes_over():
    shown = Shown()
    async with open_lab(lane=True) as lab:
        lab.services.interceptor = lambda *_: shown
        client, broker = await warmed_up(lab, "shown fetch")
        request, response = REQUESTS["shown fetch"]
        await client.send(request(8) + request(9))
        await broker.frame()
        await broker.frame()
        connection = flows(lab)
        assert connection.lane.waiting == 2
        assert [each.seen.number for each in connection.in_flight] == [8, 9]
        assert shown.log[-1] == (9, "sent")
        await broker.send(response(8, 10), response(9, 20))
        for _ in range(2):
            await client.frame()
        await until(lambda: shown.log[-1] == (9, "ended"))


async def test_what_is_shown_is_in_the_lane_though_its_topics_are_metered():
    """All of it is walked when it is shown, and stands for itself alone."""
    async with open_lab(lane=True, sample_every=50) as lab:
        lab.services.interceptor = lambda *_: Shown()
        client, broker = await warmed_up(lab, "shown fetch")
        (usage,) = lab.services.clients.usage.values()
        request, response = REQUESTS["shown fetch"]
        flows(lab).shown.show()
        before = usage.fetched.total_bytes
        for number in range(8, 12):
            await client.send(request(number))
            assert await broker.frame() == request(number)
            assert flows(lab).lane.waiting == 1
            await broker.send(response(number, 10))
            await client.frame()
        flows(lab).shown.show()
        moved = 4 * (len(request(8)) + len(response(8, 10)))
        assert usage.fetched.total_bytes == before + moved


async def test_what_has_too_many_elements_passes_unread():
    async with open_lab(lane=True) as lab:
        shown = Shown()
        lab.services.interceptor = lambda *_: shown
        client, broker = await warmed_up(lab, "shown fetch")

        def refuse(*_):
            raise TooManyElements

        shown.request = refuse
        request, response = REQUESTS["shown fetch"]
        for number in range(8, 12):
            await client.send(request(number))
            assert await broker.frame() == request(number)
            await broker.send(response(number, 10))
            assert await client.frame() == response(number, 10)
        flows(lab).shown.show()
        await client.send(request(12))
        assert await broker.frame() == request(12)
        assert not lab.rejected("internal_error")


async def test_what_cannot_be_read_ends_the_connection():
    async with open_lab(lane=True) as lab:
        shown = Shown()
        lab.services.interceptor = lambda *_: shown
        client, broker = await warmed_up(lab, "shown fetch")
        await client.send(REQUESTS["shown fetch"][0](8))
        await broker.frame()
        await broker.send(frames.response(FETCH, 15, 8, b"\xff" * 40))
        await client.frame()
        await client.ended()
        assert lab.count("upstream_errors_total", reason="bad_response") == 1


async def warmed_up(lab: Lab, kind: str = "fetch") -> tuple[End, End]:
    """A client whose Fetch the lane knows."""
    request, response = REQUESTS[kind]
    client, broker = await lab.pair(request(0))
    for number in range(KNOWN_AFTER):
        if number:
            await client.send(request(number))
            await broker.frame()
        await broker.send(response(number, 50))
        await client.frame()
    return client, broker


def flows(lab: Lab):
    (connection,) = lab.relay.connections
    return connection


@pytest.mark.parametrize("sides", TLS_SIDES[1:], ids=lambda sides: "+".join(sides) or "plain")
async def test_a_request_in_flight_is_seen_by_all_who_look(certificates, sides):
    tls = dict.fromkeys(sides, certificates)
    async with open_lab(rules=RULES["far"], lane=True, **tls) as lab:
        client, broker = await warmed_up(lab)
        await client.send(frames.fetch_request(8) + frames.fetch_request(9))
        await broker.frame()
        connection = flows(lab)
        assert connection.lane.waiting == 2
        assert [each.correlation_id for each in connection.in_flight] == [8, 9]
        assert connection.lane.waiting == 0
        await client.send(frames.fetch_request(10))
        await broker.frame()
        assert connection.lane.waiting == 1
        sent = b"".join(frames.fetch_response(number, 60) for number in (8, 9, 10))
        await broker.send(sent)
        assert await client.receive(len(sent)) == sent


async def test_a_newcomer_is_in_it_from_its_second_request_on():
    async with open_lab(lane=True) as lab:
        client, broker = await lab.pair(frames.fetch_request(1))
        await broker.send(frames.fetch_response(1, 60))
        assert await client.frame() == frames.fetch_response(1, 60)
        await client.send(frames.fetch_request(2))
        assert await broker.frame() == frames.fetch_request(2)
        assert flows(lab).lane.waiting == 1


async def test_it_knows_two_kinds_of_an_api():
    (no_acks, _), (acks, answer) = REQUESTS["acks 0"], REQUESTS["acks 1"]
    async with open_lab(rules=RULES["far"], lane=True) as lab:
        client, broker = await warmed_up(lab, "acks 1")
        for number in (10, 20):
            train = b"".join(no_acks(number + turn) for turn in range(3)) + acks(number + 3)
            await client.send(train)
            assert await broker.receive(len(train)) == train
            assert flows(lab).lane.waiting == (number == 20)
            await broker.send(answer(number + 3, 0))
            await client.frame()
        assert len(flows(lab).kinds) == 2
        for acks in (-1, 2):  # a third one takes the place of the older one
            await client.send(frames.produce_request(30, acks=acks))
            await broker.frame()
        assert len(flows(lab).kinds) == 2


async def test_it_goes_on_behind_a_frame_that_came_in_two_parts():
    async with open_lab(rules=RULES["far"], lane=True) as lab:
        client, broker = await warmed_up(lab, "large acks 1")
        sent = b"".join(REQUESTS["large acks 1"][0](number) for number in range(8, 12))
        await client.send(sent[:500])
        assert await broker.receive(500) == sent[:500]
        await client.send(sent[500:])
        assert await broker.receive(len(sent) - 500) == sent[500:]
        assert flows(lab).lane.waiting == 3


async def test_a_drain_waits_for_what_the_lane_has_in_flight():
    async with open_lab(lane=True) as lab:
        client, broker = await warmed_up(lab)
        await client.send(frames.fetch_request(8))
        await broker.frame()
        assert flows(lab).lane.waiting == 1
        flows(lab).drain()
        await client.send(frames.fetch_request(9))
        await turns(20)
        assert flows(lab).life.state.value == "draining"
        await broker.send(frames.fetch_response(8, 60))
        assert await client.frame() == frames.fetch_response(8, 60)
        assert await client.ended() == b""


async def test_who_does_not_wait_for_an_answer_pays_for_it():
    async with open_lab(rules=RULES["near"], lane=True) as lab:
        client, broker = await warmed_up(lab)
        before = measured(lab)
        await client.send(b"".join(map(frames.fetch_request, range(8, 12))))
        for _ in range(8, 12):
            await broker.frame()
        assert flows(lab).lane.waiting == 4
        await client.close()
        await until(lambda: not lab.relay.connected)
        assert measured(lab)[CONSUMER] - before[CONSUMER] >= 4 * 50


@pytest.mark.parametrize("change", ["near", "none", "far"])
async def test_other_rules_hold_for_the_next_request(change):
    async with open_lab(rules=RULES["far"], lane=True) as lab:
        client, broker = await warmed_up(lab)
        lab.services.quotas.update(QuotaManagerSettings(rules=RULES[change]))
        await client.send(frames.fetch_request(8, max_bytes=50 << 20))
        granted = int.from_bytes((await broker.frame())[-4:], "big")
        assert (granted < 50 << 20) is (change == "near")


async def test_a_fetch_is_limited_as_by_python():
    """Java asks for 50 MiB; far below its bound a client is granted 250 ms of it."""
    async with open_lab(rules=RULES["near"], lane=True) as lab:
        client = await lab.client()
        await client.send(frames.fetch_request(0, max_bytes=50 << 20))
        broker = await lab.broker()
        granted = {(await broker.frame())[-4:]}
        await broker.send(frames.fetch_response(0, 50))
        await client.frame()
        for number in range(1, 30):
            await client.send(frames.fetch_request(number, max_bytes=50 << 20))
            granted.add((await broker.frame())[-4:])
            assert flows(lab).lane.waiting or number < KNOWN_AFTER
            await broker.send(frames.fetch_response(number, 50))
            await client.frame()
        assert granted == {pack(">i", int(NEAR / 4))}


async def test_what_was_lent_to_a_connection_is_free_when_it_has_gone():
    async with open_lab(rules=RULES["near"], lane=True) as lab:
        client, _ = await warmed_up(lab)
        (meter,) = (each for each in lab.services.quotas.iter_meters() if each.kind is CONSUMER)
        assert (meter.gate.under_way, meter.gate.granted_size) == (1, LEAST_GRANT_BYTES)
        await client.close()
        await until(lambda: not lab.relay.connected)
        assert (meter.gate.under_way, meter.gate.granted_size) == (0, 0)


async def test_near_its_bound_a_client_stays_in_the_lane():
    """As long as what a Fetch may bring can pass at once, whatever was used before."""
    async with open_lab(rules=RULES["near"], lane=True) as lab:
        client, broker = await warmed_up(lab)
        window_s = 10
        large, left = 60_000, NEAR * window_s
        number = KNOWN_AFTER
        while left > 2 * large:
            await client.send(frames.fetch_request(number))
            await broker.frame()
            assert flows(lab).lane.waiting == 1
            await broker.send(frames.fetch_response(number, large))
            await client.frame()
            left -= large
            number += 1
        assert measured(lab)[CONSUMER] > 0.95 * NEAR * window_s
        assert lab.held == 0


async def test_a_request_longer_than_allowed_is_refused():
    limits = Limits(max_request_bytes=200)
    async with open_lab(limits=limits, lane=True) as lab:
        client, broker = await warmed_up(lab)
        await client.send(frames.produce_request(8, acks=1, record_bytes=10))
        await broker.frame()
        await client.send(frames.produce_request(9, acks=1, record_bytes=1000))
        await client.ended()
        assert lab.rejected("too_long") == 1


@pytest.mark.parametrize("sides", TLS_SIDES[1:], ids=lambda sides: "+".join(sides) or "plain")
async def test_a_receiver_that_takes_nothing_gets_all_in_the_end(certificates, sides):
    limits = Limits(max_in_flight_requests=10_000)
    tls = dict.fromkeys(sides, certificates)
    async with open_lab(rules=RULES["far"], limits=limits, lane=True, **tls) as lab:
        client, broker = await lab.pair(frames.fetch_request(0))
        sent, number = b"", 0
        while not flows(lab).responses.sending_blocked:
            answer = frames.fetch_response(number, 12_000)
            number += 1
            await broker.send(answer)
            await client.send(frames.fetch_request(number))
            assert await broker.frame() == frames.fetch_request(number)
            sent += answer
        assert await client.receive(len(sent)) == sent


async def test_where_the_time_went_is_measured_of_one_in_some():
    async with open_lab(lane=True) as lab:
        client, broker = await warmed_up(lab)
        before = lab.count("broker_seconds_count", api="Fetch")
        for number in range(8, 8 + 5 * SAMPLE_EVERY):
            await client.send(frames.fetch_request(number))
            await broker.frame()
            await broker.send(frames.fetch_response(number, 50))
            await client.frame()
        assert lab.count("broker_seconds_count", api="Fetch") - before >= 4


def test_who_closes_it_from_within_gets_an_error_and_no_crash():
    client, ours = socket.socketpair()
    broker, theirs = socket.socketpair()
    with client, ours, broker, theirs:
        kinds = []
        given = deque(), kinds, print, print, None, None
        lane = Lane(ours.fileno(), broker.fileno(), 10, given)
        cells = CounterChild("counter").cells
        times, start = (lambda *_: None), b"start"
        kind = Kind(
            *("about", FETCH << 16 | 15, start, lambda *_: lane.close() or True, times),
            *(cells, cells, None, 0, 0, 0, [], None, [], None, None),
        )
        kinds.append(kind)
        lane.request_bytes = 100
        client.sendall(pack(">ihhi", 8 + len(start), FETCH, 15, 1) + start)
        with pytest.raises(SystemError):
            lane.requests_ready()
