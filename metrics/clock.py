"""The monotonic clock: who needs the time takes it as an argument, or this function."""

import time

MS_PER_SECOND = 1000.0


def clock_ms() -> float:
    """Return the monotonic time in milliseconds."""
    return time.monotonic() * MS_PER_SECOND


def cpu_ms() -> float:
    """Return the CPU time of this thread in milliseconds, for what something has cost."""
    return time.thread_time() * MS_PER_SECOND


def ms_to_s(ms: float | None) -> float | None:
    """Return milliseconds in seconds; None for None."""
    return ms / MS_PER_SECOND if ms is not None else None
