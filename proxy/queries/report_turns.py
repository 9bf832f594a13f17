"""Applies reports one after the other, in slices between which the event loop does other work.

A report of thousands of partitions takes some 0.1 s. A look-up sees all of it or nothing: it waits
while one is applied, and where it cannot wait any longer the rest is applied at once.
"""

import asyncio
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

SLICE_MS = 2.0
"""For how long one slice keeps the event loop; its last step may end later."""

T = TypeVar("T")


class ReportTurns:
    """The reports of all queries take turns; each is a generator as of ReportHandler.accepting."""

    def __init__(self, clock_ms: Callable[[], float]) -> None:
        self._clock_ms = clock_ms
        self._turn = asyncio.Lock()
        self._slices: Iterator[None] = iter(())
        self.is_applying = False
        """Whether a report was applied in part."""

    async def take(self, steps: Generator[bool, None, T]) -> T:
        """Take all steps and return what they return; raise what they raise.

        A caller that is cancelled leaves nothing applied in part.
        """
        result: list[T] = []
        async with self._turn:
            self._slices = self._slicing(steps, result)
            try:
                for _ in self._slices:
                    await asyncio.sleep(0)
            finally:
                self.finish()
        return result[0]

    def finish(self) -> None:
        """Apply the rest of a report that was applied in part."""
        if self.is_applying:
            for _ in self._slices:
                pass

    def _slicing(self, steps: Generator[bool, None, T], result: list[T]) -> Iterator[None]:
        """Take the steps, add what they return to `result`; yield after each slice."""
        end_ms = self._clock_ms() + SLICE_MS
        try:
            while True:
                has_changed = next(steps)
                if self._clock_ms() >= end_ms:
                    self.is_applying = has_changed
                    yield
                    self.is_applying = False
                    end_ms = self._clock_ms() + SLICE_MS
        except StopIteration as done:
            result.append(done.value)
