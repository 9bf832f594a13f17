"""Does costly steps a few at a time, so that others need not wait for them.

Those are what connections ask for that come or go, thousands at once, with their TLS handshakes,
and responses that are read or rewritten here, of which one client may ask for thousands.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from time import perf_counter
from typing import TypeVar

MOST_S, LEAST_S = 0.002, 0.0002
"""For how long a round of the event loop goes on with such steps; the last one may end later. Less
of it while rounds take longer than ROUND_S: what follows from the steps is in them, too."""

ROUND_S = 0.004

MOST_CHANGE = 2.0
"""From one round to the next, times the time for steps."""

SHARE = 0.1
"""Of a CPU, for the logins of one address."""

BURST_MS = 200.0
"""So much CPU time may be taken at once: thousands of ordinary logins, as after a restart."""

LONGEST_TURN_S = 0.5
"""For how long an address may wait for its turn before no further one is to wait: a TLS handshake
takes two or three, and where its time is over before the last one nobody is let in."""

MAX_ADDRESSES = 10_000
"""With logins that are not paid for yet; further ones are not bounded."""

Step = Callable[[], None]
T = TypeVar("T")


@dataclass(eq=False)
class PacedStepScheduler:
    """Runs costly steps of all connections in their order, and accounts for their time.

    Addresses take turns: who asks for much delays mostly itself.
    At once, as long as this round of the loop has time for it; else in one of the next rounds.
    """

    _loop: asyncio.AbstractEventLoop
    _clock_s: Callable[[], float] = perf_counter
    _waiting: OrderedDict[str, tuple[float, deque[Step]]] = field(default_factory=OrderedDict)
    """By addresses, with since when each waits for a turn; the first of them has the next."""
    _spent_s: float = 0.0
    _has_turn: bool = False
    """Whether a step runs that has not gone on with anything."""
    _budget_s: float = MOST_S
    _round_began_s: float = 0.0
    _round: asyncio.Handle | None = None
    """Ends the present round; None when nothing was done in it."""

    def __len__(self) -> int:
        return sum(len(steps) for _, steps in self._waiting.values())

    @property
    def has_time(self) -> bool:
        """Whether a step would run at once."""
        return not self._waiting and self._spent_s < self._budget_s

    def is_crowded(self, address: str) -> bool:
        """Return whether others have waited for their turn so long that this one is not to wait."""
        if not self._waiting or address in self._waiting:
            return False
        since_s, _ = next(iter(self._waiting.values()))
        return self._clock_s() - since_s > LONGEST_TURN_S

    def add(self, step: Step, address: str = "") -> None:
        """Run a step now or soon. It must not raise."""
        if not self.has_time:
            self.queue(step, address)
            return
        self._run(step)
        if self._round is None:
            self._begin_round()

    def queue(self, step: Step, address: str = "") -> None:
        """Run a step in one of the next rounds. It must not raise."""
        if (waiting := self._waiting.get(address)) is not None:
            waiting[1].append(step)
        else:
            self._waiting[address] = self._clock_s(), deque((step,))
        if self._round is None:
            self._begin_round()

    async def turn(self, address: str, operation: Callable[[], T]) -> T:
        """Return what an operation returns, or raise what it raises, now or soon."""
        done: asyncio.Future[T] | None = asyncio.get_running_loop().create_future()

        def step() -> None:
            if done and not done.cancelled():
                try:
                    done.set_result(operation())
                except Exception as error:  # it belongs to who waits
                    done.set_exception(error)

        self.add(step, address)
        try:
            assert done is not None
            return await done
        finally:
            done = None  # an error refers to it by its traceback: that would be a circle

    @property
    def may_go_on(self) -> bool:
        """Whether `go_on` may be called: this round has time for it, or it has waited its turn."""
        return self._has_turn or self.has_time

    def go_on(self, steps: Iterator[None]) -> bool:
        """Take the next of several steps, which may raise; return whether there was one.

        Of those that wait in the queue each may take one when it runs.
        """
        self._has_turn = False
        begin_s, spent_s = self._clock_s(), self._spent_s
        try:
            return next(steps, True) is None
        finally:
            self._spent_s = spent_s + self._clock_s() - begin_s
            if self._round is None:
                self._begin_round()

    def run_all(self) -> None:
        """Run what waits now, and what that adds, however long it takes; not what that queues."""
        waiting, self._waiting = self._waiting, OrderedDict()
        self._budget_s = inf
        for step in chain.from_iterable(steps for _, steps in waiting.values()):
            self._run(step)
        self._budget_s = MOST_S

    def _next_round(self) -> None:
        took_s = self._clock_s() - self._round_began_s
        change = ROUND_S / took_s if took_s > 0 else MOST_CHANGE
        change = min(max(change, 1 / MOST_CHANGE), MOST_CHANGE)
        self._budget_s = min(max(self._budget_s * change, LEAST_S), MOST_S)
        self._spent_s, self._round = 0.0, None
        if not self._waiting:
            return
        self._begin_round()
        while self._waiting and self._spent_s < self._budget_s:
            address, (_, steps) = self._waiting.popitem(last=False)
            step = steps.popleft()
            if steps:  # behind all others, before the step adds one
                self._waiting[address] = self._clock_s(), steps
            self._run(step)

    def _begin_round(self) -> None:
        self._round_began_s = self._clock_s()
        self._round = self._loop.call_soon(self._next_round)

    def _run(self, step: Step) -> None:
        begin_s, spent_s = self._clock_s(), self._spent_s
        self._has_turn = True
        step()
        self._has_turn = False
        self._spent_s = spent_s + self._clock_s() - begin_s  # with what it has gone on with


@dataclass(slots=True, eq=False)
class LoginCpuLimit:
    """Bounds the time that it takes to read the logins of one address: nobody knows who sends them.

    An ordinary login takes a twentieth of a millisecond, the longest token a few. Without a bound,
    who logs in again and again with such tokens has all the CPU time that there is.
    """

    _paid_ms: dict[str, float] = field(default_factory=dict)
    """When an address has waited for all that it took."""

    def wait_ms(self, address: str, now_ms: float) -> float:
        """Return for how long the next login of an address is to wait."""
        return max(self._paid_ms.get(address, now_ms) - now_ms - BURST_MS / SHARE, 0.0)

    def took(self, address: str, cpu_ms: float, now_ms: float) -> None:
        """Record what it took to read a login."""
        if address in self._paid_ms or len(self._paid_ms) < MAX_ADDRESSES:
            from_ms = max(self._paid_ms.get(address, now_ms), now_ms)
            self._paid_ms[address] = from_ms + cpu_ms / SHARE

    def sweep(self, now_ms: float) -> None:
        """Forget the addresses that have waited for all that they took."""
        self._paid_ms = {each: paid for each, paid in self._paid_ms.items() if paid > now_ms}
