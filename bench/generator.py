"""A stand-in broker that is never the bottleneck: canned Fetch responses by sendfile.

Answers ApiVersions, Metadata, Fetch and Produce. The name or the id of a topic says how long its
record batches are. A Fetch gets as many bytes of them as its limits allow, whatever that does to
the last batch, and at least one whole batch: so do real brokers. Record data lies
in a memory file and goes to the socket by `os.sendfile`, as in a real broker, whose log segments go
from the page cache to the socket the same way. In a fetch session, and to who reads on without one,
it answers as `fetch_session` says. What is produced is dropped in the kernel; when it came can be
written to a file.
"""

import argparse
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from kafka.protocol.consumer.fetch import FetchRequest
from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest
from kafka.protocol.producer.produce import ProduceRequest

from bench import traffic
from bench.fetch_session import INITIAL_EPOCH, NO_SESSION, SessionAnswers, epoch_of

# Longer than all requests but for what is produced.
RECEIVE_BYTES = 1 << 14
SCRATCH_BYTES = 4 << 20
# What is dropped is waited for in pieces: a wake-up for each segment would cost too much.
WAKE_BYTES = 128 << 10
# Of a Produce request: what tells which other ones have the same answer.
PRODUCE_HEAD_BYTES = 256
SENDFILE_MIN_BYTES = 16384
# A shorter range of a file would cost more calls.
FILE_MIN_BYTES = 4 << 20
CORRELATION_OFFSET = 8
CORRELATION_END = 12
# A held client's limits change from request to request.
KNOWN_REQUESTS = 1000
_REQUEST_HEAD = struct.Struct(">ihhih")


