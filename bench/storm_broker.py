"""A child of the figure `storm`: the stand-in broker of those that connect at once.

It answers ApiVersions, Metadata and Fetch from what it has answered before, in a few microseconds
each, and names another one as the cluster's only broker, which the busy client has to itself.
"""

import argparse
import os
import selectors
import socket
import struct
import sys
from dataclasses import dataclass, field

from kafka.protocol.consumer.fetch import FetchRequest
from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest

from bench import traffic
from bench.processes import raise_file_limit

NICENESS = 10
"""Behind the busy client and its broker, which share the core."""

RECEIVE_BYTES = 1 << 14
ACCEPTS_AT_ONCE = 64
_HEAD = struct.Struct(">ihhi")


@dataclass(slots=True)
class StormBroker:
    """Serves every connection from one loop; `named` is the broker that Metadata tells of."""

    listener: socket.socket
    named: traffic.Address
    selector: selectors.EpollSelector = field(default_factory=selectors.EpollSelector)
    known: dict[tuple[int, int], bytes] = field(default_factory=dict)
    inboxes: dict[socket.socket, bytearray] = field(default_factory=dict)

    def serve(self) -> None:
        """Serve until the process is ended."""
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._receive(key.fileobj)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                channel, _ = self.listener.accept()
            except BlockingIOError:
                return
            self.selector.register(channel, selectors.EVENT_READ)
            self.inboxes[channel] = bytearray()

    def _receive(self, channel: socket.socket) -> None:
        inbox = self.inboxes[channel]
        try:
            data = channel.recv(RECEIVE_BYTES)
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(channel)
            del self.inboxes[channel]
            channel.close()
            return
        inbox += data
        while len(inbox) >= _HEAD.size:
            length, api_key, version, correlation_id = _HEAD.unpack_from(inbox)
            end = traffic.LENGTH_BYTES + length
            if len(inbox) < end:
                return
            known = self.known.get((api_key, version))
            if known is None:
                known = self._answer(api_key, version, bytes(inbox[:end]))
                self.known[api_key, version] = known
            del inbox[:end]
            channel.send(known[:4] + struct.pack(">i", correlation_id) + known[8:])

    def _answer(self, api_key: int, version: int, frame: bytes) -> bytes:
        if api_key == ApiVersionsRequest.API_KEY:
            return traffic.api_versions_response(version, 0)
        if api_key == MetadataRequest.API_KEY:
            return traffic.metadata_response(version, 0, self.named, frame)
        if api_key == FetchRequest.API_KEY:
            size = traffic.small_batch_bytes()
            envelope = traffic.fetch_envelope(version, size, size)
            body = bytes(4) + envelope.before + traffic.record_batch(size) + envelope.after
            return len(body).to_bytes(4, "big") + body
        raise ValueError(f"API {api_key} is not served")


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    arguments = parser.parse_args()
    raise_file_limit()
    os.nice(NICENESS)
    listener = socket.socket(fileno=arguments.fd)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    StormBroker(listener, (arguments.host, arguments.port)).serve()


if __name__ == "__main__":
    _main()
