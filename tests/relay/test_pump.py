"""Bodies arrive whole and in order whichever way they go: splice, copy, TLS on a side."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from relaylab.lab import Certificates, left_open_after, open_files

from proxy.cluster.dial import tls_handshake
from proxy.relay.channel import BLOCKED, Channel, ChannelLost
from proxy.relay.pump import SPLICE_MIN_BYTES, PipePool, Pump, WaitReason

WAYS = ["splice", "copy", "tls source", "tls sink", "tls both"]
MAX_STEPS = 100_000
ANY_BUDGET = 1 << 30

bodies = st.lists(
    st.one_of(
        st.integers(1, 300),
        st.integers(SPLICE_MIN_BYTES - 2, SPLICE_MIN_BYTES + 2),
        st.integers(1, 300_000),
    ),
    min_size=1,
    max_size=4,
)
pieces = st.lists(st.integers(1, 200_000), min_size=1, max_size=6).map(
    lambda sizes: [*sizes, 20_000]  # so that every case comes to its end in time
)


class Bench:
    """A pump with the far ends of its source and its sink."""

    def __init__(self, way: str, certificates: Certificates) -> None:
        self.pool = PipePool(0 if way == "copy" else 4)
        self.giver, source = _connected(way in ("tls source", "tls both"), certificates)
        self.taker, sink = _connected(way in ("tls sink", "tls both"), certificates)
        self.channels = (self.giver, source, self.taker, sink)
        self.pump = Pump(source, sink, self.pool)
        self.scratch = memoryview(bytearray(1 << 20))

    def give(self, data: memoryview | bytes) -> int:
        return max(self.giver.send(data), 0) if len(data) else 0

    def take(self, count: int) -> bytes:
        got = self.taker.recv_into(self.scratch[:count])
        return bytes(self.scratch[: max(got, 0)])

    def close(self) -> None:
        self.pump.close()
        self.pool.close()
        for channel in self.channels:
            channel.sock.close()


def _connected(is_tls: bool, certificates: Certificates) -> tuple[Channel, Channel]:
    """A TCP connection: the far end, and ours."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    for sock in (far, near):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not is_tls:
        return Channel(far), Channel(near)

    async def greet() -> tuple[Channel, Channel]:
        client = tls_handshake(
            far, certificates.client(), server_side=False, server_hostname="localhost"
        )
        server = tls_handshake(near, certificates.server(), server_side=True)
        first, second = await asyncio.gather(client, server)
        return Channel(first), Channel(second)

    return asyncio.run(greet())


@contextmanager
def bench_of(way: str, certificates: Certificates) -> Iterator[Bench]:
    files = open_files()
    bench = Bench(way, certificates)
    try:
        yield bench
    finally:
        bench.close()
    assert bench.pool.open_pipes == 0
    assert not left_open_after(files)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def bench(way, certificates) -> Iterator[Bench]:
    with bench_of(way, certificates) as bench:
        yield bench


def content(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    sizes=bodies,
    giving=pieces,
    taking=pieces,
    budget=st.sampled_from([1, 10_000, ANY_BUDGET]),
)
def test_bodies_of_any_size_in_pieces_of_any_size(way, certificates, sizes, giving, taking, budget):
    with bench_of(way, certificates) as bench:
        sent = content(sum(sizes))
        left = memoryview(sent)
        waiting = list(sizes)
        received = b""
        for step in range(MAX_STEPS):
            left = left[bench.give(left[: giving[step % len(giving)]]) :]
            if not bench.pump.active and waiting:
                bench.pump.start(waiting.pop(0))
            bench.pump.run(budget)
            received += (
                bench.take(taking[step % len(taking)]) if taking[step % len(taking)] else b""
            )
            if len(received) == len(sent):
                break
        assert received == sent
        assert not bench.pump.active


def fill_up(bench: Bench, body_bytes: int) -> tuple[bytes, memoryview]:
    """Run until the sink takes no more; return all that is to arrive and what was not given yet."""
    sent = content(body_bytes)
    left = memoryview(sent)
    bench.pump.start(body_bytes)
    for _ in range(MAX_STEPS):
        given = bench.give(left[:100_000])
        left = left[given:]
        if bench.pump.run(ANY_BUDGET) is WaitReason.WRITE and not given:
            return sent, left
    raise AssertionError("the sink takes everything")


def test_a_sink_that_takes_no_more(bench):
    sent, left = fill_up(bench, 64 << 20)
    unread = bench.pump.unread
    assert bench.pump.run(ANY_BUDGET) is WaitReason.WRITE
    assert bench.pump.unread == unread
    received = []
    for _ in range(MAX_STEPS):
        left = left[bench.give(left[:100_000]) :]
        received.append(bench.take(1 << 20))
        if bench.pump.run(ANY_BUDGET) is None:
            break
    while piece := bench.take(1 << 20):
        received.append(piece)
    assert b"".join(received) == sent


def test_a_pipe_that_holds_bytes_is_not_used_again(bench):
    fill_up(bench, 64 << 20)
    bench.pump.close()
    assert bench.pool.open_pipes == 0


def test_a_pipe_is_given_back_after_each_body(bench):
    for _ in range(3):
        bench.give(content(SPLICE_MIN_BYTES))
        bench.pump.start(SPLICE_MIN_BYTES)
        received = b""
        for _ in range(MAX_STEPS):
            bench.pump.run(ANY_BUDGET)
            received += bench.take(SPLICE_MIN_BYTES)
            if len(received) == SPLICE_MIN_BYTES:
                break
        assert not bench.pump.active
        assert bench.pool.open_pipes <= 1


def test_the_source_ends_within_a_body(bench):
    bench.give(content(100_000))
    bench.giver.sock.close()
    bench.pump.start(200_000)
    received = b""
    for _ in range(MAX_STEPS):
        progress = bench.pump.run(ANY_BUDGET)
        received += bench.take(100_000)
        if progress is WaitReason.CLOSED:
            break
    while piece := bench.take(100_000):
        received += piece
    assert progress is WaitReason.CLOSED
    assert received == content(100_000)


def test_the_budget_lets_others_run(bench):
    bench.pump.start(1 << 20)
    left = memoryview(content(1 << 20))
    received = 0
    stops = 0
    for _ in range(MAX_STEPS):
        left = left[bench.give(left) :]
        progress = bench.pump.run(100_000)
        stops += progress is WaitReason.TURN
        received += len(bench.take(1 << 20))
        if received == 1 << 20:
            break
    assert received == 1 << 20
    assert stops >= 1


def test_a_sink_that_is_gone(bench):
    bench.taker.sock.close()
    bench.pump.start(64 << 20)
    with pytest.raises(ChannelLost) as lost:  # noqa: PT012 - some steps are still taken
        for _ in range(MAX_STEPS):
            bench.give(content(100_000))
            bench.pump.run(ANY_BUDGET)
    assert lost.value.channel is bench.channels[3]


@pytest.mark.parametrize("way", ["splice", "copy", "tls source"], indirect=True)
def test_a_channel_knows_that_its_peer_has_ended(bench):
    _, source, _, _ = bench.channels
    assert source.has_ended() is None
    bench.give(b"x")
    while source.has_ended() is None:
        pass
    assert source.has_ended() is False
    while source.recv_into(bench.scratch) == BLOCKED:
        pass
    assert source.has_ended() is None
    with suppress(OSError):
        bench.giver.sock.shutdown(socket.SHUT_WR)
    while not source.has_ended():  # on loopback at once, or with the next softirq
        pass
