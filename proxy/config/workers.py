"""How many processes share the work."""

import os
from typing import Final, Literal

MAX_WORKERS: Final = 256

AUTO: Final = "auto"
"""Stands for a worker for each core that this process may use."""


def count_workers(workers: int | Literal["auto"]) -> int:
    """Return how many workers that are on this machine."""
    if workers == AUTO:
        return min(len(os.sched_getaffinity(0)), MAX_WORKERS)
    return workers
