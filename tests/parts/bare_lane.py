"""A lane between two sockets, whose rows can be looked at."""

import socket
from array import array
from collections import deque
from struct import unpack_from

from metrics import CounterChild
from proxy.relay.intercepted_frames import LaneFrameCopies
from proxy.relay.lane import ANY_RESPONSE, Kind, Lane

MOST_IN_FLIGHT = 10
MOST_BYTES = 1 << 16


class BareLane:
    """Passes on what begins like one request, and keeps copies of it as for an interceptor."""

    def __init__(self, shown: LaneFrameCopies | None = None) -> None:
        """With `shown` rows are shown when it says so, else they only gather."""
        pairs = socket.socketpair(), socket.socketpair()
        (self.client, self._ours), (self._theirs, self.broker) = pairs
        self.kinds: list[Kind] = []
        self.rows = [] if shown is None else shown.rows
        self.unshown = array("q", (0,)) if shown is None else shown.unshown.cells
        self._begin = tuple if shown is None else shown.begin
        given = deque(), self.kinds, self._left, self._left, None, None
        self.lane = Lane(self._ours.fileno(), self._theirs.fileno(), MOST_IN_FLIGHT, given)
        self.lane.request_bytes = self.lane.response_bytes = MOST_BYTES

    def _left(self, *what) -> None:
        raise AssertionError(f"not plain: {what}")

    def learn(self, about, request: bytes, common_bytes: int) -> None:
        """Let requests pass that have so many bytes in common; `about` has their run."""
        cells = CounterChild("counter").cells
        (api,) = unpack_from(">I", request, 4)
        start, may, nothing = request[12:common_bytes], lambda *_: True, lambda *_: None
        self.kinds[:] = [
            Kind(
                *(about, api, start, may, nothing, cells, cells, None, 0, ANY_RESPONSE, 0, []),
                *(self.rows, about.run, self.unshown, self._begin),
            )
        ]

    def ask(self, request: bytes) -> None:
        """Have a request sent on."""
        self.client.sendall(request)
        self.lane.requests_ready()
        assert self.broker.recv(MOST_BYTES) == request

    def answer(self, response: bytes) -> None:
        """Have the response to the oldest request sent on."""
        self.broker.sendall(response)
        self.lane.responses_ready()
        assert self.client.recv(MOST_BYTES) == response

    def close(self) -> None:
        """Close all sockets."""
        self.lane.close()
        for each in (self.client, self._ours, self._theirs, self.broker):
            each.close()
