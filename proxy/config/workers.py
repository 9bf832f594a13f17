"""How many processes share the work."""

import os
from typing import Final, Literal

from proxy.quota.values import BadValueError, shown

MAX_WORKERS: Final = 256

AUTO: Final = "auto"
"""Stands for a worker for each core that this process may use."""


def parse_workers(value: object) -> int | Literal["auto"]:
    """Read how many workers there are to be. Raises BadValueError."""
    fix = f"write a whole number from 1 to {MAX_WORKERS}, or auto"
    if value == AUTO:
        return AUTO
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadValueError(f"{shown(value)} is neither a whole number nor auto", fix)
    if not 1 <= value <= MAX_WORKERS:
        raise BadValueError(f"{shown(value)} is out of range", fix)
    return value


def count_workers(workers: int | Literal["auto"]) -> int:
    """Return how many workers that are on this machine."""
    if workers == AUTO:
        return min(len(os.sched_getaffinity(0)), MAX_WORKERS)
    return workers
