"""A Structured Streaming query, its driver and its executors, on a clock of events."""

import heapq
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import count

from backpressure_parts import (
    CONSUMER,
    INTERVAL_MS,
    VERSION,
    BackpressureWorld,
    answer,
    ask,
    read,
    tell_earliest,
)

from proxy.quota.rules import Rule

RECORD_BYTES = 200
PROCESSING_TIME = {"kind": "processing_time", "interval_ms": INTERVAL_MS}
ROUND_TRIP_MS = 1.0
TRANSIT_MS = 2.0
"""Part of a report's way that its age leaves out."""
BYTES_PER_MS = 100_000.0
"""Of the network: 100 MB/s."""
RECHECK_MS = 20.0
"""How often the relay asks whether an answer may leave."""
LAG_MS = 100.0
"""From one look at the lag to the next."""
POLL_MS = 1.0
"""Between two looks of a task for what it waits for."""

Task = Generator[float, None, None]
"""Yields the time at which it wants to go on."""


@dataclass
class BatchSeen:
    """What happened to one batch; rate and bound are those that it was planned with."""

    start_ms: float
    end_ms: float
    records: int
    rate: float | None
    bound: float
    ends: dict[int, int]

    @property
    def took_ms(self) -> float:
        return self.end_ms - self.start_ms


@dataclass
class Load:
    """What comes in and what it costs."""

    per_s: float
    """Records that arrive in a second, all partitions together."""
    cost_ms: Callable[[float], float]
    """Of a record in one task, at a time since the start in milliseconds."""
    partitions: int = 2
    overhead_ms: float = 100.0
    """Of each batch, beside its records."""
    fetch_bytes: int = 100_000
    """The largest Fetch response."""
    report_ms: float = 30.0
    """How long a report is under way."""
    backlog: int = 0
    """Records that are there at the start."""
    quiet_every_ms: float | None = None
    """The last partition has no part in all that: it gets a record each time so much has passed."""
    overlaps: bool = False
    """Whether a task fetches on while it processes."""
    clamps: bool = True
    """Whether the driver is told the clamped ends; it is not when it looks up by another way."""
    burst: Callable[[float], float] = lambda _since_start_ms: 0
    """Records that have come at a time beside those of `per_s`."""
    until_ms: float = math.inf
    """When the last of them comes."""
    pause_ms: Callable[[int], float] = lambda _batch: 0.0
    """What a batch takes longer, by its number."""
    slowness: Callable[[int, float], float] = lambda _batch, _since_start_ms: 1.0
    """How many times all that a batch costs, by its number and its start."""
    skew: float = 1.0
    """How many times the others' cost a record of the first partition has."""
    rows_each: int = 1
    """How often Spark counts a record: twice in a self-join."""
    poll_ms: float = POLL_MS


