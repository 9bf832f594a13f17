"""Which queries there are, what they read and write, and how long a record takes them."""

from dataclasses import dataclass


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


PARTITIONS = 2
"""Of each topic; each is a task of its own."""
TRIGGER_S = 2.0
RATE = 300.0
"""Records per second that are written to the first topic."""
SOURCE_TOPIC = "a"

# The second job is the faster one but while it is slow, so that it can catch up.
FIRST_ROW_MS, SECOND_ROW_MS, SLOW_ROW_MS = 1.0, 0.5, 15.0

FIRST = Job("first", SOURCE_TOPIC, "b", FIRST_ROW_MS, FIRST_ROW_MS)
SECOND = Job("second", "b", "c", SECOND_ROW_MS, SLOW_ROW_MS)
FREE_FIRST = Job("free-first", SOURCE_TOPIC, "free-b", FIRST_ROW_MS, FIRST_ROW_MS)
FREE_SECOND = Job("free-second", "free-b", "free-c", SECOND_ROW_MS, SLOW_ROW_MS)

JOBS = (FIRST, SECOND, FREE_FIRST, FREE_SECOND)
LAST_JOBS = (SECOND, FREE_SECOND)
