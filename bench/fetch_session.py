"""Both ends of an incremental fetch session (KIP-227): what a consumer asks, what a broker answers.

Or of one that fetches without a session, and need not wait for an answer to ask for the next. In
each step all partitions get one record batch of one record, as those of a consumer that keeps up
with its producers. So every request names all of them with new offsets, and from one request to the
next only the epoch and the offsets change: they are patched in. Both sides cost next to nothing.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, TypeAlias

from kafka.protocol.consumer.fetch import FetchResponse

from bench import traffic

FIRST_VERSION = 7
INITIAL_EPOCH, NO_SESSION = 0, 0
# Without a session, a request for the first record of a log is one that is asked again and again.
FIRST_READ_ON = 1
# What a codec writes where a value is patched in later. It must not be found elsewhere.
OFFSET_MARK = 0x5EA7_0FF5_E75A_77ED
MARK = OFFSET_MARK.to_bytes(8, "big")
_SESSION = struct.Struct(">ii")
_OFFSET = struct.Struct(">q")
_LOG_END = struct.Struct(">qq")
# Of a request, in front of the client id and behind it.
_REQUEST_HEAD_BYTES = 14
_LIMITS_BYTES = 13
_REPLICA_BYTES = 4
_LAST_VERSION_WITH_REPLICA = 14
_FIRST_FLEXIBLE_VERSION = 12

Positions: TypeAlias = dict[tuple[str, int, int], int]
"""The next offset, by client id, length of the topic's batches and first partition."""


class SessionRequests:
    """The requests of one session, in turn.

    `frame` is the next one; its correlation id is still to be set. `response_bytes` is the length
    of each response, known after the first.
    """

    def __init__(
        self, version: int, client_id: str, asked: traffic.Asked, positions: Positions
    ) -> None:
        """Begin where the client has got to, and keep `positions` up to date."""
        self.frame = traffic.fetch_request(
            *(version, client_id, asked.max_bytes, asked.batch_bytes),
            *(asked.partitions, OFFSET_MARK),
        )
        self.response_bytes = 0
        self.version = version
        self._asked = asked
        self._session_at = session_place(version, len(client_id.encode()))
        self._offsets_at = tuple(_places(self.frame, MARK))
        self._positions = positions
        self._key = client_id, asked.batch_bytes, asked.partitions.start
        self._session_id, self._epoch = 0, INITIAL_EPOCH
        self._start = positions.setdefault(self._key, 0)
        self._patch()

    def opened(self, response: bytes) -> None:
        """Take the response to the first request.

        Raises:
            ValueError: it is not what was asked for.

        """
        answer = FetchResponse.decode(response, version=self.version, header=True, framed=True)
        sizes = [
            len(partition.records or b"")
            for topic in answer.responses
            for partition in topic.partitions
            if not partition.error_code
        ]
        asked = self._asked
        whole = len(sizes) == len(asked.partitions) and min(sizes) >= asked.batch_bytes
        if answer.error_code or not answer.session_id or not whole:
            raise ValueError(f"not a whole answer: error {answer.error_code}, {sizes}")
        self._session_id = answer.session_id
        self.response_bytes = len(response)
        self.move_on()

    def move_on(self) -> None:
        """Make the frame the next request."""
        self._epoch += 1
        self._patch()

    def _patch(self) -> None:
        frame = self.frame
        _SESSION.pack_into(frame, self._session_at, self._session_id, self._epoch)
        self._positions[self._key] = position = self._start + self._epoch
        offset = _OFFSET.pack(position)
        for at in self._offsets_at:
            frame[at : at + 8] = offset


class SessionlessRequests:
    """Requests without a session, each for the record behind that of the one before."""

    response_bytes = 0

    def __init__(
        self, version: int, client_id: str, asked: traffic.Asked, positions: Positions
    ) -> None:
        """Begin where the client has got to, and keep `positions` up to date."""
        self.frame = traffic.fetch_request(
            *(version, client_id, asked.max_bytes, asked.batch_bytes),
            *(asked.partitions, OFFSET_MARK),
        )
        self.version = version
        self._offsets_at = tuple(_places(self.frame, MARK))
        self._positions = positions
        self._key = client_id, asked.batch_bytes, asked.partitions.start
        positions[self._key] = max(positions.get(self._key, 0), FIRST_READ_ON) - 1
        self.move_on()

    def move_on(self) -> None:
        """Make the frame the next request."""
        self._positions[self._key] = position = self._positions[self._key] + 1
        for at in self._offsets_at:
            _OFFSET.pack_into(self.frame, at, position)


@dataclass(slots=True)
class SessionAnswers:
    """The responses of one session: one body, in which the offsets go up.

    A range of the body must have left for good when the next response is made: its memory goes to
    the socket uncopied. With one request at a time it has.
    """

    start: int
    length: bytes
    body: mmap.mmap
    file: BinaryIO
    batches_at: tuple[int, ...]
    log_ends_at: tuple[int, ...]
    epoch: int = INITIAL_EPOCH
    """Of the latest request; without a session, how many there were before it."""

    @classmethod
    def make(cls, version: int, asked: traffic.Asked, session_id: int) -> "SessionAnswers":
        """Build the response to the request that opens the session."""
        batch = traffic.record_batch(asked.batch_bytes)
        frame = traffic.fetch_response(version, asked, session_id, batch, OFFSET_MARK)
        length, body = frame[: traffic.LENGTH_BYTES], frame[traffic.CORRELATION_ID_END :]
        file = os.fdopen(os.memfd_create("session"), "r+b", buffering=0)
        file.truncate(len(body))
        memory = mmap.mmap(file.fileno(), len(body))
        memory[:] = body
        return cls(
            asked.offset,
            length,
            memory,
            file,
            tuple(_places(body, batch)),
            tuple(_places(body, MARK + MARK)),
        )

    def step(self, epoch: int) -> None:
        """Make it the response to the request of this epoch."""
        self.epoch = epoch
        body, offset = self.body, self.start + epoch
        base, log_end = _OFFSET.pack(offset), _LOG_END.pack(offset + 1, offset + 1)
        for at in self.batches_at:
            body[at : at + 8] = base
        for at in self.log_ends_at:
            body[at : at + 16] = log_end


def session_place(version: int, client_bytes: int) -> int:
    """Return where session id and epoch are in a request's frame."""
    place = _REQUEST_HEAD_BYTES + client_bytes + _LIMITS_BYTES
    place += version >= _FIRST_FLEXIBLE_VERSION
    return place + (_REPLICA_BYTES if version <= _LAST_VERSION_WITH_REPLICA else 0)


def epoch_of(version: int, client_bytes: int, frame: bytes) -> int | None:
    """Return the epoch of a request; None before there were sessions."""
    if version < FIRST_VERSION:
        return None
    epoch: int = _SESSION.unpack_from(frame, session_place(version, client_bytes))[1]
    return epoch


def _places(data: bytes | bytearray, wanted: bytes) -> Iterator[int]:
    """Find where it stands, without overlaps."""
    at = data.find(wanted)
    while at >= 0:
        yield at
        at = data.find(wanted, at + len(wanted))
