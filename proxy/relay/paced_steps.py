"""Lets connections come and go a few at a time: thousands at once do not keep others waiting."""

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter

MOST_S = 0.002
"""For how long each round of the event loop goes on with such steps; the last one may end later.
What follows from them, such as the answers to first requests, takes about as long again."""

Step = Callable[[], None]


class PacedSteps:
    """Runs the costly steps of connections that come or go, in their order.

    At once, as long as this round of the loop has time for it; else in one of the next rounds.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock_s: Callable[[], float] = perf_counter
    ) -> None:
        self._loop = loop
        self._clock_s = clock_s
        self._waiting: deque[Step] = deque()
        self._spent_s = 0.0
        self._round: asyncio.Handle | None = None
        """Ends the present round; None when nothing was done in it."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, step: Step) -> None:
        """Run a step now or soon. It must not raise."""
        if self._waiting or self._spent_s >= MOST_S:
            self._waiting.append(step)
        else:
            self._run(step)
        if self._round is None:
            self._round = self._loop.call_soon(self._next_round)

    def run_all(self) -> None:
        """Run what waits now, however long it takes."""
        while self._waiting:
            self._waiting.popleft()()

    def _next_round(self) -> None:
        self._spent_s, self._round = 0.0, None
        if not self._waiting:
            return
        self._round = self._loop.call_soon(self._next_round)
        while self._waiting and self._spent_s < MOST_S:
            self._run(self._waiting.popleft())

    def _run(self, step: Step) -> None:
        begin_s = self._clock_s()
        step()
        self._spent_s += self._clock_s() - begin_s
