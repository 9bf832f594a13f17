"""Recognise a Kafka client on a new connection by the correlation ids of its requests.

A client counts its requests from 0 over all its connections (NetworkClient.nextCorrelationId of
Kafka's Java client), and each carries its number as the correlation id. So a request on a new
connection whose number goes on a little behind the last one is of the same client instance: a
driver that connects again after an outage, not another one that has just been started.
"""

from collections.abc import Iterable

MAX_INSTANCES = 8
"""Of one query: it has one for each of its sources."""

MAX_STEP = 1000
"""By how much the numbers may have gone on meanwhile. While the broker is away and the proxy is
there, a client sends a request on each connection that it makes, one in a second or so."""

MAX_BACK = 8
"""By how much a number may be below the last one: several brokers are asked at the same time."""

MIN_KNOWN = 16
"""Lower numbers say nothing: the first look-up of Spark's admin client is its request number 6,
each further one 4 more."""


class ClientInstances:
    """The client instances that a query's driver looks up offsets with."""

    __slots__ = ("_latest",)

    def __init__(self) -> None:
        self._latest: list[int] = []

    def asked(self, correlation_id: int) -> None:
        """Record the number of a request that is the driver's for certain."""
        for index, latest in enumerate(self._latest):
            if _is_near(latest, correlation_id):
                self._latest[index] = max(latest, correlation_id)
                return
        self._latest = [*self._latest[1 - MAX_INSTANCES :], correlation_id]

    def has(self, correlation_id: int) -> bool:
        """Return whether a request with that number, on a new connection, is of one of them."""
        return correlation_id >= MIN_KNOWN and any(
            _is_near(latest, correlation_id) for latest in self._latest
        )

    def forget(self) -> None:
        """Forget all: another driver has begun."""
        self._latest.clear()

    def kept(self) -> list[int]:
        """Return what `restore` needs, in a later process."""
        return list(self._latest)

    def restore(self, latest: Iterable[int]) -> None:
        """Go on from there."""
        self._latest = list(latest)[-MAX_INSTANCES:]


def _is_near(latest: int, correlation_id: int) -> bool:
    return -MAX_BACK <= correlation_id - latest <= MAX_STEP
