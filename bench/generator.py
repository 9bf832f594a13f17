"""A stand-in broker that is never the bottleneck: canned Fetch responses by sendfile.

Answers ApiVersions, Metadata and Fetch (which says by max_bytes how long its answer shall be).
Record data lies in a memory file and goes to the socket by `os.sendfile`, as in a real broker,
whose log segments go from the page cache to the socket the same way.
"""

import argparse
import os
import selectors
import signal
import socket
import struct
import sys
from collections import deque
from dataclasses import dataclass, field

from kafka.protocol.consumer.fetch import FetchRequest
from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest

from bench import traffic

RECEIVE_BYTES = 65536
SENDFILE_MIN_BYTES = 16384
CORRELATION_OFFSET = 8
_REQUEST_HEAD = struct.Struct(">ihhi")


@dataclass(slots=True, frozen=True)
class Canned:
    """A Fetch response that is ready to go; only its correlation id changes."""

    frame: bytes
    memory_file: int | None

    @classmethod
    def make(cls, version: int, response_bytes: int) -> "Canned":
        """Build the response; a long one is also put into a memory file."""
        frame = traffic.fetch_response(version, response_bytes)
        if len(frame) < SENDFILE_MIN_BYTES:
            return cls(frame, None)
        memory_file = os.memfd_create("canned")
        with os.fdopen(os.dup(memory_file), "wb") as file:
            file.write(frame)
        return cls(frame[: traffic.CORRELATION_ID_END], memory_file)

    def head(self, correlation_id: bytes) -> bytes:
        """Bytes to be sent from memory for a request with this correlation id."""
        return self.frame[:4] + correlation_id + self.frame[traffic.CORRELATION_ID_END :]

    @property
    def frame_bytes(self) -> int:
        """Length of the whole response."""
        return traffic.response_head(self.frame).frame_bytes


@dataclass(slots=True)
class Reply:
    """A response on its way out: bytes from memory, then a range of a memory file."""

    head: bytes
    memory_file: int | None = None
    position: int = traffic.CORRELATION_ID_END
    end: int = traffic.CORRELATION_ID_END


@dataclass(slots=True)
class Connection:
    """One client connection: bytes not parsed yet and responses not sent yet."""

    channel: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    outbox: deque[Reply] = field(default_factory=deque)
    blocked: bool = False


@dataclass(slots=True)
class Generator:
    """Serves every connection from one loop."""

    listener: socket.socket
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    canned: dict[tuple[int, int], Canned] = field(default_factory=dict)
    # A client repeats its Fetch with another correlation id only, so the rest is the key.
    known_requests: dict[bytes, Canned] = field(default_factory=dict)

    def prepare(self, version: int, response_bytes: int) -> Canned:
        """Return the response of that version and length, built at first use."""
        key = version, response_bytes
        if key not in self.canned:
            self.canned[key] = Canned.make(version, response_bytes)
        return self.canned[key]

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
        try:
            chunk = connection.channel.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            raise ConnectionError("closed by the client")
        inbox = connection.inbox
        inbox += chunk
        while len(inbox) >= _REQUEST_HEAD.size:
            end = 4 + int.from_bytes(inbox[:4], "big")
            if len(inbox) < end:
                return
            connection.outbox.append(self._answer(bytes(inbox[:end])))
            del inbox[:end]

    def _answer(self, frame: bytes) -> Reply:
        _, api_key, version, correlation_id = _REQUEST_HEAD.unpack_from(frame)
        if api_key == FetchRequest.API_KEY:
            return self._answer_fetch(frame, version)
        if api_key == MetadataRequest.API_KEY:
            address = self.listener.getsockname()
            return Reply(traffic.metadata_response(version, correlation_id, address))
        if api_key == ApiVersionsRequest.API_KEY:
            return Reply(traffic.api_versions_response(version, correlation_id))
        raise ValueError(f"API {api_key} is not served")

    def _answer_fetch(self, frame: bytes, version: int) -> Reply:
        correlation_id = frame[CORRELATION_OFFSET : CORRELATION_OFFSET + 4]
        key = frame[:CORRELATION_OFFSET] + frame[CORRELATION_OFFSET + 4 :]
        canned = self.known_requests.get(key)
        if canned is None:
            canned = self.prepare(version, traffic.asked_response_bytes(version, frame[4:]))
            self.known_requests[key] = canned
        head = canned.head(correlation_id)
        if canned.memory_file is None:
            return Reply(head)
        return Reply(head, canned.memory_file, len(head), canned.frame_bytes)

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


def _send_reply(channel: socket.socket, reply: Reply) -> None:
    """Send what is left of a reply; raises BlockingIOError when the socket takes no more."""
    more = socket.MSG_MORE if reply.memory_file is not None else 0
    while reply.head:
        reply.head = reply.head[channel.send(reply.head, more) :]
    while reply.memory_file is not None and reply.position < reply.end:
        left = reply.end - reply.position
        reply.position += os.sendfile(channel.fileno(), reply.memory_file, reply.position, left)


def main() -> None:
    """Serve on the listener that the parent passed as a file descriptor."""
    parser = argparse.ArgumentParser(prog="bench.generator", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="a listening socket")
    parser.add_argument("--prepare", action="append", default=[], help="VERSION:BYTES")
    arguments = parser.parse_args()
    generator = Generator(socket.socket(fileno=arguments.fd))
    for item in arguments.prepare:
        version, response_bytes = item.split(":")
        generator.prepare(int(version), int(response_bytes))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("ready", flush=True)
    generator.serve()


if __name__ == "__main__":
    main()
