"""The load: connections that keep requests outstanding and drop what they receive.

Reads each `Job` as JSON from stdin, writes its `Outcome` as JSON to stdout. Record data is
discarded in the kernel (`MSG_TRUNC`), so that the client costs next to nothing; only a response's
first bytes are read, to find its end and to check its order. Versions are those that the client and
what it connects to both know. There is no request timeout: a response may be held as long as the
proxy likes, and how long each request waited is in the outcome.
"""

import json
import selectors
import socket
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Protocol

from kafka.protocol.consumer.fetch import FetchRequest
from kafka.protocol.producer.produce import ProduceRequest

from bench import traffic
from bench.fetch_session import FIRST_VERSION, Positions, SessionlessRequests, SessionRequests
from bench.tls_records import TlsRecords, tls_context

CORRELATION_OFFSET = 8
SCRATCH_BYTES = 4 << 20
WAKE_BYTES = 128 << 10
# Of a response, read at once where no other one can be behind it.
FIRST_PIECE_BYTES = 64 << 10
DROP_ALL = socket.MSG_TRUNC | socket.MSG_WAITALL
# Between Produce requests that get no answer, when their way to the broker is timed.
ONE_WAY_PAUSE_S = 0.002
CONNECT_TIMEOUT_S = 10.0
# Printed before each outcome.
OPEN = "open"
# Of the request that opens a connection.
FIRST_ID = 0


@dataclass(frozen=True, slots=True)
class Load:
    """What one client (one client id) does.

    Attributes:
        host, port: where it connects.
        connections: how many; each keeps `depth` requests outstanding.
        max_bytes: limit of every Fetch, or length of the batch in every Produce request.
        version: of its requests; 0: the last one that both it and what it connects to know.
        batch_bytes: length of the record batches that it fetches; 0: as long as the limit.
        fetches_per_connection: after so many each connection is closed and opened again; 0: never.
        acks: of its Produce requests; None: it fetches.
        partitions: of which it fetches, an equal part of `max_bytes` each.
        in_session: it fetches in a session, one request at a time, and gets a batch of each
            partition: `max_bytes` is the length of so many batches.
        reads_on: it fetches without a session, and each request asks for the batch behind that of
            the one before.
        unanswered: so many Produce requests with acks=0 go in front of each of its own, in one
            piece; only of one blocking connection.
        ca_file: it connects by TLS, to whom this authority knows; only in a session.

    """

    client_id: str
    host: str
    port: int
    connections: int
    max_bytes: int
    version: int = 0
    depth: int = 1
    batch_bytes: int = 0
    fetches_per_connection: int = 0
    acks: int | None = None
    partitions: int = 1
    in_session: bool = False
    reads_on: bool = False
    unanswered: int = 0
    ca_file: str = ""

    @property
    def is_answered(self) -> bool:
        """Whether its requests get responses."""
        return self.acks != traffic.NO_ACKS

    def requests(self, channel: socket.socket, number: int, positions: Positions) -> "Requests":
        """Begin on a connection as clients do, and return the requests that come next.

        `number` is that of the connection: each that reads on has partitions of its own.
        """
        versions = traffic.negotiated_versions(channel, self.client_id)
        if self.acks is not None:
            version = self.version or versions[ProduceRequest.API_KEY]
            return SameRequest(version, self._produce(version, self.acks))
        version = self.version or versions[FetchRequest.API_KEY]
        batch_bytes = self.batch_bytes or self.max_bytes // self.partitions
        if not (self.in_session or self.reads_on):
            return SameRequest(
                version,
                traffic.fetch_request(version, self.client_id, self.max_bytes, batch_bytes),
            )
        partitions = range(number * self.partitions, (number + 1) * self.partitions)
        asked = traffic.Asked(batch_bytes, self.max_bytes, partitions)
        if self.reads_on:
            return SessionlessRequests(version, self.client_id, asked, positions)
        if version < FIRST_VERSION:
            raise ValueError(f"Fetch version {version} has no sessions")
        session = SessionRequests(version, self.client_id, asked, positions)
        channel.sendall(session.frame)
        session.opened(traffic.receive_frame(channel))
        return session

    def ahead(self, version: int) -> bytes:
        """Return what goes in front of each request."""
        frame = self._produce(version, traffic.NO_ACKS) if self.unanswered else b""
        return bytes(frame) * self.unanswered

    def _produce(self, version: int, acks: int) -> bytearray:
        topic, records = traffic.topic_name(self.max_bytes), traffic.record_batch(self.max_bytes)
        return traffic.produce_request(version, self.client_id, topic, records, acks)