@dataclass(slots=True, frozen=True)
class Records:
    """A topic's data: the same batch over and over, in a memory file."""

    batch: bytes
    memory_file: int
    file_bytes: int

    @classmethod
    def make(cls, batch_bytes: int) -> "Records":
        """Build the batch and fill the file with it."""
        batch = traffic.record_batch(batch_bytes)
        count = -(-FILE_MIN_BYTES // len(batch))
        memory_file = os.memfd_create("records")
        with os.fdopen(os.dup(memory_file), "wb") as file:
            for _ in range(count):
                file.write(batch)
        return cls(batch, memory_file, count * len(batch))


@dataclass(slots=True, frozen=True)
class Canned:
    """A Fetch response that is ready to go; only its correlation id changes."""

    records: Records
    records_bytes: int
    length: bytes
    before: bytes
    after: bytes

    @classmethod
    def make(cls, version: int, records: Records, max_bytes: int) -> "Canned":
        """Build the response with as many bytes of records as the limit allows."""
        batch_bytes = len(records.batch)
        records_bytes = max(batch_bytes, max_bytes)
        before, after = traffic.fetch_envelope(version, batch_bytes, records_bytes)
        body_bytes = 4 + len(before) + records_bytes + len(after)
        if records_bytes < SENDFILE_MIN_BYTES:
            data = records.batch * -(-records_bytes // batch_bytes)
            before, after, records_bytes = before + data[:records_bytes] + after, b"", 0
        return cls(records, records_bytes, body_bytes.to_bytes(4, "big"), before, after)

    def reply(self, correlation_id: bytes) -> "Reply":
        """Answer a request with this correlation id."""
        head = self.length + correlation_id + self.before
        return Reply(head, self.records, self.records_bytes, self.after)


@dataclass(slots=True)
class Reply:
    """A response on its way out: bytes from memory, a range of a memory file, bytes again."""

    head: bytes
    records: Records | None = None
    left_bytes: int = 0
    tail: bytes = b""
    position: int = 0


@dataclass(slots=True)
class Connection:
    """One client connection: bytes not parsed yet and responses not sent yet.

    `dropped_bytes` are still to come of the request in `inbox`, of which only the head is there.
    """

    channel: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    outbox: deque[Reply] = field(default_factory=deque)
    blocked: bool = False
    session: SessionAnswers | None = None
    dropped_bytes: int = 0
    wake_bytes: int = 1

    def drop(self, scratch: memoryview) -> None:
        """Drop what has come of the bytes to be dropped, and sleep until there are many more."""
        while self.dropped_bytes:
            wanted = min(self.dropped_bytes, len(scratch))
            dropped = self.channel.recv_into(scratch, wanted, socket.MSG_TRUNC)
            if not dropped:
                raise ConnectionError("closed by the client")
            self.dropped_bytes -= dropped
            self.wake_at(min(self.dropped_bytes, WAKE_BYTES))

    def wake_at(self, arrived_bytes: int) -> None:
        """Sleep until so much has arrived, at least one byte."""
        arrived_bytes = max(1, arrived_bytes)
        if arrived_bytes != self.wake_bytes:
            self.wake_bytes = arrived_bytes
            self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, arrived_bytes)


@dataclass(slots=True)
class Generator:
    """Serves every connection from one loop."""

    listener: socket.socket
    arrivals: TextIO
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    records: dict[int, Records] = field(default_factory=dict)
    # A client repeats its Fetch with another correlation id only, so the rest is the key.
    known_requests: dict[bytes, Canned] = field(default_factory=dict)
    # Of Produce requests: all that is answered behind the correlation id.
    known_produces: dict[bytes, bytes] = field(default_factory=dict)
    sessions: int = 0
    scratch: memoryview = field(default_factory=lambda: memoryview(bytearray(SCRATCH_BYTES)))

    def prepare(self, batch_bytes: int) -> Records:
        """Return the data of the topic with such batches, built at first use."""
        if batch_bytes not in self.records:
            self.records[batch_bytes] = Records.make(batch_bytes)
        return self.records[batch_bytes]

    def serve(self) -> None:
        """Serve until the process is ended."""
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ)
        while True:
            for key, events in self.selector.select():
                connection: Connection | None = key.data
                if connection is None:
                    self._accept()
                    continue
                try:
                    if events & selectors.EVENT_READ:
                        self._receive(connection)
                    self._send(connection)
                except (ConnectionError, ValueError):
                    self._close(connection)

    def _accept(self) -> None:
        try:
            channel, _ = self.listener.accept()
        except BlockingIOError:
            return
        channel.setblocking(False)
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.selector.register(channel, selectors.EVENT_READ, Connection(channel))

    def _close(self, connection: Connection) -> None:
        self.selector.unregister(connection.channel)
        connection.channel.close()

    def _receive(self, connection: Connection) -> None:
        inbox = connection.inbox
        try:
            if connection.dropped_bytes:
                connection.drop(self.scratch)
                self._take(connection, len(inbox))
            chunk = connection.channel.recv(RECEIVE_BYTES)
            if not chunk:
                raise ConnectionError("closed by the client")
            inbox += chunk
            while len(inbox) >= _REQUEST_HEAD.size:
                end = traffic.LENGTH_BYTES + int.from_bytes(inbox[: traffic.LENGTH_BYTES], "big")
                if len(inbox) < end:
                    if not self._is_known_produce(inbox):
                        return
                    connection.dropped_bytes = end - len(inbox)
                    connection.drop(self.scratch)
                self._take(connection, end)
        except BlockingIOError:
            return

    def _take(self, connection: Connection, end: int) -> None:
        """Take a request, or the head of a Produce request whose rest was dropped."""
        reply = self._answer(connection, bytes(connection.inbox[:end]))
        if reply is not None:
            connection.outbox.append(reply)
        del connection.inbox[:end]

    def _is_known_produce(self, inbox: bytearray) -> bool:
        """Whether its head alone says what to answer."""
        return (
            len(inbox) >= PRODUCE_HEAD_BYTES
            and int.from_bytes(inbox[4:6], "big") == ProduceRequest.API_KEY
            and _without_correlation(inbox) in self.known_produces
        )

    def _answer(self, connection: Connection, frame: bytes) -> Reply | None:
        _, api_key, version, correlation_id, client_bytes = _REQUEST_HEAD.unpack_from(frame)
        if api_key == FetchRequest.API_KEY:
            epoch = epoch_of(version, client_bytes, frame)
            if epoch is not None and epoch >= INITIAL_EPOCH:
                return self._answer_session(connection, frame, version, epoch)
            if connection.session is not None:  # it reads on
                return self._answer_next(connection.session, frame, connection.session.epoch + 1)
            return self._answer_fetch(connection, frame, version)
        if api_key == ProduceRequest.API_KEY:
            return self._answer_produce(frame)
        if api_key == MetadataRequest.API_KEY:
            address = self.listener.getsockname()
            return Reply(traffic.metadata_response(version, correlation_id, address, frame))
        if api_key == ApiVersionsRequest.API_KEY:
            return Reply(traffic.api_versions_response(version, correlation_id))
        raise ValueError(f"API {api_key} is not served")

    def _answer_produce(self, frame: bytes) -> Reply | None:
        """Answer as the last request that began the same."""
        length, _, version, _, client_bytes = _REQUEST_HEAD.unpack_from(frame)
        key = _without_correlation(frame)
        answer = self.known_produces.get(key)
        if answer is None:
            if len(self.known_produces) >= KNOWN_REQUESTS:
                self.known_produces.clear()
            answer = self.known_produces[key] = traffic.produce_answer(version, frame)
        if not answer:
            client = frame[_REQUEST_HEAD.size : _REQUEST_HEAD.size + client_bytes].decode()
            frame_bytes = traffic.LENGTH_BYTES + length
            self.arrivals.write(f"{client} {time.monotonic()} {frame_bytes}\n")
            return None
        correlation_id = frame[CORRELATION_OFFSET:CORRELATION_END]
        length_field, body = answer[: traffic.LENGTH_BYTES], answer[traffic.CORRELATION_ID_END :]
        return Reply(length_field + correlation_id + body)

    def _answer_session(
        self, connection: Connection, frame: bytes, version: int, epoch: int
    ) -> Reply:
        if epoch == INITIAL_EPOCH:
            self.sessions += 1
            asked = traffic.read_fetch(version, frame)
            connection.session = SessionAnswers.make(version, asked, self.sessions)
        session = connection.session
        if session is None:
            raise ValueError("no session was opened on this connection")
        return self._answer_next(session, frame, epoch)

    @staticmethod
    def _answer_next(session: SessionAnswers, frame: bytes, epoch: int) -> Reply:
        session.step(epoch)
        head = session.length + frame[CORRELATION_OFFSET:CORRELATION_END]
        body_bytes = len(session.body)
        if body_bytes < SENDFILE_MIN_BYTES:
            return Reply(head + session.body[:])
        return Reply(head, Records(b"", session.file.fileno(), body_bytes), body_bytes)

    def _answer_fetch(self, connection: Connection, frame: bytes, version: int) -> Reply:
        key = frame[:CORRELATION_OFFSET] + frame[CORRELATION_END:]
        canned = self.known_requests.get(key)
        if canned is None:
            asked = traffic.read_fetch(version, frame)
            if asked.offset != traffic.OFFSET:
                connection.session = SessionAnswers.make(version, asked, NO_SESSION)
                return self._answer_next(connection.session, frame, INITIAL_EPOCH)
            canned = Canned.make(version, self.prepare(asked.batch_bytes), asked.max_bytes)
            if len(self.known_requests) >= KNOWN_REQUESTS:
                self.known_requests.clear()
            self.known_requests[key] = canned
        return canned.reply(frame[CORRELATION_OFFSET:CORRELATION_END])

    def _send(self, connection: Connection) -> None:
        try:
            while connection.outbox:
                _send_reply(connection.channel, connection.outbox[0])
                connection.outbox.popleft()
            blocked = False
        except BlockingIOError:
            blocked = True
        if blocked != connection.blocked:
            connection.blocked = blocked
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if blocked else 0)
            self.selector.modify(connection.channel, events, connection)


