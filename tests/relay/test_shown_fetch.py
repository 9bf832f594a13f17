"""What an interceptor is shown of a Fetch and its response, and in which order."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parts.interceptors import AllShown
from relaylab import frames
from relaylab.lab import LIMIT_S, fast_client, open_lab, turns, until
from relaylab.topic_frames import BY_NAME, fetched

from proxy.relay.frame_flow import READ_BYTES
from proxy.relay.interceptor import InterceptedRequest
from proxy.relay.memory_pool import UNCOUNTED_BYTES
from proxy.relay.pump import SPLICE_MIN_BYTES
from proxy.relay.requests import MAX_SEEN_ASK_BYTES
from proxy.wire.apis import FETCH
from proxy.wire.fetch import read_fetch_request
from proxy.wire.layout import MAX_ELEMENTS, encode_uvarint

PATHS = ["splice", "copy"]
RECORDS_BYTES = 20_000


class ShownFetch(InterceptedRequest):
    takes_whole = False

    def __init__(self, log, number):
        self.log, self.number = log, number
        self.note("asked")

    def note(self, what):
        self.log.append((self.number, what))

    def sent(self, **_):
        self.note("sent")

    def observer(self, _now_ms):
        self.note("answered")
        return self

    def session(self, error_code, session_id):
        assert (error_code, session_id) == (0, 0)

    def partitions(self, topic, fetched):
        assert topic == bytes(16)
        for partition, *_, records_bytes, _ in fetched:
            self.note((partition, records_bytes))

    def ended(self):
        self.note("ended")


class ShowingInterceptor(AllShown):
    def __init__(self, log):
        self.log = log
        self.follows = True

    def wants(self, _api_key, _now_ms):
        return self.follows

    def request(self, head, _frame, _now_ms):
        return ShownFetch(self.log, head.correlation_id)


@pytest.mark.parametrize("path", PATHS)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    records=st.lists(
        st.sampled_from([0, 1, 200, 20_000, SPLICE_MIN_BYTES, 150_000]), min_size=1, max_size=6
    ),
    cuts=st.lists(st.floats(0, 1), max_size=6),
    from_end=st.lists(st.integers(1, 80), max_size=4),
)
def test_all_of_it_once_before_the_next_one(path, records, cuts, from_end):
    sent = frames.fetch_partitions(1, [bytes(size) for size in records])
    pieces = frames.in_pieces(sent, cuts, from_end)
    log = []

    async def relay() -> None:
        async with open_lab(splice=path != "copy") as lab:
            lab.services.interceptor = lambda *_: ShowingInterceptor(log)
            client, broker = await lab.pair(frames.fetch_request(1, version=15))
            assert log == [(1, "asked"), (1, "sent")]
            await client.send(frames.fetch_request(2, version=15))
            await broker.frame()
            last = frames.fetch_partitions(2, [b""])
            sending = asyncio.create_task(broker.send(*pieces[:-1], pieces[-1] + last))
            assert await client.frame() == sent
            assert await client.frame() == last
            await sending

    asyncio.run(relay())
    shown = [what for number, what in log if number == 1]
    assert shown == ["asked", "sent", "answered", *enumerate(records), "ended"]
    assert log[2:4] == [(2, "asked"), (2, "sent")]
    assert log[-3:] == [(2, "answered"), (2, (0, 0)), (2, "ended")]


@pytest.mark.parametrize("path", PATHS)
async def test_a_response_that_breaks_the_rules_on_its_way(path):
    """What was sent on by then the client has got; it is shown nothing that is not sure."""
    sent = frames.fetch_partitions(1, [bytes(RECORDS_BYTES)] * 20)
    size, longer = encode_uvarint(RECORDS_BYTES + 1), encode_uvarint((1 << 21) - 1)
    assert len(size) == len(longer)
    start, last, rest = sent.rpartition(size)
    assert last
    log = []
    async with open_lab(splice=path != "copy") as lab:
        lab.services.interceptor = lambda *_: ShowingInterceptor(log)
        client, broker = await lab.pair(frames.fetch_request(1, version=15))
        await broker.send(start + longer + rest)
        assert sent.startswith((await client.ended())[: len(start)])
        await broker.ended()
        assert lab.upstream_errors("bad_response") == 1
    assert (1, "ended") not in log
    assert {what for _, what in log if isinstance(what, tuple)} <= {
        (0, 0),
        *enumerate([RECORDS_BYTES] * 19),
    }


async def test_a_client_that_takes_nothing_for_a_while():
    numbers = range(1, 9)
    records = [bytes(RECORDS_BYTES)] * 50
    sent = b"".join(frames.fetch_partitions(number, records) for number in numbers)
    loop = asyncio.get_running_loop()
    async with open_lab() as lab, asyncio.timeout(LIMIT_S):
        lab.services.interceptor = lambda *_: ShowingInterceptor([])
        sock = await lab.silent_client()
        asked = [frames.fetch_request(number, version=15) for number in numbers]
        await loop.sock_sendall(sock, b"".join(asked))
        broker = await lab.broker()
        assert [await broker.frame() for _ in asked] == asked
        broker.writer.write(sent)
        (connection,) = lab.relay.connections
        responses = connection.responses
        await until(lambda: responses.sending_blocked)
        assert responses.read_bytes <= READ_BYTES
        assert len(responses.stash) <= READ_BYTES
        left = memoryview(sent)
        while left:
            piece = await loop.sock_recv(sock, len(left))
            assert piece == left[: len(piece)]
            left = left[len(piece) :]


async def test_a_client_that_somebody_follows_later_and_no_longer():
    log = []
    interceptor = ShowingInterceptor(log)
    async with open_lab(rules=(fast_client(),), lane=False) as lab:
        lab.services.interceptor = lambda *_: interceptor
        interceptor.follows = False
        client, broker = await lab.pair(frames.fetch_request(1, version=15))
        sent = frames.fetch_partitions(1, [b""])
        await broker.send(sent)
        assert await client.frame() == sent
        for number in range(2, 11):
            interceptor.follows = 4 <= number < 8
            request = frames.fetch_request(number, version=15)
            sent = frames.fetch_partitions(number, [b""])
            await client.send(request)
            assert await broker.frame() == request
            await broker.send(sent)
            assert await client.frame() == sent
        labels = {"listener": "default", "user": "", "client_id": "test", "api": "Fetch"}
        assert lab.count("bytes_total", **labels) == 10 * (len(request) + len(sent))
    assert [number for number, what in log if what == "ended"] == [4, 5, 6, 7]


def long_request(number, size):
    return frames.framed(frames.fetch_request(number, version=15)[4:] + bytes(size))


async def test_a_long_request_is_the_last_one_until_it_is_answered():
    """What each of them asks for is kept meanwhile, up to a hundred times its bytes."""
    async with open_lab() as lab, asyncio.timeout(LIMIT_S):
        lab.services.interceptor = lambda *_: ShowingInterceptor([])
        client, broker = await lab.pair(long_request(1, UNCOUNTED_BYTES))
        for number in (1, 2):
            after = long_request(number + 1, UNCOUNTED_BYTES)
            sending = asyncio.create_task(client.send(after))
            await turns(20)
            assert not broker.unread
            sent = frames.fetch_partitions(number, [b""])
            await broker.send(sent)
            assert await client.frame() == sent
            assert await broker.frame() == after
            await sending


@pytest.mark.parametrize(("more", "is_shown"), [(-100, True), (1, False)])
async def test_a_request_for_more_partitions_than_are_kept_is_not_read(more, is_shown):
    log = []
    limit_bytes = 2 * MAX_SEEN_ASK_BYTES
    async with open_lab(read_limit_bytes=limit_bytes) as lab, asyncio.timeout(LIMIT_S):
        lab.services.interceptor = lambda *_: ShowingInterceptor(log)
        client, broker = await lab.pair(frames.fetch_request(1, version=15))
        await broker.send(frames.fetch_partitions(1, [b""]))
        await client.frame()
        sending = asyncio.create_task(client.send(long_request(2, MAX_SEEN_ASK_BYTES + more)))
        await broker.frame()
        await sending
        await broker.send(frames.fetch_partitions(2, [b""]))
        await client.frame()
    assert ((2, "asked") in log) is is_shown


async def test_a_request_for_more_topics_than_are_read_at_once_passes_unread():
    """Three bytes are enough for one without partitions."""
    topics = encode_uvarint(MAX_ELEMENTS + 2) + b"\1\1\0" * (MAX_ELEMENTS + 1)
    request = frames.request(FETCH, BY_NAME, 2, bytes(25) + topics + b"\1\1\0")

    class Reading(ShowingInterceptor):
        def request(self, head, frame, now_ms):
            read_fetch_request(head.api_version, frame[head.header_end :])
            return super().request(head, frame, now_ms)

    log = []
    async with open_lab() as lab, asyncio.timeout(LIMIT_S):
        lab.services.interceptor = lambda *_: Reading(log)
        client, broker = await lab.pair(request)
        response = fetched(2, {"orders": 1})
        await broker.send(response)
        assert await client.frame() == response
    assert not log
