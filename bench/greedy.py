"""A client of raw sockets that takes all it can get, and counts it.

Requests come from kafka-python's codec. The correlation id of a Fetch is its version: an answer
then says where its throttle time is, however many requests are under way.
"""

import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kafka.protocol.consumer.fetch import FetchRequest
from kafka.protocol.producer.produce import ProduceRequest
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest
from kafka.record.memory_records import MemoryRecordsBuilder

Address = tuple[str, int]

BATCH_BYTES = 16_000
"""Value of the one record of each batch."""

FETCH_VERSION = 12
OLD_FETCH_VERSION = 4
PRODUCE_VERSION = 7
SASL_VERSION = 1
LOGIN_ANSWERS = 2

THROTTLE_AT = {FETCH_VERSION: 9, OLD_FETCH_VERSION: 8}
"""Where a Fetch response of a version has its throttle time, counted from its length field."""
HEAD_BYTES = max(THROTTLE_AT.values()) + 4

CONNECT_TIMEOUT_S = 10.0
LOOK_EVERY_S = 0.1
"""At most between two looks whether an attempt is over."""
COUNT_EVERY_S = 0.25
"""Between two questions for what a broker has appended."""
PAUSE_S = 0.005
"""Before a connection that takes the place of another; without it, an attempt that gets nothing
would keep the machine busy."""
RECEIVE_BYTES = 1 << 18
RECORD_OVERHEAD_BYTES = 1000
PRODUCE_TIMEOUT_MS = 30_000


def fetch(topic: str, max_bytes: int, client_id: str | None, version: int = FETCH_VERSION) -> bytes:
    """Make the frame of a Fetch of a topic's first partition, from its start."""
    partition = FetchRequest.FetchTopic.FetchPartition(
        partition=0, fetch_offset=0, partition_max_bytes=max_bytes
    )
    wanted = FetchRequest.FetchTopic(topic=topic, partitions=[partition])
    request = FetchRequest[version](
        max_wait_ms=0, min_bytes=0, max_bytes=max_bytes, topics=[wanted]
    )
    return _framed(request, client_id, version)


def produce(topic: str, value_bytes: int, client_id: str, acks: int = 1) -> bytes:
    """Make the frame of a Produce of one record to a topic's first partition."""
    builder = MemoryRecordsBuilder(2, 0, value_bytes + RECORD_OVERHEAD_BYTES)
    builder.append(timestamp=1, key=None, value=bytes(value_bytes))
    builder.close()
    topic_data = ProduceRequest.TopicProduceData
    part = topic_data.PartitionProduceData(index=0, records=bytes(builder.buffer()))
    request = ProduceRequest[PRODUCE_VERSION](
        acks=acks,
        timeout_ms=PRODUCE_TIMEOUT_MS,
        topic_data=[topic_data(name=topic, partition_data=[part])],
    )
    return _framed(request, client_id)


def login(user: str, password: str, client_id: str) -> bytes:
    """Make the frames of a login by SASL PLAIN; the broker gives LOGIN_ANSWERS answers."""
    handshake = SaslHandshakeRequest[SASL_VERSION](mechanism="PLAIN")
    authenticate = SaslAuthenticateRequest[SASL_VERSION](
        auth_bytes=f"\0{user}\0{password}".encode()
    )
    return _framed(handshake, client_id) + _framed(authenticate, client_id)


def _framed(request: Any, client_id: str | None, correlation_id: int = 0) -> bytes:
    request.with_header(correlation_id=correlation_id, client_id=client_id)
    return bytes(request.encode(header=True, framed=True))


@dataclass(slots=True)
class Run:
    """How long an attempt goes on, and what it has got.

    Attributes:
        end_s: when it ends, on the monotonic clock.
        most_bytes: with so many it ends early: what an attempt without a bound takes is no use.
        appended: asks how many bytes a producer has had appended; None: the attempt reads.
        got_bytes: of responses received, or of records appended.
        told_ms: the longest throttle time that a Fetch response told.
        requests: how many were sent.

    """

    end_s: float
    most_bytes: int
    appended: Callable[[], int] | None = None
    got_bytes: int = 0
    told_ms: int = 0
    requests: int = 0
    _counted_s: float = field(default=0.0)

    @property
    def is_on(self) -> bool:
        """Whether there is time left, and less than `most_bytes` was got."""
        now_s = time.monotonic()
        if self.appended is not None and now_s - self._counted_s > COUNT_EVERY_S:
            self.got_bytes = self.appended()
            self._counted_s = now_s
        return now_s < self.end_s and self.got_bytes < self.most_bytes

    def received(self, count: int) -> None:
        """Count bytes of responses, which are what a reader gets."""
        if self.appended is None:
            self.got_bytes += count


@dataclass(frozen=True, slots=True)
class Seat:
    """From where and as whom an attempt is made.

    Attributes:
        address: of the proxy.
        source: the address that connections come from: limits by address are the attempt's own.
        client_id: whom the rule names, where `opening` is empty.
        topic: read from or produced to.
        opening: what each connection begins with.
        opening_answers: how many responses that gets.

    """

    address: Address
    source: str
    client_id: str
    topic: str
    opening: bytes = b""
    opening_answers: int = 0

    def connect(self) -> socket.socket:
        """Open a connection; raises OSError."""
        return socket.create_connection(self.address, CONNECT_TIMEOUT_S, (self.source, 0))


