"""One direction of a connection pair: frames from a source to a sink, with back-pressure.

A flow reads frame heads into user space and leaves bodies to its pump. It is driven by two
callbacks of the event loop, one for each socket, and only ever waits for one thing: the source to
become readable, the sink to become writable, or its owner to resume it. While it waits for the sink
it does not read, so a slow receiver slows the sender through TCP.

`run` may be called from anywhere at any time: within itself it does nothing, and a flow that is
closed by what it calls stops at the next step.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter

from proxy.quota.client_quotas import ClientQuotas
from proxy.quota.entities import QuotaKind
from proxy.relay.channel import BLOCKED, Channel, ChannelLost
from proxy.relay.lane import Lane
from proxy.relay.lifecycle import DRAINING, OPEN
from proxy.relay.memory_pool import UNCOUNTED_BYTES
from proxy.relay.pair_state import PairState
from proxy.relay.pump import (
    CLOSED,
    END,
    OWNER,
    PACED,
    READ,
    SPLICE_MIN_BYTES,
    TURN,
    WRITE,
    Pump,
    WaitReason,
)
from proxy.wire.fetch_response import FetchWalker
from proxy.wire.frames import MAX_HEADER_BYTES, MalformedFrame
from proxy.wire.layout import Buffer

READ_BYTES, READ_BYTES_HELD, READ_BYTES_LARGE = 64 << 10, 4096, 512
"""First read of a frame: all of it as a rule; less of one that may be held, so that it waits in the
kernel; after a large one even less, whose record data does not come to user space."""

MAX_START_BYTES = MAX_HEADER_BYTES + 2 * READ_BYTES_HELD
"""A frame's head, with the first fields of the body, has less."""

TURNS_OF_NEW = 4
"""So many times a flow waits its turn when its source is readable, before it counts as no newcomer
any more: it has been logged in, and has had answers."""

FAIR_BYTES, FAIR_FRAMES, FAIR_S = 4 << 20, 64, 0.002
"""A flow lets others run after so many bytes, so many frames at a time, or so long."""

SLOW_FRAME_S = 30.0
"""A frame that is kept in user space until it is complete, or its head, must come within this time.
What is streamed must only go on within it: a large body may take long on a slow link."""

_READS = (READ, END)
"""Waits that end when the source becomes readable, or ends."""


