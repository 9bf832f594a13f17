"""A query of the demos that are about time: what it reads and writes, and how long that takes."""

from dataclasses import dataclass

TRIGGER_S = 2.0
"""Between two batches of a query, if they take no longer."""


@dataclass(frozen=True, slots=True)
class Job:
    """One query; topics, and the work on each record."""

    name: str
    """Query name and client id."""
    consumes: str
    produces: str
    row_ms: float
    slow_row_ms: float
    """While processing is slow."""


@dataclass(frozen=True, slots=True)
class Source:
    """The topic that is fed."""

    topic: str
    partitions: int
    """Of this topic and of all that come of it; each is a task of its own."""
    rate: float
    """Records per second."""