def _without_correlation(frame: bytes | bytearray) -> bytes:
    """Return the start of a frame without its correlation id: what a client repeats."""
    return bytes(frame[:CORRELATION_OFFSET] + frame[CORRELATION_END:PRODUCE_HEAD_BYTES])


def _send_reply(channel: socket.socket, reply: Reply) -> None:
    """Send what is left of a reply; raises BlockingIOError when the socket takes no more."""
    more = socket.MSG_MORE if reply.left_bytes else 0
    while reply.head:
        reply.head = reply.head[channel.send(reply.head, more) :]
    while reply.records is not None and reply.left_bytes:
        wanted = min(reply.left_bytes, reply.records.file_bytes - reply.position)
        sent = os.sendfile(channel.fileno(), reply.records.memory_file, reply.position, wanted)
        reply.left_bytes -= sent
        reply.position = (reply.position + sent) % reply.records.file_bytes
    while reply.tail:
        reply.tail = reply.tail[channel.send(reply.tail) :]


def main() -> None:
    """Serve on the listener that the parent passed as a file descriptor."""
    parser = argparse.ArgumentParser(prog="bench.generator", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="a listening socket")
    parser.add_argument(
        "--prepare", type=int, action="append", default=[], help="length of batches"
    )
    parser.add_argument(
        "--arrivals", type=Path, required=True, help="gets lines: client id, monotonic time, bytes"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with arguments.arrivals.open("w", buffering=1) as arrivals:
        listener = socket.socket(fileno=arguments.fd)
        generator = Generator(listener, arrivals)
        for batch_bytes in arguments.prepare:
            generator.prepare(batch_bytes)
        print("ready", flush=True)
        generator.serve()


if __name__ == "__main__":
    main()
