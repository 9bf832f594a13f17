"""Sends frames to a socket, and moves record data there unseen: by splice, or by copy.

`splice` needs a pipe between two sockets. A user other than root gets 64 MiB of pipes in all
(fs.pipe-user-pages-soft), shared with every other process of that user; a pipe beyond that is of
8 KiB, and cannot be made larger.
"""

import fcntl
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter
from typing import NamedTuple

from proxy.relay.channel import BLOCKED, Channel, ChannelLost
from proxy.wire.fetch_response import FetchWalker
from proxy.wire.layout import Buffer

SPLICE_MIN_BYTES = 64 * 1024
"""Smaller bodies are cheaper by copy: three system calls less. See docs/decisions."""

COPY_BYTES = 64 * 1024
"""What is copied at a time; also the most that a blocked pump keeps."""

PIPE_BYTES = 256 * 1024
"""Asked for each pipe: a larger one costs hardly less CPU time. See docs/decisions."""

MIN_PIPE_BYTES = 64 * 1024
"""A smaller one is not used: copying is as fast from 16 KiB down."""

MAX_PIPES = 128
"""Pipes open at once, half of what a user gets; flows that find none copy instead."""

MOST_WALK_S = 0.001
"""What a walker takes at once: 4 MiB in record batches of 16 KiB take half of it, 4 MiB of empty
partitions a hundred times as much. The rest waits its turn with other costly steps."""

TAKES_WITHOUT_TRYING = 256
"""Bodies that are copied after a pipe was refused: asking costs as much as copying 64 KiB."""

_scratch = memoryview(bytearray(PIPE_BYTES))


class WaitReason(Enum):
    """What a pump or a flow waits for."""

    READ = "read"
    WRITE = "write"
    TURN = "turn"
    """Nothing: it only lets others run."""
    PACED = "paced"
    """Its turn among all that do something costly."""
    OWNER = "owner"
    END = "end"
    """For its owner too, but it watches whether the peer leaves meanwhile. That shows only as long
    as the peer has sent nothing that waits to be read."""
    CLOSED = "closed"
    """Nothing: the source's stream has ended."""


READ, WRITE, TURN, PACED, OWNER, END, CLOSED = WaitReason
"""By themselves, for the path of every frame: from its class a member takes ten times as long."""


class PipeFds(NamedTuple):
    """The two ends of an empty pipe, both non-blocking."""

    read_fd: int
    write_fd: int


@dataclass(slots=True, eq=False)
class PipePool:
    """Lends out pipes and takes them back empty; tells `refused` once why the system gives none.

    With 0 pipes all is copied.
    """

    _max_pipes: int = MAX_PIPES
    _refused: Callable[[OSError], None] = lambda _: None
    _idle: list[PipeFds] = field(default_factory=list)
    open_pipes: int = 0
    """How many pipes exist, lent or idle."""
    _takes_to_skip: int = 0
    _is_told: bool = False

    def take(self) -> PipeFds | None:
        """Lend a pipe; None when the limit is reached or the system gives no useful one."""
        if self._idle:
            return self._idle.pop()
        if self.open_pipes >= self._max_pipes:
            return None
        if self._takes_to_skip:
            self._takes_to_skip -= 1
            return None
        try:
            pipe = _open_pipe()
        except OSError as error:
            self._takes_to_skip = TAKES_WITHOUT_TRYING
            if not self._is_told:
                self._is_told = True
                self._refused(error)
            return None
        self.open_pipes += 1
        return pipe

    def give_back(self, pipe: PipeFds, *, empty: bool) -> None:
        """Return a pipe to the pool. One that still holds bytes can't be used again."""
        if empty:
            self._idle.append(pipe)
            return
        self.open_pipes -= 1
        os.close(pipe.read_fd)
        os.close(pipe.write_fd)

    def close(self) -> None:
        """Close the idle pipes."""
        while self._idle:
            self.give_back(self._idle.pop(), empty=False)


