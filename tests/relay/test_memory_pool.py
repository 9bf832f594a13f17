"""Room for what is kept whole: bounded for all, shared among addresses, and given in turn."""

from dataclasses import dataclass, field

from proxy.relay.memory_pool import (
    CHECK_S,
    MOST_AT_ONCE,
    MOST_BYTES,
    MOST_OF_ADDRESS_BYTES,
    PATIENCE_S,
    MemoryPool,
)

FRAME = MOST_OF_ADDRESS_BYTES // 2


class ManualLoop:
    """Its time moves when the test says so."""

    def __init__(self):
        self.now_s = 0.0
        self._timers = []
        self._soon = []

    def time(self):
        return self.now_s

    def call_later(self, delay_s, callback):
        self._timers.append((self.now_s + delay_s, callback))
        return callback

    def call_soon(self, callback):
        self._soon.append(callback)

    def run(self, until_s):
        while self._soon or any(due_s <= until_s for due_s, _ in self._timers):
            soon, self._soon = self._soon, []
            for callback in soon:
                callback()
            due = [timer for timer in self._timers if timer[0] <= until_s]
            self._timers = [timer for timer in self._timers if timer[0] > until_s]
            for due_s, callback in due:
                self.now_s = max(self.now_s, due_s)
                callback()
        self.now_s = until_s


@dataclass(eq=False)
class Frame:
    kept: "Room"
    address: str = "a"
    size: int = FRAME
    is_stuck: bool = True
    kept_bytes: int = 0
    is_closed: bool = False
    about: dict = field(default_factory=dict)

    def run(self):
        assert self.kept.reserve(self, self.size)

    def give_up(self):
        self.is_closed = True
        self.kept.release(self)


class Room(MemoryPool):
    def __init__(self):
        self.loop = ManualLoop()
        self.warnings = []
        super().__init__(self.loop, lambda _, **about: self.warnings.append(about))

    def ask(self, address="a", size=FRAME, **facts):
        frame = Frame(self, address, size, **facts)
        self.reserve(frame, size)
        return frame


def test_an_address_has_its_share_and_others_theirs():
    room = Room()
    first, second, third = (room.ask("a") for _ in range(3))
    assert (first.kept_bytes, second.kept_bytes, third.kept_bytes) == (FRAME, FRAME, 0)
    other = room.ask("b")
    assert other.kept_bytes == FRAME
    assert (room.total, room.waiting) == (3 * FRAME, 1)
    room.release(first)
    assert third.kept_bytes == FRAME
    assert room.waiting == 0


def test_room_is_given_in_turn():
    room = Room()
    kept = [room.ask(name) for name in "aabb"]
    assert room.total == MOST_BYTES
    large, small = room.ask("c", 2 * FRAME), room.ask("d", 1)
    room.release(kept[0])
    assert (large.kept_bytes, small.kept_bytes) == (0, 0)
    room.release(kept[1])
    assert large.kept_bytes == 2 * FRAME
    room.release(kept[2])
    assert small.kept_bytes == 1


def test_one_that_leaves_lets_the_next_one_have_its_turn():
    room = Room()
    kept = [room.ask(name) for name in "aabb"]
    large, small = room.ask("c", 2 * FRAME), room.ask("d", FRAME)
    room.release(kept[0])
    assert small.kept_bytes == 0
    room.release(large)
    assert small.kept_bytes == FRAME


def test_one_alone_always_has_room():
    room = Room()
    frame = room.ask(size=2 * MOST_BYTES)
    assert frame.kept_bytes == 2 * MOST_BYTES
    waiting = room.ask("b", 1)
    room.release(frame)
    assert waiting.kept_bytes == 1


def test_a_frame_that_turns_out_shorter_makes_room():
    room = Room()
    first, _, waiting = room.ask(), room.ask(), room.ask(size=FRAME - 1)
    room.shrink(first, 1)
    assert waiting.kept_bytes == FRAME - 1
    assert room.total == MOST_OF_ADDRESS_BYTES


def test_nothing_is_left_of_who_has_gone():
    room = Room()
    frames = [room.ask("a") for _ in range(3)]
    for frame in reversed(frames):
        room.release(frame)
        room.release(frame)
    assert (room.total, room.waiting) == (0, 0)
    room.loop.run(10 * PATIENCE_S)
    assert not any(frame.is_closed for frame in frames)


def test_who_does_not_read_is_closed_when_others_wait():
    room = Room()
    small, large, waiting = room.ask(size=FRAME // 2), room.ask(), room.ask()
    room.loop.run(PATIENCE_S - CHECK_S)
    assert not large.is_closed
    room.loop.run(PATIENCE_S + CHECK_S)
    assert large.is_closed
    assert waiting.kept_bytes == FRAME
    room.loop.run(10 * PATIENCE_S)
    assert not small.is_closed


def test_nobody_is_closed_who_goes_on_or_whose_room_would_not_help():
    room = Room()
    going, other, waiting = room.ask(is_stuck=False), room.ask("b"), room.ask(size=2 * FRAME)
    room.loop.run(10 * PATIENCE_S)
    assert not going.is_closed
    assert not other.is_closed
    assert not waiting.kept_bytes


def test_one_address_after_the_other_is_closed_until_there_is_room():
    room = Room()
    small = MOST_BYTES // (4 * MOST_AT_ONCE)
    frames = [room.ask(name, small) for name in "ab" for _ in range(2 * MOST_AT_ONCE)]
    waiting = room.ask("c", 2 * MOST_AT_ONCE * small)
    room.loop.run(2 * PATIENCE_S)
    assert waiting.kept_bytes
    assert sum(frame.is_closed for frame in frames) == 2 * MOST_AT_ONCE


def test_the_largest_is_named_once_a_minute():
    room = Room()
    for name in "aabb":
        room.ask(name, about={"peer": name})
    room.ask("c")
    room.ask("c")
    (warning,) = room.warnings
    assert warning["kept_bytes"] == MOST_BYTES
    assert warning["largest_bytes"] == FRAME
    assert warning["largest"] == {"peer": "a"}
