"""A relay that has no time for costly steps until the test says so."""

import asyncio

from proxy.relay.paced_steps import MOST_S, PacedStepScheduler


class Rounds:
    """In the place of the loop: the present round lasts until the test ends it."""

    def __init__(self):
        self._loop, self._next, self._is_held = asyncio.get_running_loop(), None, True

    def call_soon(self, next_round):
        if not self._is_held:
            return self._loop.call_soon(next_round)
        self._next = next_round
        return next_round

    def end(self):
        """End the round; from now on they are those of the loop."""
        self._is_held = False
        self._loop.call_soon(self._next)


class BusyRound:
    """A round whose time for some kind of steps is used up as soon as `begin` is called."""

    def __init__(self, lab, kind="paced_steps"):
        self.now_s = 0.0
        self._rounds = Rounds()
        self.steps = PacedStepScheduler(self._rounds, lambda: self.now_s)
        setattr(lab.services, kind, self.steps)

    def begin(self):
        def take():
            self.now_s += MOST_S

        self.steps.add(take)

    def end(self):
        """Run what waits, and begin the next round."""
        self.steps.run_all()
        self._rounds.end()
