"""Which queries there are, what they read and write, and how long a record takes them."""

from proxy.demo.jobs import Job, Source

SOURCE = Source("a", partitions=2, rate=300.0)

# The second job is the faster one but while it is slow, so that it can catch up.
FIRST_ROW_MS, SECOND_ROW_MS, SLOW_ROW_MS = 1.0, 0.5, 15.0

FIRST = Job("first", SOURCE.topic, "b", FIRST_ROW_MS, FIRST_ROW_MS)
SECOND = Job("second", "b", "c", SECOND_ROW_MS, SLOW_ROW_MS)
FREE_FIRST = Job("free-first", SOURCE.topic, "free-b", FIRST_ROW_MS, FIRST_ROW_MS)
FREE_SECOND = Job("free-second", "free-b", "free-c", SECOND_ROW_MS, SLOW_ROW_MS)

JOBS = (FIRST, SECOND, FREE_FIRST, FREE_SECOND)
LAST_JOBS = (SECOND, FREE_SECOND)
