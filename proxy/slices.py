"""Takes long walks a slice at a time, so that the event loop serves clients in between."""

import asyncio
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import TypeVar

SLICE_S = 0.002
"""For how long one slice keeps the event loop; its last step may end later."""

LONG_ANSWERS = 4
"""How many are made at a time: each may come to megabytes, and they take no longer in turn."""

T = TypeVar("T")


class TimeSlicer:
    """Takes turns: however many walks are under way, each round of the loop has one slice.

    `slice_s` is for how long a slice goes on taking steps; with 0 it is one step.
    """

    def __init__(self, slice_s: float = SLICE_S) -> None:
        self._slice_s = slice_s
        self._turn = asyncio.Lock()
        self.long_answers = asyncio.Semaphore(LONG_ANSWERS)
        """To be held while a long answer is made."""

    async def collect(self, steps: Iterable[T]) -> list[T]:
        """Return what `steps` yields, each of which should take well under SLICE_S to make.

        The walk may be over things that change meanwhile: it must allow for that between steps.
        """
        collected: list[T] = []
        remaining = iter(steps)
        while True:
            async with self._turn:
                if self.take(remaining, collected):
                    return collected
                await asyncio.sleep(0)

    def take(self, steps: Iterator[T], taken: list[T]) -> bool:
        """Take steps for the time of one slice, without a wait; return whether it was the last."""
        end_s = perf_counter() + self._slice_s
        for step in steps:
            taken.append(step)
            if perf_counter() >= end_s:
                return False
        return True
