"""Which queries there are: they do the same, and one of them has an adaptive rule."""

from proxy.demo.jobs import Job, Source

SOURCE = Source("events", partitions=3, rate=1000.0)
ROW_MS, SLOW_ROW_MS = 1.0, 4.0

FREE, PRESSED = (
    Job(name, SOURCE.topic, f"{name}-processed", ROW_MS, SLOW_ROW_MS)
    for name in ("without", "with")
)
"""The second has an adaptive rule in the example."""

JOBS = (FREE, PRESSED)