class Simulation:
    """Runs until a time; then look at `batches`."""

    def __init__(self, load: Load, *rules: Rule):
        self.load = load
        self.world = BackpressureWorld(*rules)
        self.start_ms = self.world.now_ms
        self.batches: list[BatchSeen] = []
        self.read_ranges: dict[int, list[tuple[int, int]]] = {p: [] for p in range(load.partitions)}
        self.completed = dict.fromkeys(range(load.partitions), 0)
        self.fetched = dict.fromkeys(range(load.partitions), 0)
        self.held_ms = 0.0
        self.lags: list[int] = []
        """One for each LAG_MS."""
        self._slowness = 1.0
        self._fetching: set[int] = set()
        self._queue: list[tuple[float, int, Task]] = []
        self._order = count()
        for _ in range(load.partitions):
            self.world.lookups().is_executor = True

    def run(self, seconds: float) -> None:
        self._spawn(self._driver())
        self._spawn(self._ticks())
        self._spawn(self._looks())
        end_ms = self.start_ms + seconds * 1000
        while self._queue and self._queue[0][0] <= end_ms and not self.is_done:
            self.world.now_ms, _, task = heapq.heappop(self._queue)
            at_ms = next(task, None)
            if at_ms is not None:
                self._spawn(task, at_ms)

    def latest(self, p: int) -> int:
        """Return the real log end of a partition."""
        load = self.load
        elapsed_ms = min(self.world.now_ms - self.start_ms, load.until_ms)
        if load.quiet_every_ms is None:
            busy = load.partitions
        elif p == load.partitions - 1:
            return int(elapsed_ms / load.quiet_every_ms)
        else:
            busy = load.partitions - 1
        come = load.backlog + load.burst(elapsed_ms) + load.per_s * elapsed_ms / 1000
        return int(come / busy)

    @property
    def is_done(self) -> bool:
        """Whether all that will ever come is completed."""
        return self.world.now_ms - self.start_ms > self.load.until_ms and self.lag == 0

    @property
    def lag(self) -> int:
        return sum(self.latest(p) - done for p, done in self.completed.items())

    def _spawn(self, task: Task, at_ms: float = 0.0) -> None:
        heapq.heappush(self._queue, (max(at_ms, self.world.now_ms), next(self._order), task))

    def _ticks(self) -> Task:
        while True:
            self.world.backpressure.tick(self.world.now_ms)
            yield self.world.now_ms + 1000

    def _looks(self) -> Task:
        while True:
            self.lags.append(self.lag)
            yield self.world.now_ms + LAG_MS

    def _driver(self) -> Task:
        """As ProcessingTimeExecutor: at each multiple of the interval, or at once when late."""
        world = self.world
        world.start(trigger=PROCESSING_TIME)
        lookups = world.lookups()
        tell_earliest(world, lookups, dict(self.completed))
        while True:
            trigger_ms = world.now_ms
            asked = ask(self.completed)
            yield world.now_ms + ROUND_TRIP_MS
            frame = answer({p: self.latest(p) for p in self.completed})
            if self.load.clamps:
                while (wait_ms := lookups.wait_ms(asked, world.now_ms)) > 0:
                    yield world.now_ms + min(wait_ms, RECHECK_MS)
                frame = lookups.answered(asked, VERSION, frame, world.now_ms)
            answers = read(frame)
            ends = {p: found.offset for (_, p), found in answers.items()}
            assert all(ends[p] >= done for p, done in self.completed.items()), "a step back"
            if ends != self.completed:
                yield from self._batch(trigger_ms, ends)
            next_ms = self.start_ms + INTERVAL_MS * (
                math.floor((trigger_ms - self.start_ms) / INTERVAL_MS) + 1
            )
            yield next_ms

    def _batch(self, trigger_ms: float, ends: dict[int, int]) -> Task:
        world = self.world
        planned = world.document
        done = [False] * len(ends)
        number = len(self.batches)
        self._slowness = self.load.slowness(number, trigger_ms - self.start_ms)
        overhead_ms = self.load.overhead_ms * self._slowness + self.load.pause_ms(number)
        # Scheduling and commits come one after the other with the tasks.
        yield world.now_ms + overhead_ms
        for p, end in ends.items():
            self._spawn(self._executor(p, end, done))
        while not all(done):
            yield world.now_ms + self.load.poll_ms
        records = sum(end - self.completed[p] for p, end in ends.items())
        rate, bound = planned["rate"], planned["bound"]
        seen = BatchSeen(trigger_ms, world.now_ms, records, rate, bound, ends)
        self.batches.append(seen)
        starts, self.completed = self.completed, ends
        self._spawn(self._report(starts, ends, seen))

    def _report(self, starts: dict[int, int], ends: dict[int, int], seen: BatchSeen) -> Task:
        yield seen.end_ms + self.load.report_ms
        age_ms = max(0.0, self.load.report_ms - TRANSIT_MS)
        rows = seen.records * self.load.rows_each
        self.world.batch(ends, rows=rows, ms=seen.took_ms, age_ms=age_ms, starts=starts)

    def _executor(self, p: int, end: int, done: list[bool]) -> Task:
        world, load = self.world, self.load
        at = self.completed[p]
        while at < end:
            if self.fetched[p] <= at:
                self._fetch(p)
                yield world.now_ms + load.poll_ms
                continue
            upto = min(end, self.fetched[p])
            if load.overlaps and upto < end:
                self._fetch(p)
            self.read_ranges[p].append((at, upto))
            cost_ms = load.cost_ms(world.now_ms - self.start_ms) * self._slowness
            yield world.now_ms + (upto - at) * cost_ms * (load.skew if p == 0 else 1.0)
            at = upto
        done[p] = True

    def _fetch(self, p: int) -> None:
        if p not in self._fetching:
            self._fetching.add(p)
            self._spawn(self._response(p))

    def _response(self, p: int) -> Task:
        """One Fetch response; like a real one it does not end where the batch does."""
        world = self.world
        partition = world.query.open("t", p, world.now_ms)
        assert partition is not None
        partition.read_ms = world.now_ms
        yield world.now_ms + ROUND_TRIP_MS
        records = min(self.load.fetch_bytes // RECORD_BYTES, self.latest(p) - self.fetched[p])
        size = records * RECORD_BYTES
        pressure = world.query_backpressure
        pressure.record_bytes(size)
        charge = world.client.charge(CONSUMER, size, world.now_ms)
        if charge is not None:
            pressure.record_hold(world.now_ms, charge.due_ms)
            self.held_ms += charge.due_ms - world.now_ms
            yield charge.due_ms
        yield world.now_ms + size / BYTES_PER_MS
        partition.deliver(self.fetched[p], self.fetched[p] + records, world.now_ms)
        self.fetched[p] += records
        self._fetching.discard(p)
