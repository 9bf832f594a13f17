"""What the queries of the demos that are about time read and write, and how long that takes."""

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
class Plan:
    """A topic that is fed, and the queries that work on it."""

    topic: str
    partitions: int
    """Of this topic and of all that come of it; each is a task of its own."""
    rate: float
    """Records per second."""
    jobs: tuple[Job, ...]
    last_jobs: tuple[Job, ...]
    """Those whose output is counted in the end."""


# Both do the same; the second has an adaptive rule in examples/demo-backpressure.yaml.
FREE, PRESSED = (
    Job(name, "events", f"{name}-processed", row_ms=1.0, slow_row_ms=4.0)
    for name in ("without", "with")
)
BACKPRESSURE = Plan("events", 3, 1000.0, (FREE, PRESSED), (FREE, PRESSED))

# A pipeline in examples/demo-pipeline.yaml, and two queries that do the same and are none. The
# second one is the faster one but while it is slow, so that it can catch up.
FIRST, SECOND = Job("first", "a", "b", 1.0, 1.0), Job("second", "b", "c", 0.5, 15.0)
FREE_FIRST = Job("free-first", "a", "free-b", 1.0, 1.0)
FREE_SECOND = Job("free-second", "free-b", "free-c", 0.5, 15.0)
PIPELINE = Plan("a", 2, 300.0, (FIRST, SECOND, FREE_FIRST, FREE_SECOND), (SECOND, FREE_SECOND))

PLANS = {"backpressure": BACKPRESSURE, "pipeline": PIPELINE}

DAY_TOPIC = "events"
DAY_GO_FILE = "go"
"""In the working folder: the day of the demo of budgets begins."""
