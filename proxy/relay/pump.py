"""Moves record data from one socket to the other without looking at it: by splice, or by copy."""

import os
from enum import Enum

from proxy.relay.channel import BLOCKED, Channel, ChannelLost
from proxy.relay.pipes import PIPE_BYTES, Pipe, PipePool

SPLICE_MIN_BYTES = 64 * 1024
"""Smaller bodies are cheaper by copy: three system calls less. See docs/decisions."""

COPY_BYTES = 64 * 1024
"""The copy buffer, shared by all pumps; also the most that a blocked pump keeps."""

_scratch = memoryview(bytearray(COPY_BYTES))


class Wait(Enum):
    """What a pump or a flow waits for."""

    READ = "read"
    WRITE = "write"
    TURN = "turn"
    """Nothing: it only lets others run."""
    OWNER = "owner"
    END = "end"
    """For its owner too, but it watches whether the peer leaves meanwhile. That shows only as long
    as the peer has sent nothing that waits to be read."""
    CLOSED = "closed"
    """Nothing: the source's stream has ended."""


class Pump:
    """Moves one body after another from `source` to `sink`, as far as both let it."""

    __slots__ = (
        *("_held", "_inside", "_pipe", "_pool", "_sink", "_source", "_splice"),
        *("active", "unread"),
    )

    def __init__(self, source: Channel, sink: Channel, pool: PipePool) -> None:
        self._source = source
        self._sink = sink
        self._pool = pool
        self._pipe: Pipe | None = None
        self._inside = 0
        self._held = b""
        self._splice = source.spliceable and sink.spliceable
        self.unread = 0
        """Bytes of the body that are still to be read from the source."""
        self.active = False
        """Whether a body is under way."""

    def start(self, body_bytes: int) -> None:
        """Begin with the next `body_bytes` of the source. Only when not `active`."""
        self.unread = body_bytes
        self.active = True
        if self._splice and body_bytes >= SPLICE_MIN_BYTES:
            self._pipe = self._pool.take()

    def run(self, budget: int) -> Wait | None:
        """Move about `budget` bytes; return what the rest waits for, if any. Raises ChannelLost."""
        wait = self._run_splice(budget) if self._pipe is not None else self._run_copy(budget)
        if wait is None:
            self.active = False
            self.close()
        return wait

    def close(self) -> None:
        """Give the pipe up, with what is inside: a body that is not done is lost."""
        if self._pipe is not None:
            self._pool.give_back(self._pipe, empty=not self._inside)
            self._pipe = None

    def _run_splice(self, budget: int) -> Wait | None:
        assert self._pipe is not None
        read_fd, write_fd = self._pipe
        source, sink = self._source.fd, self._sink.fd
        while True:
            if self._inside:
                flags = os.SPLICE_F_MORE if self.unread else 0
                try:
                    sent = os.splice(read_fd, sink, self._inside, flags=flags)
                except BlockingIOError:
                    return Wait.WRITE
                except OSError as error:
                    raise ChannelLost(self._sink, error) from error
                self._inside -= sent
                budget -= sent
                if self._inside:
                    continue
            if not self.unread:
                return None
            if budget <= 0:
                return Wait.TURN
            try:
                got = os.splice(source, write_fd, min(self.unread, PIPE_BYTES))
            except BlockingIOError:
                return Wait.READ
            except OSError as error:
                raise ChannelLost(self._source, error) from error
            if not got:
                return Wait.CLOSED
            self._inside = got
            self.unread -= got

    def _run_copy(self, budget: int) -> Wait | None:
        while True:
            if self._held:
                sent = self._sink.send(self._held)
                if sent == BLOCKED:
                    return Wait.WRITE
                self._held = self._held[sent:]
                if self._held:
                    continue
            if not self.unread:
                return None
            if budget <= 0:
                return Wait.TURN
            got = self._source.recv_into(_scratch[: min(self.unread, COPY_BYTES)])
            if got <= 0:
                return Wait.READ if got == BLOCKED else Wait.CLOSED
            self.unread -= got
            budget -= got
            sent = max(self._sink.send(_scratch[:got]), 0)
            if sent < got:
                self._held = bytes(_scratch[sent:got])
