"""Bounds what the frames that are kept whole in user space take, of all connections together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from metrics.clock import clock_ms

MOST_BYTES = 128 << 20
"""What all connections may keep; a frame alone may be kept however long it is."""

MOST_OF_ADDRESS_BYTES = MOST_BYTES // 2
"""The same, of all connections from one address."""

UNCOUNTED_BYTES = 64 << 10
"""A shorter frame needs no room. Each connection may keep so much anyway: one read of a frame that
is streamed."""

PATIENCE_S = 10.0
"""While others wait for room a frame is kept for so long; then its connection is closed, if it is
the client or the broker that it waits for."""

CHECK_S, MOST_AT_ONCE = 0.25, 32
"""Between two looks for such frames, and how many connections each closes."""

WARN_EVERY_MS = 60_000.0


class _Keeper(Protocol):
    """One direction of a connection pair, which keeps one frame at a time; see FrameFlow."""

    address: str
    kept_bytes: int

    @property
    def is_stuck(self) -> bool: ...
    @property
    def about(self) -> dict[str, str]: ...
    def run(self) -> None: ...
    def give_up(self) -> None: ...


class MemoryPool:
    """Gives room in the order in which it is asked for, and each address no more than its share.

    Who keeps a frame never asks for more room, so that no two wait for each other.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, warn: Callable[..., None]) -> None:
        self._loop = loop
        self._warn = warn
        self.total = 0
        self._by_address: Counter[str] = Counter()
        self._since_s: dict[_Keeper, float] = {}
        """Since when there is room for each keeper's frame, the oldest first."""
        self._waiting: dict[_Keeper, int] = {}
        """How much room each asks for, in order."""
        self._check: asyncio.TimerHandle | None = None
        self._warned_ms = -WARN_EVERY_MS

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._waiting)

    def reserve(self, keeper: _Keeper, size: int) -> bool:
        """Return whether there is room for a frame; if not, its keeper runs when there is."""
        if keeper.kept_bytes:
            return True
        if keeper in self._waiting:
            return False
        if not self._waiting and self._fits(keeper, size):
            self._give(keeper, size)
            return True
        self._waiting[keeper] = size
        self._grant()
        if keeper not in self._waiting:
            return True
        if self._check is None:
            self._check = self._loop.call_later(CHECK_S, self._give_up_stuck)
        now_ms = clock_ms()
        if now_ms - self._warned_ms >= WARN_EVERY_MS:
            self._warned_ms = now_ms
            largest = max(self._since_s, key=lambda each: each.kept_bytes)
            self._warn(
                "no room for frames that are kept whole, connections wait",
                kept_bytes=self.total,
                waiting=self.waiting,
                largest_bytes=largest.kept_bytes,
                largest=largest.about,
            )
        return False

    def shrink(self, keeper: _Keeper, size: int) -> None:
        """Record that a frame turned out to be shorter."""
        if keeper.kept_bytes > size:
            self._add(keeper, size - keeper.kept_bytes)
            self._grant()

    def release(self, keeper: _Keeper) -> None:
        """Record that a keeper keeps, and waits for, nothing any more."""
        if keeper.kept_bytes:
            del self._since_s[keeper]
            self._add(keeper, -keeper.kept_bytes)
        elif self._waiting.pop(keeper, None) is None:
            return
        self._grant()

    def _add(self, keeper: _Keeper, more: int) -> None:
        keeper.kept_bytes += more
        self.total += more
        self._by_address[keeper.address] += more
        if not self._by_address[keeper.address]:
            del self._by_address[keeper.address]

    def _give(self, keeper: _Keeper, size: int) -> None:
        self._since_s[keeper] = self._loop.time()
        self._add(keeper, size)

    def _has_share(self, keeper: _Keeper, size: int) -> bool:
        kept = self._by_address[keeper.address]
        return not kept or kept + size <= MOST_OF_ADDRESS_BYTES

    def _fits(self, keeper: _Keeper, size: int) -> bool:
        has_room = not self.total or self.total + size <= MOST_BYTES
        return has_room and self._has_share(keeper, size)

    def _grant(self) -> None:
        """Give room to those that wait, but for those whose address has its share already."""
        for keeper, size in tuple(self._waiting.items()):
            if not self._has_share(keeper, size):
                continue
            if not self._fits(keeper, size):
                return
            del self._waiting[keeper]
            self._give(keeper, size)
            self._loop.call_soon(keeper.run)

    def _give_up_stuck(self) -> None:
        """Close whose frame has been kept for long, the largest first, as long as others wait."""
        self._check = None
        before_s = self._loop.time() - PATIENCE_S
        overdue = [each for each, since_s in self._since_s.items() if since_s <= before_s]
        overdue = [each for each in overdue if each.is_stuck]
        overdue.sort(key=lambda each: each.kept_bytes, reverse=True)
        for _ in range(MOST_AT_ONCE):
            addresses = {each.address for each in self._waiting}
            is_full = any(self._has_share(each, size) for each, size in self._waiting.items())
            in_the_way = (each for each in overdue if is_full or each.address in addresses)
            keeper = next(in_the_way, None)
            if keeper is None:
                break
            overdue.remove(keeper)
            keeper.give_up()
        if self._waiting:
            self._check = self._loop.call_later(CHECK_S, self._give_up_stuck)
