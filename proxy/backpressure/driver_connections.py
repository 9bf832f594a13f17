"""Which connections of a query's client are those of the present run's driver.

What is advertised to a driver binds the next batch of its run. So a connection has to be known for
the driver's: an executor, or the driver of another run, gets the real log ends.
"""

import math
from collections import deque
from dataclasses import dataclass, field

RESUME_WAIT_MS = 6_000.0
"""How long after a restart an answer waits for a known run: listeners try again within 5 s."""

LIFE_WAIT_MS = 3_000.0
"""The longest time between two signs of life of a run: listeners send one each second."""

MISSED_ANSWERS = 3
"""A partition that a driver did not look up in so many answers is read no more."""

MAX_INSTANCES = 8
"""Of one query: it has one for each of its sources."""

MAX_STEP, MAX_BACK = 1000, 8
"""By how much a correlation id may be above the last, as a client that connects again and again
sends a request each time; and by how much below: several brokers are asked at the same time."""

MIN_KNOWN = 16
"""Lower ones mean nothing: Spark's admin client looks up with request 6, 10, 14 and so on."""


@dataclass(slots=True)
class ClientInstances:
    """The Kafka client instances with which a query's driver looks up offsets.

    A client counts its requests from 0 over all its connections (NetworkClient.nextCorrelationId of
    Kafka's Java client), and each carries its number as the correlation id. So a request on a new
    connection whose number goes on a little behind the last one is of the same instance: a driver
    that connects again after an outage, not another one that was just started.
    """

    latest: list[int] = field(default_factory=list)
    """The highest correlation id of each."""

    def record(self, correlation_id: int) -> None:
        """Record the number of a request that is the driver's for certain."""
        for index, latest in enumerate(self.latest):
            if _is_near(latest, correlation_id):
                self.latest[index] = max(latest, correlation_id)
                return
        self.latest = [*self.latest[1 - MAX_INSTANCES :], correlation_id]

    def has(self, correlation_id: int) -> bool:
        """Return whether a request with that number, on a new connection, is of one of them."""
        is_near = (_is_near(latest, correlation_id) for latest in self.latest)
        return correlation_id >= MIN_KNOWN and any(is_near)


def _is_near(latest: int, correlation_id: int) -> bool:
    return -MAX_BACK <= correlation_id - latest <= MAX_STEP


@dataclass(slots=True, eq=False)
class LookupConnection:
    """What is known of one connection of the client."""

    opened_ms: float
    """Monotonic; so are all times here."""
    is_executor: bool = False
    """Whether it fetches."""
    first_id: int | None = None
    """The correlation id of its first look-up, 0 if that was of log starts; None before it."""
    waits_since_ms: float | None = None
    """Since when an answer has waited for a report; None: none waits."""
    wait_failed: bool = False
    """Whether one waited in vain, and no report came since."""
    answers_ms: deque[float] = field(
        default_factory=lambda: deque([-math.inf] * MISSED_ANSWERS, MISSED_ANSWERS)
    )
    """When the last look-ups of log ends were answered; long ago where there were fewer."""


@dataclass(slots=True, eq=False)
class DriverConnections:
    """The connections of one query's client, and which of them are its present driver's.

    A connection is the driver's when it does not fetch, and

    - it was open when the run gave a sign of life, a report or a heartbeat; or
    - it was opened while such a one was open; or
    - its requests began where those of such a one had ended, see ClientInstances; or
    - the run was resumed from an earlier process and has given a sign of life since, as long as no
      connection is proved to be the driver's otherwise.

    Where something never was, its time is long ago.
    """

    _connections: dict[LookupConnection, bool] = field(default_factory=dict)
    """With whether each is the driver's whatever signs of life there are."""
    instances: ClientInstances = field(default_factory=ClientInstances)
    _trusts_all: bool = False
    alive_ms: float = -math.inf
    """When the run gave its latest sign of life: the driver saw an event, or a heartbeat came."""
    event_ms: float = -math.inf
    """When the driver saw the latest event of this run that was reported."""
    resumed_ms: float = -math.inf
    """When the run of an earlier process was resumed."""
    is_resumed: bool = False
    """Whether the present run is the one that was resumed, as it or its driver has shown."""
    resumed_alive_ms: float = -math.inf
    """When the first sign of life came of the run that was resumed."""

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def awaits_run(self) -> bool:
        """Whether a run was resumed, and neither it nor its driver has shown up since."""
        return self.resumed_ms > -math.inf and not self.is_resumed

    def resume(self, correlation_ids: list[int], now_ms: float) -> None:
        """Resume a run of an earlier process, which ended with all its connections."""
        self.instances.latest = correlation_ids[-MAX_INSTANCES:]
        self.resumed_ms = now_ms

    def begin_run(self) -> None:
        """Forget the run before: only what was proved of connections stays."""
        self.instances.latest.clear()
        self.alive_ms = self.event_ms = self.resumed_ms = -math.inf
        self.is_resumed = self._trusts_all = False

    def record_report(self, event_ms: float, now_ms: float) -> None:
        """Record a report on an event of the run, which the driver saw at `event_ms`."""
        self.event_ms = max(self.event_ms, event_ms)
        self.record_alive(event_ms, now_ms)
        for connection in self._connections:
            connection.wait_failed = False

    def record_alive(self, at_ms: float, now_ms: float) -> None:
        """Record a sign of life of the run, which it gave at `at_ms`."""
        self.alive_ms = max(self.alive_ms, at_ms)
        if self.awaits_run:
            self.is_resumed = self._trusts_all = True
        if self.is_resumed and self.resumed_alive_ms < self.resumed_ms:
            self.resumed_alive_ms = now_ms
        if self._trusts_all:
            self._trusts_all = not any(map(self._is_proved, self._connections))

    def add(self, connection: LookupConnection) -> None:
        """Add a connection that was opened."""
        self._connections[connection] = any(map(self._is_proved, self._connections))

    def remove(self, connection: LookupConnection) -> None:
        """Remove a connection."""
        self._connections.pop(connection, None)

    def record_lookup(self, connection: LookupConnection, correlation_id: int) -> None:
        """Record a look-up of log ends on a connection that does not fetch, before its answer."""
        if connection.first_id is None:
            connection.first_id = correlation_id
        # By its first: those of a client that has just begun come near any other's after a while.
        if not self.is_driver(connection) and self.instances.has(connection.first_id):
            self._connections[connection] = True
            self.is_resumed |= self.awaits_run  # the driver of the run that was resumed is back
        if self.is_driver(connection):
            self.instances.record(correlation_id)

    def is_driver(self, connection: LookupConnection) -> bool:
        """Return whether a connection is the present driver's, for certain."""
        return not connection.is_executor and (self._trusts_all or self._is_proved(connection))

    def proved_by_ms(self, connection: LookupConnection) -> float:
        """Return until when a connection may yet be found to be the driver's; long ago: never."""
        if self.awaits_run:
            return self.resumed_ms + RESUME_WAIT_MS
        if self.alive_ms > connection.opened_ms - LIFE_WAIT_MS:
            return connection.opened_ms + LIFE_WAIT_MS
        return -math.inf

    def _is_proved(self, connection: LookupConnection) -> bool:
        is_proved = self._connections.get(connection, False) or connection.opened_ms < self.alive_ms
        return is_proved and not connection.is_executor