def _open_pipe() -> PipeFds:
    """Open a pipe. Raises OSError: no descriptors left, or too little pipe memory."""
    pipe = PipeFds(*os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
    try:
        fcntl.fcntl(pipe.write_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:  # over the user's share of pipe memory: what it has may do
        if fcntl.fcntl(pipe.write_fd, fcntl.F_GETPIPE_SZ) < MIN_PIPE_BYTES:
            os.close(pipe.read_fd)
            os.close(pipe.write_fd)
            raise
    return pipe


@dataclass(slots=True, eq=False)
class Pump:
    """Sends to the sink what it is given, and one body after another from the source, in order."""

    _source: Channel
    _sink: Channel
    _pool: PipePool
    unread: int = 0
    """Bytes of the body that are still to be read from the source."""
    active: bool = False
    """Whether anything is under way."""
    _pipe: PipeFds | None = None
    _inside: int = 0
    _held: bytes | memoryview = b""
    """What was read or given, and not sent."""
    _walker: FetchWalker | None = None

    def start(self, body_bytes: int, walker: FetchWalker | None = None) -> None:
        """Begin with the next `body_bytes` of the source. Only when not `active`.

        A walker gets what of it is not opaque, each piece after that was sent.
        """
        self.unread, self._walker = body_bytes, walker
        self.active = True
        is_large = body_bytes >= SPLICE_MIN_BYTES
        if is_large and self._source.is_plain and self._sink.is_plain:
            self._pipe = self._pool.take()

    def send(self, data: Buffer, *, more: bool = False) -> None:
        """Send a frame, or a part of one of which `more` follows at once. Raises ChannelLost.

        What the socket does not take is kept; a copy of it where others write to the same memory.
        """
        sent = self._sink.send(data, more=more)
        if sent < len(data):
            rest = memoryview(data)[max(sent, 0) :]
            self.keep(bytes(rest) if isinstance(data, memoryview) else rest)

    def keep(self, unsent: bytes | memoryview) -> None:
        """Send this first. Only when not `active`, but for a body that has just begun."""
        self._held = unsent
        self.active = True

    def run(self, budget: int) -> WaitReason | None:
        """Move about `budget` bytes; return what the rest waits for, if any. Raises ChannelLost."""
        walk_s = 0.0
        while self.flush():
            if not self.unread:
                self.active = False
                self.close()
                return None
            if budget <= 0:
                return TURN
            got = self._read()
            if got <= 0:
                return READ if got == BLOCKED else CLOSED
            self.unread -= got
            budget -= got
            if self._walker is not None:
                self.flush()  # the client is at work meanwhile
                walk_s -= perf_counter()
                self._show(self._walker, got)
                walk_s += perf_counter()
                if self.unread and walk_s > MOST_WALK_S:
                    return PACED
        return WRITE

    def flush(self) -> bool:
        """Send what was read or given; return whether that is all. Raises ChannelLost."""
        while self._held:
            sent = self._sink.send(self._held)
            if sent == BLOCKED:
                return False
            self._held = self._held[sent:]
        while self._inside and self._pipe is not None:
            flags = os.SPLICE_F_MORE if self.unread else 0
            try:
                self._inside -= os.splice(
                    self._pipe.read_fd, self._sink.fd, self._inside, flags=flags
                )
            except BlockingIOError:
                return False
            except OSError as error:
                raise ChannelLost(self._sink, error) from error
        return True

    def close(self) -> None:
        """Give all up, with what is in the pipe: a body that is not done is lost."""
        self._held = b""
        if self._pipe is not None:
            self._pool.give_back(self._pipe, empty=not self._inside)
            self._pipe = None

    def _sees(self, walker: FetchWalker) -> bool:
        """Return whether the scratch buffer has what is read next, or was last."""
        return self._pipe is None or walker.opaque_bytes < SPLICE_MIN_BYTES

    def _show(self, walker: FetchWalker, got: int) -> None:
        if self._sees(walker):
            walker.feed(_scratch[:got])
        else:
            walker.skip(got)
        if walker.is_done or not self.unread:
            walker.show()
            self._walker = None

    def _read(self) -> int:
        """Take the next piece of a body into the pipe, or send it; return as `recv_into`."""
        if self._pipe is None:
            got = self._source.recv_into(_scratch[: min(self.unread, COPY_BYTES)])
            if got > 0:
                self.send(_scratch[:got])
            return got
        most = min(self.unread, PIPE_BYTES)
        walker = self._walker
        if walker is not None and not self._sees(walker):
            most = min(most, walker.opaque_bytes)
        elif walker is not None:
            piece_bytes = PIPE_BYTES if walker.opaque_bytes else COPY_BYTES  # it may be dense
            most = self._source.recv_into(_scratch[: min(most, piece_bytes)], socket.MSG_PEEK)
            if most <= 0:
                return most
        try:
            self._inside = os.splice(self._source.fd, self._pipe.write_fd, most)
        except BlockingIOError:
            return BLOCKED
        except OSError as error:
            raise ChannelLost(self._source, error) from error
        return self._inside
