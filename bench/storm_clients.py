"""A child of the figure `storm`: many clients that connect at once, ask twice each and stay.

On a line on stdin they begin; when the last has its answers, one line of JSON says how it went.
"""

import argparse
import json
import os
import selectors
import socket
import sys
import time
from dataclasses import dataclass, field

from bench import traffic
from bench.processes import raise_file_limit
from bench.storm_broker import NICENESS

ANSWERS = 2
"""To ApiVersions and to Fetch."""

RECEIVE_BYTES = 1 << 16
LONGEST_S = 60.0


@dataclass(slots=True)
class _Client:
    sock: socket.socket
    sent: bool = False
    answers: int = 0
    inbox: bytearray = field(default_factory=bytearray)

    def take(self, data: bytes) -> None:
        """Count the answers that are complete."""
        self.inbox += data
        while len(self.inbox) >= traffic.LENGTH_BYTES:
            end = traffic.LENGTH_BYTES + int.from_bytes(self.inbox[: traffic.LENGTH_BYTES], "big")
            if len(self.inbox) < end:
                return
            del self.inbox[:end]
            self.answers += 1


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--version", type=int, required=True)
    options = parser.parse_args()
    raise_file_limit()
    os.nice(NICENESS)
    requests = [
        traffic.api_versions_request(f"storm-{number}")
        + traffic.fetch_request(
            options.version,
            f"storm-{number}",
            traffic.small_batch_bytes(),
            traffic.small_batch_bytes(),
        )
        for number in range(options.connections)
    ]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    kept: list[socket.socket] = []
    done, failed, took_s = _storm((options.host, options.port), requests, kept)
    document = {"answered": done, "failed": failed, "took_s": took_s}
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


def _storm(
    address: traffic.Address, requests: list[bytes], kept: list[socket.socket]
) -> tuple[int, int, float]:
    """Connect and ask on all; their sockets stay open in `kept`."""
    began_s = time.monotonic()
    done = failed = 0
    with selectors.EpollSelector() as selector:
        for request in requests:
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(address)
            kept.append(sock)
            selector.register(sock, selectors.EVENT_WRITE, (_Client(sock), request))
        while done + failed < len(requests) and time.monotonic() - began_s < LONGEST_S:
            for key, _ in selector.select(1.0):
                client, request = key.data
                try:
                    if not client.sent:
                        client.sock.send(request)
                        client.sent = True
                        selector.modify(client.sock, selectors.EVENT_READ, key.data)
                        continue
                    data = client.sock.recv(RECEIVE_BYTES)
                except OSError:
                    data = b""
                client.take(data)
                if not data or client.answers == ANSWERS:
                    selector.unregister(client.sock)
                    done += client.answers == ANSWERS
                    failed += client.answers != ANSWERS
    return done, failed, time.monotonic() - began_s


if __name__ == "__main__":
    _main()
