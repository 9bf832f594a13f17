"""Applies reports one after the other, in slices between which the event loop does other work.

A report of thousands of partitions takes some 0.1 s. A look-up sees all of it or nothing: it waits
while one is applied, and where it cannot wait any longer the rest is applied at once.
"""

import asyncio
from collections.abc import Generator, Iterator
from typing import TypeVar

from proxy.slices import Slices

T = TypeVar("T")


class ReportTurns:
    """The reports of all queries take turns; each is a generator as of ReportHandler.accepting."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self.turn = asyncio.Lock()
        """To be held by whoever has to come between two reports."""
        self._steps: Iterator[None] = iter(())
        self.is_applying = False
        """Whether a report was applied in part."""

    async def take(self, steps: Generator[bool, None, T], *, is_short: bool = False) -> T:
        """Take all steps and return what they return; raise what they raise.

        A caller that is cancelled leaves nothing applied in part. Where they are few, and it is
        nobody's turn, they are taken at once.
        """
        result: list[T] = []
        marked = self._marking(steps, result)
        if is_short and not self.turn.locked():
            for _ in marked:
                pass
            return result[0]
        async with self.turn:
            self._steps = marked
            try:
                await self._slices.collect(marked)
            finally:
                self.finish()
        return result[0]

    def finish(self) -> None:
        """Apply the rest of a report that was applied in part."""
        if self.is_applying:
            for _ in self._steps:
                pass

    def _marking(self, steps: Generator[bool, None, T], result: list[T]) -> Iterator[None]:
        """Take the steps, record after each whether it changed anything, and what they return."""
        try:
            while True:
                self.is_applying = next(steps)
                yield
                self.is_applying = False
        except StopIteration as done:
            result.append(done.value)
