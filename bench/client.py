"""The load: connections that keep Fetch requests outstanding and drop what they receive.

Reads one `Job` as JSON from stdin, writes one `Outcome` as JSON to stdout. Record data is
discarded in the kernel (`MSG_TRUNC`), so that the client costs next to nothing; only a response's
first bytes are read, to find its end and to check its order. There is no request timeout: a
response may be held as long as the proxy likes.
"""

import json
import selectors
import socket
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field

from bench import traffic

CORRELATION_OFFSET = 8
SCRATCH_BYTES = 4 << 20
WAKE_BYTES = 128 << 10
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Load:
    """What one client (one client id) does.

    Attributes:
        host, port: where it connects.
        connections: how many; each keeps `depth` requests outstanding.
        response_bytes: length of every response.
        version: Fetch version.

    """

    client_id: str
    host: str
    port: int
    connections: int
    response_bytes: int
    version: int = 12
    depth: int = 1


@dataclass(frozen=True, slots=True)
class Job:
    """Loads to be run at the same time for `duration_s`.

    With `latency` there is one load of one connection, served by a blocking loop, whose
    round-trip times are wanted.
    """

    loads: list[Load]
    duration_s: float
    latency: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job.

    Attributes:
        frame_bytes: per load, length of a response in bytes.
        completed_s: per load, when each whole response had arrived, in seconds after the start.
        round_trip_us: round-trip times in microseconds, for a latency job.
        cpu_s: CPU time that the client itself used, in seconds.

    """

    frame_bytes: list[int]
    completed_s: list[list[float]] = field(default_factory=list)
    round_trip_us: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


@dataclass(slots=True)
class Connection:
    """One connection of a load and the response that it is receiving."""

    channel: socket.socket
    load_number: int
    request: bytearray
    response_is_large: bool
    next_id: int = 0
    outstanding: deque[int] = field(default_factory=deque)
    head: bytearray = field(default_factory=bytearray)
    left_bytes: int = 0
    wake_bytes: int = 1

    def ask(self) -> None:
        """Send the next request; it is small, so the socket takes it whole."""
        self.next_id += 1
        self.request[CORRELATION_OFFSET : CORRELATION_OFFSET + 4] = self.next_id.to_bytes(4, "big")
        self.outstanding.append(self.next_id)
        if self.channel.send(self.request) != len(self.request):
            raise BlockingIOError("a request did not fit into the socket buffer")

    def receive(self, scratch: memoryview) -> int:
        """Take what has arrived; returns the length of a response that is complete, else 0.

        Raises:
            BlockingIOError: nothing more has arrived.
            ConnectionError: the other side closed, or answered out of order.

        """
        if len(self.head) < traffic.CORRELATION_ID_END:
            self.head += _some(self.channel.recv(traffic.CORRELATION_ID_END - len(self.head)))
            if len(self.head) < traffic.CORRELATION_ID_END:
                return 0
            found = traffic.response_head(self.head)
            if found.correlation_id != self.outstanding[0]:
                raise ConnectionError("a response is out of order")
            self.left_bytes = found.frame_bytes - len(self.head)
            self._wake_at(min(self.left_bytes, WAKE_BYTES))
        wanted = min(self.left_bytes, len(scratch))
        received = self.channel.recv_into(scratch, wanted, socket.MSG_TRUNC)
        if received == 0:
            raise ConnectionError("the connection was closed in the middle of a response")
        self.left_bytes -= received
        if self.left_bytes:
            self._wake_at(min(self.left_bytes, WAKE_BYTES))
            return 0
        self._wake_at(1)
        self.outstanding.popleft()
        frame_bytes = traffic.response_head(self.head).frame_bytes
        self.head.clear()
        return frame_bytes

    def _wake_at(self, arrived_bytes: int) -> None:
        """Sleep until so much has arrived.

        A sender of small pieces would otherwise cost the client a wake-up for each, and the load
        would be its limit.
        """
        if self.response_is_large and arrived_bytes != self.wake_bytes:
            self.wake_bytes = arrived_bytes
            self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, arrived_bytes)


def run_throughput(job: Job) -> Outcome:
    """Keep every connection busy for the job's duration."""
    scratch = memoryview(bytearray(SCRATCH_BYTES))
    frame_bytes = [0] * len(job.loads)
    completed_s: list[list[float]] = [[] for _ in job.loads]
    with selectors.DefaultSelector() as selector:
        connections = [
            _connect(load, number)
            for number, load in enumerate(job.loads)
            for _ in range(load.connections)
        ]
        for connection in connections:
            connection.channel.setblocking(False)
            selector.register(connection.channel, selectors.EVENT_READ, connection)
        started_s, used_s = time.monotonic(), time.process_time()
        for connection in connections:
            for _ in range(job.loads[connection.load_number].depth):
                connection.ask()
        while (left_s := started_s + job.duration_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                connection = key.data
                try:
                    while not (length := connection.receive(scratch)):
                        pass
                except BlockingIOError:
                    continue
                frame_bytes[connection.load_number] = length
                completed_s[connection.load_number].append(time.monotonic() - started_s)
                connection.ask()
        cpu_s = time.process_time() - used_s
        for connection in connections:
            connection.channel.close()
    return Outcome(frame_bytes, completed_s=completed_s, cpu_s=cpu_s)


def run_latency(job: Job) -> Outcome:
    """Ask and wait, over and over, on one blocking connection."""
    connection = _connect(job.loads[0], 0)
    scratch = memoryview(bytearray(SCRATCH_BYTES))
    round_trip_us: list[float] = []
    length = 0
    end_s = time.monotonic() + job.duration_s
    while time.monotonic() < end_s:
        asked_ns = time.perf_counter_ns()
        connection.ask()
        while not (length := connection.receive(scratch)):
            pass
        round_trip_us.append((time.perf_counter_ns() - asked_ns) / 1000)
    connection.channel.close()
    return Outcome([length], round_trip_us=round_trip_us)


def _connect(load: Load, number: int) -> Connection:
    """Open a connection as clients do: ApiVersions first."""
    channel = socket.create_connection((load.host, load.port), CONNECT_TIMEOUT_S)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel.sendall(traffic.api_versions_request(load.client_id))
    traffic.receive_frame(channel)
    channel.settimeout(None)
    request = traffic.fetch_request(load.version, load.client_id, load.response_bytes)
    return Connection(channel, number, request, load.response_bytes > WAKE_BYTES)


def _some(chunk: bytes) -> bytes:
    if not chunk:
        raise ConnectionError("the connection was closed")
    return chunk


def main() -> None:
    """Run the job on stdin."""
    given = json.loads(sys.stdin.readline())
    job = Job([Load(**load) for load in given["loads"]], given["duration_s"], given["latency"])
    outcome = run_latency(job) if job.latency else run_throughput(job)
    print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