class Requests(Protocol):
    """The requests of a connection; `frame` is the next one, without its correlation id."""

    version: int
    frame: bytearray
    response_bytes: int
    """Of each response; 0 where it is not known."""

    def move_on(self) -> None:
        """Make the frame the next request."""


@dataclass(slots=True)
class SameRequest:
    """Always the same one."""

    version: int
    frame: bytearray
    response_bytes: int = 0

    def move_on(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Job:
    """Loads to be run at the same time for `duration_s`.

    With `latency` there is one load of one connection, served by a blocking loop: its round trips
    are timed with as little around them as can be.
    """

    loads: list[Load]
    duration_s: float
    latency: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """What came of a load, one item per response, in order of completion.

    Attributes:
        completed_s: when the whole response had arrived, in seconds after the start.
        frame_bytes: its length.
        waited_s: how long after its request.
        opened_s: how long the first requests waited on connections that were opened on the way.
        unanswered_s: how long the requests that were outstanding at the end had waited.
        sent_s: when requests that get no response were sent, in seconds after the start; only in a
            latency job.

    """

    completed_s: list[float] = field(default_factory=list)
    frame_bytes: list[int] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    opened_s: list[float] = field(default_factory=list)
    unanswered_s: list[float] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job.

    Attributes:
        served: per load.
        version: of the requests of the last connection that was opened.
        started_s: the start on the machine's monotonic clock.
        cpu_s: CPU time that the client itself used, in seconds.

    """

    served: list[Served] = field(default_factory=list)
    version: int = 0
    started_s: float = 0.0
    cpu_s: float = 0.0


@dataclass(slots=True)
class Connection:
    """One connection of a load, what it has to send and the response that it is receiving."""

    channel: socket.socket
    load: Load
    served: Served
    requests: Requests
    next_id: int = FIRST_ID
    outbox: bytearray = field(default_factory=bytearray)
    outstanding: deque[tuple[int, float]] = field(default_factory=deque)
    head: bytearray = field(default_factory=bytearray)
    left_bytes: int = 0
    wake_bytes: int = 1
    records: TlsRecords | None = None

    def ask(self, now_s: float) -> bool:
        """Send the next request; see `flush`."""
        self.next_id += 1
        frame = self.requests.frame
        frame[CORRELATION_OFFSET : CORRELATION_OFFSET + 4] = self.next_id.to_bytes(4, "big")
        if self.load.is_answered:
            self.outstanding.append((self.next_id, now_s))
        sent = 0 if self.outbox else self._send(frame)
        if sent < len(frame):
            self.outbox += memoryview(frame)[sent:]
        self.requests.move_on()
        return not self.outbox

    def open_again(self, now_s: float) -> None:
        """Put a new connection in the place of one that is closed, and begin as clients do."""
        self.channel = _channel(self.load)
        self.channel.setblocking(False)
        self.next_id, self.wake_bytes = FIRST_ID, 1
        self.outstanding.append((FIRST_ID, now_s))
        self.outbox += traffic.api_versions_request(self.load.client_id)

    @property
    def is_used_up(self) -> bool:
        """Whether it is to be opened again."""
        return self.next_id - FIRST_ID == self.load.fetches_per_connection > 0

    def flush(self) -> bool:
        """Send what the socket takes; returns whether that is all there is."""
        while self.outbox and (sent := self._send(self.outbox)):
            del self.outbox[:sent]
        return not self.outbox

    def _send(self, data: bytearray) -> int:
        try:
            return self.channel.send(data)
        except BlockingIOError:
            return 0

    def receive(self, scratch: memoryview) -> int:
        """Take what has arrived; returns the length of a response that is complete, else 0.

        Raises:
            BlockingIOError: nothing more has arrived.
            ConnectionError: the other side closed, or answered out of order.

        """
        if self.records is not None:
            return self._receive_records(scratch, self.records)
        if len(self.head) < traffic.CORRELATION_ID_END:
            self.head += _some(self.channel.recv(traffic.CORRELATION_ID_END - len(self.head)))
            if len(self.head) < traffic.CORRELATION_ID_END:
                return 0
            frame_bytes, number = traffic.response_head(self.head)
            if not self.outstanding or number != self.outstanding[0][0]:
                raise ConnectionError("a response is out of order")
            self.left_bytes = frame_bytes - len(self.head)
            self._wake_at(min(self.left_bytes, WAKE_BYTES))
        wanted = min(self.left_bytes, len(scratch))
        received = self.channel.recv_into(scratch, wanted, socket.MSG_TRUNC)
        self.left_bytes -= _more(received)
        if self.left_bytes:
            self._wake_at(min(self.left_bytes, WAKE_BYTES))
            return 0
        self._wake_at(1)
        frame_bytes, _ = traffic.response_head(self.head)
        self.head.clear()
        return frame_bytes

    def _receive_records(self, scratch: memoryview, records: TlsRecords) -> int:
        """Take what has arrived by TLS; as all responses of a session are of one length."""
        # Not that of SSLSocket: it would decrypt.
        received = _more(socket.socket.recv_into(self.channel, scratch))
        records.take(scratch[:received])
        left_bytes = self.requests.response_bytes - records.content_bytes
        if left_bytes < 0:
            raise ConnectionError("a response is too long")
        self._wake_at(max(1, min(left_bytes - records.begun_bytes, WAKE_BYTES)))
        if left_bytes:
            return 0
        records.content_bytes = 0
        return self.requests.response_bytes

    def complete(self, frame_bytes: int, now_s: float) -> None:
        """Take down the response to the oldest request."""
        number, asked_s = self.outstanding.popleft()
        if number == FIRST_ID:
            self.served.opened_s.append(now_s - asked_s)
            return
        self.served.completed_s.append(now_s)
        self.served.frame_bytes.append(frame_bytes)
        self.served.waited_s.append(now_s - asked_s)

    def end(self, now_s: float) -> None:
        """Close it, and take down the requests that got no response."""
        self.channel.close()
        self.served.unanswered_s.extend(now_s - asked_s for _, asked_s in self.outstanding)

    def _wake_at(self, arrived_bytes: int) -> None:
        """Sleep until so much has arrived.

        A sender of small pieces would otherwise cost the client a wake-up for each, and the load
        would be its limit.
        """
        if self.load.max_bytes > WAKE_BYTES and arrived_bytes != self.wake_bytes:
            self.wake_bytes = arrived_bytes
            self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, arrived_bytes)


class Throughput:
    """Keeps the connections of all loads busy."""

    def __init__(self, job: Job, positions: Positions, selector: selectors.BaseSelector) -> None:
        self._duration_s = job.duration_s
        self._selector = selector
        self._served = [Served() for _ in job.loads]
        self._connections = [
            connection
            for load, served in zip(job.loads, self._served, strict=True)
            for connection in _connections(load, served, positions)
        ]
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._unanswered: deque[Connection] = deque()
        """Those that get no answer take turns: nothing else ends their asking."""
        self._started_s = 0.0

    def run(self) -> Outcome:
        """Run the job to its end."""
        for connection in self._connections:
            connection.channel.setblocking(False)
            self._selector.register(connection.channel, selectors.EVENT_READ, connection)
        _say_open()
        self._started_s, used_s = time.monotonic(), time.process_time()
        for connection in self._connections:
            for _ in range(connection.load.depth if connection.load.is_answered else 1):
                self._go_on(connection, 0.0)
        while (now_s := self._now_s()) < self._duration_s:
            for _ in range(len(self._unanswered)):
                self._ask(self._unanswered.popleft(), now_s)
            wait_s = 0.0 if self._unanswered else self._duration_s - now_s
            for key, events in self._selector.select(wait_s):
                if events & selectors.EVENT_WRITE:
                    self._send(key.data)
                if events & selectors.EVENT_READ:
                    self._receive(key.data)
        cpu_s = time.process_time() - used_s
        for connection in self._connections:
            connection.end(now_s)
        version = self._connections[-1].requests.version
        return Outcome(self._served, version, self._started_s, cpu_s)

    def _now_s(self) -> float:
        return time.monotonic() - self._started_s

    def _go_on(self, connection: Connection, now_s: float) -> None:
        """Ask at once, or in turn."""
        if connection.load.is_answered:
            self._ask(connection, now_s)
        else:
            self._unanswered.append(connection)

    def _ask(self, connection: Connection, now_s: float) -> None:
        self._sent(connection, now_s, is_all=connection.ask(now_s))

    def _send(self, connection: Connection) -> None:
        if connection.flush():
            self._selector.modify(connection.channel, selectors.EVENT_READ, connection)
            self._sent(connection, self._now_s(), is_all=True)

    def _sent(self, connection: Connection, now_s: float, *, is_all: bool) -> None:
        if not is_all:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(connection.channel, both, connection)
        elif not connection.load.is_answered:
            self._go_on(connection, now_s)

    def _receive(self, connection: Connection) -> None:
        try:
            while not (length := connection.receive(self._scratch)):
                pass
        except BlockingIOError:
            return
        now_s = self._now_s()
        connection.complete(length, now_s)
        if connection.is_used_up:
            self._open_again(connection, now_s)
        else:
            self._go_on(connection, now_s)

    def _open_again(self, connection: Connection, now_s: float) -> None:
        self._selector.unregister(connection.channel)
        connection.channel.close()
        connection.open_again(now_s)
        self._selector.register(connection.channel, selectors.EVENT_READ, connection)
        self._sent(connection, now_s, is_all=connection.flush())


def run_throughput(job: Job, positions: Positions) -> Outcome:
    """Keep every connection busy for the job's duration."""
    with selectors.DefaultSelector() as selector:
        return Throughput(job, positions, selector).run()


def run_latency(job: Job, positions: Positions) -> Outcome:
    """Ask and wait, over and over, on one blocking connection."""
    (load,), served = job.loads, Served()
    channel = _channel(load)
    requests = load.requests(channel, 0, positions)
    scratch, ahead = memoryview(bytearray(SCRATCH_BYTES)), load.ahead(requests.version)
    _say_open()
    number, used_s = FIRST_ID, time.process_time()
    started_s = now_s = time.monotonic()
    while now_s < started_s + job.duration_s:
        number += 1
        frame = requests.frame
        frame[CORRELATION_OFFSET : CORRELATION_OFFSET + 4] = number.to_bytes(4, "big")
        asked_s = time.monotonic()
        channel.sendall(ahead + frame if ahead else frame)
        requests.move_on()
        if not load.is_answered:
            served.sent_s.append(asked_s - started_s)
            time.sleep(ONE_WAY_PAUSE_S)
            now_s = time.monotonic()
            continue
        frame_bytes = _receive_next(channel, scratch, number)
        now_s = time.monotonic()
        served.completed_s.append(now_s - started_s)
        served.frame_bytes.append(frame_bytes)
        served.waited_s.append(now_s - asked_s)
    channel.close()
    return Outcome([served], requests.version, started_s, time.process_time() - used_s)


def _receive_next(channel: socket.socket, scratch: memoryview, number: int) -> int:
    """Receive the only response that is outstanding; return its length."""
    received = 0
    while received < traffic.CORRELATION_ID_END:
        received += _more(channel.recv_into(scratch[received:], FIRST_PIECE_BYTES))
    frame_bytes, answered = traffic.response_head(bytes(scratch[: traffic.CORRELATION_ID_END]))
    if answered != number:
        raise ConnectionError("a response is out of order")
    left_bytes = frame_bytes - received
    while left_bytes > 0:
        wanted = min(left_bytes, len(scratch))
        left_bytes -= _more(channel.recv_into(scratch, wanted, DROP_ALL))
    return frame_bytes


def _connections(load: Load, served: Served, positions: Positions) -> list[Connection]:
    """Open the connections of a load."""
    connections = []
    for number in range(load.connections):
        channel = _channel(load)
        requests = load.requests(channel, number, positions)
        connection = Connection(channel, load, served, requests)
        if load.ca_file:
            connection.records = TlsRecords()
        connections.append(connection)
    return connections


def _say_open() -> None:
    """Tell that the connections are open: who measures what a load costs begins now."""
    print(OPEN, flush=True)


def _channel(load: Load) -> socket.socket:
    channel = socket.create_connection((load.host, load.port), CONNECT_TIMEOUT_S)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel.settimeout(None)
    return tls_context(load.ca_file).wrap_socket(channel) if load.ca_file else channel


def _more(count: int) -> int:
    if not count:
        raise ConnectionError("the connection was closed in the middle of a response")
    return count


def _some(chunk: bytes) -> bytes:
    if not chunk:
        raise ConnectionError("the connection was closed")
    return chunk


def read_outcome(line: str) -> Outcome:
    """Read what the client wrote."""
    given = json.loads(line)
    given["served"] = [Served(**served) for served in given["served"]]
    return Outcome(**given)


def main() -> None:
    """Run the jobs on stdin, one a line; consumers go on where they have got to."""
    positions: Positions = {}
    for line in sys.stdin:
        given = json.loads(line)
        job = Job([Load(**load) for load in given["loads"]], given["duration_s"], given["latency"])
        run = run_latency if job.latency else run_throughput
        outcome = run(job, positions)
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