class Answers:
    """Cuts a stream of responses into frames."""

    def __init__(self) -> None:
        self.told_ms = 0
        """The longest throttle time in a Fetch response."""
        self._head = bytearray()
        self._rest_bytes = 0

    def take(self, data: memoryview) -> int:
        """Take the next bytes; return how many responses they complete."""
        complete = 0
        while data:
            if self._rest_bytes:
                skipped = min(self._rest_bytes, len(data))
                self._rest_bytes -= skipped
                data = data[skipped:]
            else:
                wanted = HEAD_BYTES - len(self._head)
                self._head += data[:wanted]
                data = data[wanted:]
                if len(self._head) < HEAD_BYTES:
                    break
                self._rest_bytes = 4 + _int32(self._head, 0) - HEAD_BYTES
                throttle_at = THROTTLE_AT.get(_int32(self._head, 4))
                if throttle_at is not None:
                    self.told_ms = max(self.told_ms, _int32(self._head, throttle_at))
                self._head.clear()
            complete += not self._rest_bytes
        return complete


def _int32(data: bytearray, start: int) -> int:
    return int.from_bytes(data[start : start + 4], "big", signed=True)


class _Reader:
    """One connection that asks again for each answer."""

    def __init__(self, seat: Seat, requests: Iterator[bytes], depth: int) -> None:
        self.sock = seat.connect()
        self.answers = Answers()
        self.due = seat.opening_answers + depth
        """Answers that have not come."""
        self.asked_s = time.monotonic()
        self.sock.sendall(seat.opening + b"".join(next(requests) for _ in range(depth)))


def ask(
    run: Run,
    seat: Seat,
    requests: Iterator[bytes],
    *,
    connections: int = 1,
    depth: int = 1,
    leaves: bool = False,
    patience_s: float | None = None,
) -> None:
    """Keep `depth` requests under way on each connection until the run is over.

    Args:
        run: counts.
        seat: where to connect to.
        requests: the next one is sent for each answer.
        connections: how many there are at a time.
        depth: the first requests of a connection go out in one write, behind the opening.
        leaves: a connection is given up for a new one when its first requests are answered.
        patience_s: a connection is given up for a new one when nothing comes for so long.

    """
    buffer = bytearray(RECEIVE_BYTES)
    with selectors.DefaultSelector() as selector:

        def join() -> None:
            try:
                reader = _Reader(seat, requests, depth)
            except OSError:
                return
            run.requests += depth
            reader.sock.setblocking(False)
            selector.register(reader.sock, selectors.EVENT_READ, reader)

        def leave(reader: _Reader) -> None:
            selector.unregister(reader.sock)
            run.told_ms = max(run.told_ms, reader.answers.told_ms)
            reader.sock.close()

        def take(reader: _Reader) -> bool:
            """Receive; return whether the connection is to go on."""
            try:
                size = reader.sock.recv_into(buffer)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not size:
                return False
            run.received(size)
            complete = reader.answers.take(memoryview(buffer)[:size])
            reader.asked_s = time.monotonic()
            reader.due -= complete
            if leaves:
                return reader.due > 0
            again = min(complete, depth - reader.due)
            if again > 0:
                reader.due += again
                run.requests += again
                reader.sock.setblocking(True)
                reader.sock.settimeout(CONNECT_TIMEOUT_S)
                try:
                    reader.sock.sendall(b"".join(next(requests) for _ in range(again)))
                except OSError:
                    return False
                reader.sock.setblocking(False)
            return True

        step_s = min(LOOK_EVERY_S, patience_s or LOOK_EVERY_S)
        while run.is_on:
            missing = connections - len(selector.get_map())
            if missing:
                time.sleep(PAUSE_S)
            for _ in range(missing):
                join()
            for key, _ in selector.select(step_s):
                if not take(key.data):
                    leave(key.data)
            if patience_s is not None:
                late_s = time.monotonic() - patience_s
                for key in list(selector.get_map().values()):
                    if key.data.asked_s < late_s:
                        leave(key.data)
        for key in list(selector.get_map().values()):
            leave(key.data)


def pour(run: Run, seat: Seat, request: bytes, *, connections: int = 1) -> None:
    """Write a request again and again on each connection, and read no answer."""
    with selectors.DefaultSelector() as selector:
        while run.is_on:
            missing = connections - len(selector.get_map())
            if missing:
                time.sleep(PAUSE_S)
            for _ in range(missing):
                try:
                    sock = seat.connect()
                except OSError:
                    continue
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_WRITE, memoryview(request))
            for key, _ in selector.select(LOOK_EVERY_S):
                try:
                    rest = key.data[key.fileobj.send(key.data) :]
                except OSError:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                    continue
                run.requests += not rest
                selector.modify(key.fileobj, selectors.EVENT_WRITE, rest or memoryview(request))
        for key in list(selector.get_map().values()):
            key.fileobj.close()


def drop(run: Run, seat: Seat, request: bytes) -> None:
    """Connect, write a request, close without reading, and so on."""
    while run.is_on:
        try:
            with seat.connect() as sock:
                sock.sendall(request)
            run.requests += 1
        except OSError:  # refused, or not taken: the next one may be
            pass
        time.sleep(PAUSE_S)
