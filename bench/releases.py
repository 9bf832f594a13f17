"""Figure: how late 100,000 held responses are released, all of them in one delay queue.

The delay queue and its reaper have the event loop of the proxy, in this process, without
connections. Due times are spread evenly over some seconds, so that tens of thousands of responses
come due in each. A release counts as late by the time at which its own callback runs.
"""

import asyncio
import random
from dataclasses import dataclass

import uvloop
from prometheus_client import CollectorRegistry

from bench.loop_rounds import only_the_proxys_garbage
from bench.processes import BenchError
from bench.rates import quantile
from bench.report import Row, Verdict
from metrics import Instruments
from metrics.clock import MS_PER_SECOND, clock_ms
from proxy.relay.services import Reapers
from proxy.wire.apis import FETCH

FIGURE = "delay queue"
TARGET_MS = 5.0
SHARE = 0.99
FULL_ENTRIES, QUICK_ENTRIES = 100_000, 10_000
FULL_ROUNDS, QUICK_ROUNDS = 5, 1
SPREAD_MS = 2_000.0
# Adding all of them takes less.
FIRST_DUE_MS = 5_000.0
TIMEOUT_S = 30.0
SEED = 1


@dataclass(frozen=True, slots=True)
class Lateness:
    """How late responses of one round were released, in milliseconds."""

    p50_ms: float
    p99_ms: float
    latest_ms: float


def measure(quick: bool) -> list[Row]:
    """Hold the responses, wait until all are released, and give the row."""
    entries, rounds = (QUICK_ENTRIES, QUICK_ROUNDS) if quick else (FULL_ENTRIES, FULL_ROUNDS)
    with only_the_proxys_garbage():
        found = [uvloop.run(_release(entries)) for _ in range(rounds)]
    # A round that other processes disturbed must not hide behind the others.
    worst = max(found, key=lambda lateness: lateness.p99_ms)
    return [
        Row(
            FIGURE,
            f"{entries:,} entries due within {SPREAD_MS / MS_PER_SECOND:g} s, "
            f"worst of {rounds}: released after due, p99",
            f"at most {TARGET_MS:g} ms",
            f"{worst.p99_ms:.1f} ms, p50 {worst.p50_ms:.1f} ms, latest {worst.latest_ms:.1f} ms",
            Verdict.of(worst.p99_ms <= TARGET_MS),
            {
                "p50_ms": [each.p50_ms for each in found],
                "p99_ms": [each.p99_ms for each in found],
                "latest_ms": [each.latest_ms for each in found],
            },
        )
    ]


async def _release(entries: int) -> Lateness:
    reapers = Reapers(
        asyncio.get_running_loop(), Instruments(CollectorRegistry(), max_label_sets=1)
    )
    reaper = reapers.for_api(FETCH)
    late_ms: list[float] = []
    is_done = asyncio.Event()

    def hold(due_ms: float) -> None:
        def release() -> None:
            late_ms.append(clock_ms() - due_ms)
            if len(late_ms) == entries:
                is_done.set()

        reaper.add(due_ms, release)

    after_ms = [SPREAD_MS * number / entries for number in range(entries)]
    random.Random(SEED).shuffle(after_ms)
    start_ms = clock_ms() + FIRST_DUE_MS
    for each_ms in after_ms:
        hold(start_ms + each_ms)
    if clock_ms() > start_ms:
        raise BenchError("adding the entries took too long for this figure")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await is_done.wait()
    except TimeoutError:
        raise BenchError(f"{len(late_ms)} of {entries} entries were released") from None
    finally:
        reapers.close()
    if min(late_ms) < 0:
        raise BenchError("an entry was released before it was due")
    return Lateness(quantile(late_ms, 0.5), quantile(late_ms, SHARE), max(late_ms))
