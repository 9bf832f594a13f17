"""Applies reports one after the other, a long one in slices between which others may look."""

import asyncio
from collections.abc import Generator, Iterator
from typing import TypeVar

from proxy.slices import TimeSlicer

T = TypeVar("T")


class ReportScheduler:
    """The reports of all queries take turns; each is a generator as of QueryRegistry.accepting."""

    def __init__(self, slices: TimeSlicer) -> None:
        self.slices = slices
        self.turn = asyncio.Lock()
        """To be held, without a wait, by whoever has to come between two reports."""
        self._steps: Iterator[None] | None = None
        """Of the report whose turn it is."""
        self.is_applying = False
        """Whether a report was applied in part."""

    async def take(self, steps: Generator[bool, None, T], *, is_short: bool = False) -> T:
        """Take all steps and return what they return; raise what they raise.

        A caller that is cancelled leaves nothing applied in part. Where they are few, and it is
        nobody's turn, they are taken at once.
        """
        if is_short and self._steps is None:
            try:
                while True:
                    next(steps)
            except StopIteration as done:
                answer: T = done.value
                return answer
        result: list[T] = []
        async with self.turn:
            self._steps = self._marking(steps, result)
            try:
                await self.slices.collect(self._steps)
            finally:
                self.finish()
                self._steps = None
        return result[0]

    def finish(self) -> None:
        """Apply the rest of a report that was applied in part."""
        if self.is_applying and self._steps is not None:
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