class FrameFlow(ABC):
    """Moves frames from source to sink. Subclasses decide what happens to each."""

    __slots__ = (
        *("_begun_s", "_pair", "_loop", "_pump", "_running"),
        *("_scratch", "_sink", "_source", "_starved", "_whole", "_whole_bytes"),
        *("_is_queued", "_turns_left", "_work", "address", "closed", "first_bytes"),
        *("kept_bytes", "last_active", "paused", "read_bytes", "ready", "stash", "wait"),
    )

    def __init__(self, pair: PairState, scratch: memoryview) -> None:
        self._pair = pair
        self._scratch = scratch
        """Shared by all flows of one direction: what is in it does not outlive a call of `run`."""
        self._loop = pair.services.loop
        self._source: Channel | None = None
        self._sink: Channel | None = None
        self._pump: Pump | None = None
        self.ready: Callable[[], None] | None = None
        """The lane's callback when the source is readable; None: `run` is."""
        self.stash = b""
        self._whole: bytearray | None = None
        self._whole_bytes = 0
        self._work: Iterator[None] | None = None
        """The steps in which the frame that is there as a whole is handled."""
        self._is_queued = False
        """Whether it waits for its turn."""
        self.address = pair.origin.ip
        self.kept_bytes = 0
        """For so many of a frame there is room; set by MemoryPool."""
        self._starved = self._running = False
        self._turns_left = TURNS_OF_NEW
        self.closed = False
        self.paused = False
        """Set by the owner: begin no further frame."""
        self.first_bytes = self.read_bytes = READ_BYTES_HELD
        self.wait = OWNER
        self.last_active = self._begun_s = self._loop.time()

    @abstractmethod
    def _take(self, view: memoryview) -> int:
        """Handle the start of `view`; return how many bytes are dealt with, 0 to be asked again."""

    @abstractmethod
    def _whole_frame(self, frame: bytearray) -> Iterator[None]:
        """Handle a frame that was asked for with `_collect`, in steps of less than a millisecond.

        It may raise `_whole_bytes`, and is called again when so many bytes are there.
        """

    def _wait_paused(self) -> WaitReason | None:
        """Return what to wait for during a pause. None: go on."""
        return OWNER

    def _may_move(self, _left: int) -> bool:
        """Return whether more of a frame may be read, of which so many bytes have not been.

        If not, it is run again when that is so.
        """
        return True

    @abstractmethod
    def _moved(self, count: int, *, is_whole: bool) -> None:
        """Record that so many bytes of a frame came behind its start, and whether all was sent."""

    def connect(self, source: Channel, sink: Channel | None) -> None:
        """Set the sockets, as soon as each is there."""
        self._source, self._sink = source, sink
        if sink is not None:
            self._pump = Pump(source, sink, self._pair.services.pipes)
        self._pair.services.resets.watch(source.fd, self._read_on)

    def close(self) -> None:
        """Stop. Sockets are the owner's to close."""
        self.closed, self.ready = True, None
        self._pair.shut_lane()
        self._wait_for(CLOSED)
        if self._pump is not None:
            self._pump.close()
        self.stash = b""
        self._whole = self._work = None
        self._pair.services.kept_bytes.release(self)
        if self._source is not None:
            self._pair.services.resets.forget(self._source.fd)

    @property
    def mid_frame(self) -> bool:
        """Whether anything was read that has not been sent on completely."""
        return bool(self.stash) or self.under_way

    @property
    def under_way(self) -> bool:
        """Whether a frame was begun: taken, and not been sent on completely."""
        return self._whole is not None or self._is_sending

    @property
    def owed_since_s(self) -> float | None:
        """Since when the sender owes the rest of a frame, in the loop's time; None: it does not.

        Of a body that is streamed since its last piece, else since the frame's first byte.
        """
        since_s = self.last_active if self._is_sending else self._begun_s
        return since_s if self.wait is READ and self.mid_frame else None

    @property
    def sending_blocked(self) -> bool:
        """Whether the receiver takes no more for now."""
        return self.wait is WRITE

    @property
    def is_stuck(self) -> bool:
        """Whether it waits for the client or for the broker."""
        return self.wait in (READ, WRITE)

    @property
    def about(self) -> dict[str, str]:
        """What log lines say of it."""
        session = self._pair.client.current
        client_id = None if session is None else session.identity.client_id
        return {**self._pair.origin.about, "client_id": client_id or ""}

    def give_up(self) -> None:
        """Close the pair, since others wait for the room of what is kept of its frame."""
        self._pair.close_stuck(self)

    def run_lane(self, ready: Callable[[], None]) -> None:
        """Have the lane move all that TLS has read from the kernel: no selector would show it.

        It reads on from there, a record at a time, so that this might not end by itself.
        """
        if self.closed or self._source is None:
            return
        before, end_s = 0, perf_counter() + FAIR_S
        try:
            ready()
            while self.wait is READ and (left := self._source.buffered_bytes()) not in (0, before):
                if perf_counter() > end_s:
                    if not self._is_queued:
                        self._is_queued = True
                        turn = partial(self._take_turn, partial(self.run_lane, ready))
                        self._pair.services.paced_steps.queue(turn, self.address)
                    return
                before = left
                ready()
        except OSError as error:
            self._pair.close_failed(error)

    def leave_lane(self, unsent: bytes, rest: bytes, error: int, body_bytes: int) -> None:
        """Handle what the lane did not: what it could not send, and what it read behind that.

        With an error number when it could not read, and with how many bytes there are to come of a
        frame whose start it has sent on.
        """
        if body_bytes:
            self._begin_body(body_bytes)
        if error and self._source is not None:
            lost = ChannelLost(self._source, OSError(error, os.strerror(error)))
            self._pair.close_failed(lost)
            return
        if unsent or rest:  # else it may have read nothing, as a frame was begun
            self.stash = rest
        if unsent and self._pump is not None:
            self._pump.keep(unsent)
        self.run()

    @property
    def _lane_bytes(self) -> int:
        """How much the lane reads at a time; 0: nothing."""
        return self.read_bytes if self.wait is READ and self._is_between_frames else 0

    @property
    def _is_between_frames(self) -> bool:
        pump = self._pump  # as `mid_frame`, but for each frame
        is_begun = self.stash or self._whole is not None or (pump is not None and pump.active)
        return not (is_begun or self.paused) and self._pair.life.state is OPEN

    @property
    def _is_told_of_more(self) -> bool:
        """Whether the event loop says when there is more: nothing is begun, or held back by TLS."""
        source = self._source
        return self._is_between_frames and source is not None and not source.buffered_bytes()

    @property
    def _lane_goes_on(self) -> bool:
        """Whether the lane is to read what comes behind what was just sent on."""
        return False

    @abstractmethod
    def _open_lane(self, lane: Lane) -> None:
        """Set how much the lane reads; nothing while a frame was begun."""

    def resume(self) -> None:
        """End a pause."""
        self.paused = False
        self._begun_s = self._loop.time()  # the sender is not to blame for the pause
        self.run()

    def run(self) -> None:
        """Move what can be moved, then wait for what is missing. Also the loop's callback."""
        if self.closed or self._running:
            return
        self._running = True
        try:
            if self._pair.shown.rows:
                self._pair.shown.show()
            wait = CLOSED if self.closed else self._advance()
            if wait is CLOSED and not self.closed:
                self._pair.close_ended(self)
        except Exception as error:  # whatever it is, it ends this pair only
            wait = CLOSED
            self._pair.close_failed(error)
        finally:
            self._running = False
        if self.closed:
            return
        if self._pair.life.state is DRAINING:
            self._pair.finish_if_drained()
            if self.closed:
                return
        if wait is not self.wait:
            self._wait_for(wait)
        lane = self._pair.lane
        if lane is not None:
            self._open_lane(lane)
        if wait in (TURN, PACED) and not self._is_queued:
            self._is_queued = True
            if wait is PACED:
                self._pair.services.paced_steps.queue(self._take_turn, self.address)
            else:
                self._loop.call_soon(self._take_turn)

    def _read_on(self) -> None:
        """Read until the source's end is found, which was reset: no callback may come for it."""
        if self.wait in _READS and self._source is not None and self._source.is_reset:
            (self.ready or self.run)()
            self._loop.call_soon(self._read_on)

    def _take_turn(self, run: Callable[[], None] | None = None) -> None:
        self._is_queued = False
        (run or self.run)()

    def _run_in_turn(self) -> None:
        """Run with others that are as new, a few in each round: the loop's callback at first.

        Thousands that connect at once, and then send all at once, would take one long round.
        """
        steps = self._pair.services.paced_steps
        self._turns_left -= 1
        if not steps.has_time or not self._turns_left:
            self._wait_for(TURN)
        steps.add(self._run_new, self.address)

    def _run_new(self) -> None:
        if self.wait is TURN:
            self._wait_for(READ)
        (self.ready or self.run)()  # the lane may know already what is plain

    def _wait_for(self, wait: WaitReason) -> None:
        """Have the loop call back for this, and for what was waited for before no longer."""
        before, self.wait = self.wait, wait
        loop, source, sink = self._loop, self._source, self._sink
        if (wait in _READS) is not (before in _READS) and source is not None:
            if wait in _READS:
                ready = self._run_in_turn if self._turns_left else self.ready or self.run
                loop.add_reader(source.fd, ready)
            else:
                loop.remove_reader(source.fd)
        if (wait is WRITE) is not (before is WRITE) and sink is not None:
            if wait is WRITE:
                loop.add_writer(sink.fd, self.run)
            else:
                loop.remove_writer(sink.fd)

    def _advance(self) -> WaitReason:
        self.last_active = self._loop.time()
        budget, end_s = FAIR_BYTES, perf_counter() + FAIR_S
        while True:
            pump = self._pump
            if self.kept_bytes and self._keeps_nothing and (pump is None or pump.flush()):
                self._pair.services.kept_bytes.release(self)
            if pump is not None and pump.active:
                unread = pump.unread
                if unread and not self._may_move(unread):
                    return OWNER if pump.flush() else WRITE
                try:
                    wait = pump.run(budget)
                finally:
                    moved = unread - pump.unread
                    self._moved(moved, is_whole=not pump.active)
                budget -= moved
                if wait is None and self._lane_goes_on:
                    wait = READ
                if wait is not None:
                    return wait
            if self.closed:
                return CLOSED
            wait = self._read() if self._whole is None else self._collect_more(self._whole)
            if wait is not None:
                return wait
            if perf_counter() > end_s:
                return TURN

    def _read(self) -> WaitReason | None:
        """Read once and handle what came. None: go on."""
        if self.paused:
            return self._wait_paused()
        assert self._source is not None
        scratch = self._scratch
        have = len(self.stash)
        drained = False
        if have:
            scratch[:have] = self.stash
        if not self._starved:
            self._begun_s = self.last_active
        is_long = have >= READ_BYTES_HELD and self._starved
        if is_long and not self._pair.services.kept_bytes.reserve(self, MAX_START_BYTES):
            return OWNER
        if self._starved or not have:
            got = self._source.recv_into(scratch[have : have + self.read_bytes])
            if got <= 0:
                return READ if got == BLOCKED else CLOSED
            drained = got < self.read_bytes and not self._source.buffered_bytes()
            have += got
        return self._handle(have, drained=drained)

    def _handle(self, have: int, *, drained: bool) -> WaitReason | None:
        """Handle the first bytes of the scratch buffer; `drained`: the source has no more now."""
        scratch, pos, frames, busy = self._scratch, 0, 0, False
        self._starved = False
        while pos < have and not busy and frames < FAIR_FRAMES and not self.closed:
            frames += 1
            taken = self._take(scratch[pos:have])
            if not taken:
                busy = self.paused
                break
            pos += taken
            pump = self._pump  # as `under_way`, but for each frame
            busy = self.paused or self._whole is not None or (pump is not None and pump.active)
            if not busy:
                self._begun_s = self.last_active
        if self.closed:
            return CLOSED
        if self.kept_bytes and self._keeps_nothing:
            self._pair.services.kept_bytes.release(self)
        self.stash = bytes(scratch[pos:have]) if pos < have else b""
        if not busy and ((drained and (self._starved or not self.stash)) or self._lane_goes_on):
            return READ
        return TURN if frames == FAIR_FRAMES and not busy else None

    @property
    def _keeps_nothing(self) -> bool:
        """Whether no frame is taken into memory, nor a head that has not come whole."""
        return self._whole is None and not self._starved

    @property
    def _is_sending(self) -> bool:
        return self._pump is not None and self._pump.active

    def _need_more(self, view: memoryview) -> int:
        """Record that the next frame's head is not complete yet. Raises MalformedFrame: no room."""
        if len(view) >= MAX_START_BYTES:
            raise MalformedFrame("bad_header", f"no end of the first fields in {len(view)} bytes")
        self._starved = True
        return 0

    def _send(self, data: Buffer, *, more: bool = False) -> None:
        """Send a frame, or a part of one of which `more` follows at once."""
        assert self._pump is not None
        self._pump.send(data, more=more)

    def _send_body(self, body_bytes: int, walker: FetchWalker | None = None) -> None:
        """Pass on the next bytes of the source, which a walker gets then, if any."""
        assert self._pump is not None
        self._pump.start(body_bytes, walker)
        is_large = body_bytes >= SPLICE_MIN_BYTES
        self.read_bytes = READ_BYTES_LARGE if is_large else self.first_bytes

    def _begin_body(self, body_bytes: int) -> None:
        """Pass on what is to come of a frame whose start the lane has sent on."""
        self._send_body(body_bytes)

    def _read_ahead(self, quotas: ClientQuotas, kind: QuotaKind) -> None:
        """Choose how much to read at first after a frame of more than READ_BYTES_HELD."""
        self.first_bytes = READ_BYTES_HELD if quotas.is_paced(kind) else READ_BYTES

    def _forward(
        self, view: memoryview, frame_bytes: int, walker: FetchWalker | None = None
    ) -> int:
        """Send on the frame that starts `view`, all of it or its start with the body to follow.

        A walker gets the body that follows.
        """
        have = len(view)
        if frame_bytes <= have:
            self._send(view[:frame_bytes])
            self.read_bytes = self.first_bytes
            return frame_bytes
        self._send(view, more=True)
        self._send_body(frame_bytes - have, walker)
        return have

    def _collect(self, view: memoryview, frame_bytes: int) -> int:
        """Take the whole frame that starts `view` into memory; `_whole_frame` gets it.

        What it takes grows with what arrives: a sender can announce more than it sends.
        """
        self._pair.services.kept_bytes.release(self)  # of its head: now it is known how long it is
        self._whole, self._whole_bytes = bytearray(view[:frame_bytes]), frame_bytes
        return len(self._whole)

    def _collect_more(self, frame: bytearray) -> WaitReason | None:
        """Take more of a frame into memory; when it is all there, have it handled."""
        have = len(frame)
        if not self._may_move(self._whole_bytes - have):
            return OWNER
        try:
            return self._read_more(frame)
        finally:
            self._moved(len(frame) - have, is_whole=self._whole is None)

    def _read_more(self, frame: bytearray) -> WaitReason | None:
        budget = FAIR_BYTES
        kept_bytes, steps = self._pair.services.kept_bytes, self._pair.services.paced_steps
        assert self._source is not None
        while missing := self._whole_bytes - len(frame):
            if self._whole_bytes > UNCOUNTED_BYTES and not kept_bytes.reserve(
                self, self._whole_bytes
            ):
                return OWNER
            got = self._source.recv_into(self._scratch[:missing])
            if got <= 0:
                return READ if got == BLOCKED else CLOSED
            frame += self._scratch[:got]
            budget -= got
            if budget <= 0:
                return TURN
        if self._work is None:
            self._work = self._whole_frame(frame)
        while steps.may_go_on:
            has_more = steps.go_on(self._work)
            if self.closed:
                return CLOSED
            if not has_more:
                self._work = None
                if self._whole_bytes == len(frame):
                    self._whole = None
                return None
        return PACED


def new_scratch() -> bytearray:
    """Make a buffer that holds the longest head and a first read, with one read behind them."""
    return bytearray(MAX_START_BYTES + 2 * READ_BYTES)
