"""Know which connections are those of the present run's driver.

What is told to a driver binds the next batch of its run, so a connection has to be known for the
driver's: an executor or the driver of another run must hear the truth.
"""

import math
from typing import Protocol

from .client_instances import ClientInstances

RESUME_WAIT_MS = 6_000.0
"""How long after the start of this process an answer waits for a sign of life of a run that an
earlier process knew: an old listener tries again after 5 s at the latest."""

LIFE_WAIT_MS = 3_000.0
"""The longest time between two signs of life of a run, with some room: listeners greet every 2 s
when there is nothing else to say."""


class LookupConnection(Protocol):
    """One connection of the client: planner.OffsetLookups."""

    @property
    def opened_ms(self) -> float:
        """When it was opened, monotonic."""

    @property
    def is_executor(self) -> bool:
        """Whether it fetches."""

    @property
    def oldest_answer_ms(self) -> float:
        """Since when a partition that is still read has been asked for on this connection."""

    def reported(self) -> None:
        """Take note that reports come."""


class DriverConnections:
    """The connections of one query's client, and which of them are its present driver's.

    A connection is the driver's when it does not fetch, and

    - it was open when the run gave a sign of life, a report or a greeting; or
    - it was opened while such a one was open; or
    - its requests go on where those of such a one ended, see ClientInstances; or
    - the run was taken up from an earlier process and has given a sign of life since, as long as no
      connection has earned it otherwise.
    """

    __slots__ = (
        *("_connections", "_instances", "_trusts_all", "event_ms"),
        *("goes_on", "heard_ms", "is_missed", "life_ms", "resumed_ms"),
    )

    def __init__(self) -> None:
        self._connections: dict[LookupConnection, bool] = {}
        """With whether each is trusted whatever signs of life there are."""
        self._instances = ClientInstances()
        self._trusts_all = False
        self.life_ms = -math.inf
        """When the run gave its latest sign of life: when the driver saw an event, or greeted."""
        self.event_ms = -math.inf
        """When the driver saw the latest event of this run that was reported."""
        self.resumed_ms = -math.inf
        """When the run of an earlier process was taken up; long ago if there was none."""
        self.is_missed = False
        """Whether a run was taken up, and neither it nor its driver was heard of since."""
        self.goes_on = False
        """Whether the present run is the one that was taken up."""
        self.heard_ms = -math.inf
        """When the first sign of life came of the run that was taken up."""

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._connections)

    def resume(self, instances: list[int], now_ms: float) -> None:
        """Take up a run from an earlier process, which ended with all its connections."""
        self._instances.restore(instances)
        self.resumed_ms = now_ms
        self.is_missed = True

    def begin_run(self) -> None:
        """Distrust all connections until the run gives a sign of life, but those always trusted."""
        self._instances.forget()
        self.life_ms = self.event_ms = self.resumed_ms = -math.inf
        self.is_missed = self.goes_on = self._trusts_all = False

    def reported(self, event_ms: float, now_ms: float) -> None:
        """Record a report on an event of the run, which the driver saw at `event_ms`."""
        self.event_ms = max(self.event_ms, event_ms)
        self._lives(event_ms, now_ms)
        for lookups in self._connections:
            lookups.reported()

    def greeted(self, now_ms: float) -> None:
        """Record a greeting of the run: it lives, and nothing new has happened."""
        self._lives(now_ms, now_ms)

    def _lives(self, at_ms: float, now_ms: float) -> None:
        self.life_ms = max(self.life_ms, at_ms)
        if self.is_missed:
            self.is_missed = False
            self.goes_on = self._trusts_all = True
        if self.goes_on and self.heard_ms < self.resumed_ms:
            self.heard_ms = now_ms
        if self._trusts_all:
            self._trusts_all = not any(map(self._has_earned_it, self._connections))

    def join(self, lookups: LookupConnection) -> None:
        """Take in a connection."""
        self._connections[lookups] = any(map(self._has_earned_it, self._connections))

    def leave(self, lookups: LookupConnection) -> None:
        """Let go of a connection."""
        self._connections.pop(lookups, None)

    def asks(self, lookups: LookupConnection, correlation_id: int) -> None:
        """Record a look-up of the ends of logs on a connection, before it is answered."""
        if lookups.is_executor:
            return
        if not self.has(lookups) and self._instances.has(correlation_id):
            self._connections[lookups] = True
            if self.is_missed:  # the driver of the run that was taken up is back
                self.is_missed = False
                self.goes_on = True
        if self.has(lookups):
            self._instances.asked(correlation_id)

    def has(self, lookups: LookupConnection) -> bool:
        """Return whether a connection is the present driver's, for certain."""
        return not lookups.is_executor and (self._trusts_all or self._has_earned_it(lookups))

    def may_come_ms(self, lookups: LookupConnection) -> float:
        """Return until when a connection that is not trusted may yet be found to be the driver's.

        Long ago where no sign of life is to be expected.
        """
        if self.is_missed:
            return self.resumed_ms + RESUME_WAIT_MS
        if self.life_ms > lookups.opened_ms - LIFE_WAIT_MS:
            return lookups.opened_ms + LIFE_WAIT_MS
        return -math.inf

    def instances(self) -> list[int]:
        """Return what `resume` needs in a later process."""
        return self._instances.kept()

    def _has_earned_it(self, lookups: LookupConnection) -> bool:
        if lookups.is_executor:
            return False
        return self._connections.get(lookups, False) or lookups.opened_ms < self.life_ms
