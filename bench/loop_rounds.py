"""Measures for how long a piece of work keeps the event loop from all else."""

import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench.report import Row, Verdict
from metrics.clock import MS_PER_SECOND
from proxy.garbage import spare_full_collections

FIGURE = "stalls"
TARGET_MS = 10.0
STALL_SUFFIX = ": longest round of the event loop"


@dataclass(frozen=True, slots=True)
class Stall:
    """The longest round of the event loop, in milliseconds.

    Attributes:
        wall_ms: how long it took.
        cpu_ms: the longest computing time of a round.

    """

    wall_ms: float
    cpu_ms: float


@contextmanager
def only_the_proxys_garbage() -> Iterator[None]:
    """Collect garbage as a proxy does, without a look at the bench's own modules."""
    thresholds, callbacks = gc.get_threshold(), gc.callbacks.copy()
    spare_full_collections()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        gc.callbacks[:] = callbacks


async def watch(work: Awaitable[object]) -> Stall:
    """Return the longest round of the loop while the work is done."""
    longest_s = longest_cpu_s = 0.0

    async def go_round() -> None:
        nonlocal longest_s, longest_cpu_s
        before_s, before_cpu_s = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(0)
            now_s, now_cpu_s = time.perf_counter(), time.thread_time()
            longest_s = max(longest_s, now_s - before_s)
            longest_cpu_s = max(longest_cpu_s, now_cpu_s - before_cpu_s)
            before_s, before_cpu_s = now_s, now_cpu_s

    task = asyncio.create_task(go_round())
    await asyncio.sleep(0)
    await work
    await asyncio.sleep(0)
    task.cancel()
    return Stall(longest_s * MS_PER_SECOND, longest_cpu_s * MS_PER_SECOND)


def stall_row(what: str, stalls: Sequence[Stall]) -> Row:
    """Give the row of the same work done several times, by its median."""
    wall_ms = statistics.median(stall.wall_ms for stall in stalls)
    cpu_ms = statistics.median(stall.cpu_ms for stall in stalls)
    return Row(
        FIGURE,
        f"{what}{STALL_SUFFIX}",
        f"at most {TARGET_MS:.0f} ms",
        f"{wall_ms:.1f} ms, computing {cpu_ms:.1f} ms",
        Verdict.of(wall_ms <= TARGET_MS),
        {"wall_ms": [stall.wall_ms for stall in stalls], "cpu_ms": [s.cpu_ms for s in stalls]},
    )
