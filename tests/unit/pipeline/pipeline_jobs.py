"""Spark queries that read and write topics of a pipeline in virtual time, as the proxy sees them.

Each asks at its trigger how far the log goes, and plans a batch up to what it is told. What it is
told is what the clamp says: the ceiling's records for one interval, shared over the partitions, at
least one for each with lag; nothing new at a ceiling of 0.
"""

import heapq
import math
from collections.abc import Callable

from parts.query_world import learn_end
from parts.reports import batch_document, source_document
from wired_world import SECOND_MS, WiredWorld

from proxy.backpressure.driver_view import split_by_lag

CLOCK_MS = 100.0
"""The shortest interval of this world."""

TICK_MS = 500.0
"""Between two looks of the proxy."""

RECORD_BYTES = 100

LOG_END_MS = 10_000.0
"""Between two times that it asks the cluster for the ends of logs."""

Ends = dict[int, int]
"""By partition."""


class Log:
    """The ends of a topic's partitions."""

    def __init__(self, topic: str, partitions: int = 1) -> None:
        self.topic = topic
        self.ends: Ends = dict.fromkeys(range(partitions), 0)

    def append(self, count: int) -> list[tuple[int, int, int]]:
        """Append records in turn; return what was written where, as (partition, start, end)."""
        written = []
        for partition, end in self.ends.items():
            part = count // len(self.ends) + (partition < count % len(self.ends))
            if part:
                self.ends[partition] = end + part
                written.append((partition, end, end + part))
        return written

    @property
    def total(self) -> int:
        return sum(self.ends.values())


class Job:
    """One query. It keeps its checkpoint over a stop and a start.

    Args:
        plant: where it runs.
        name: its client id as well.
        reads: its topics.
        writes: nothing, if it writes nothing.
        per_s: records that it processes per second.
        ratio: records that it writes for one that it reads.
        fixed_ms: what a batch takes besides.
        first_ms: when it looks first.

    """

    def __init__(
        self,
        plant: "Plant",
        name: str,
        reads: tuple[str, ...],
        writes: str = "",
        *,
        per_s: float = 10_000.0,
        ratio: Callable[[int], float] = lambda _: 1.0,
        fixed_ms: float = 100.0,
        first_ms: float = 0.0,
    ) -> None:
        self.plant, self.name, self.writes = plant, name, writes
        self.per_s, self.ratio, self.fixed_ms = per_s, ratio, fixed_ms
        self.reads = [plant.log(topic) for topic in reads]
        self.done = {(log.topic, part): 0 for log in self.reads for part in log.ends}
        self.told = dict(self.done)
        self.is_up = True
        self.late_ms = 0.0
        """How late its reports are; the answer to a look-up does not wait for them here."""
        self.batches: list[int] = []
        """The sizes of those that it planned."""
        self._number = 0
        self._ends_ms = math.inf
        """When the batch under way is done; infinite when there is none."""
        self._due_ms = first_ms

    @property
    def lag(self) -> int:
        """How many records wait for it, those of its batch under way included."""
        return sum(log.total for log in self.reads) - sum(self.done.values())

    def stop(self) -> None:
        """End; a batch under way is given up, and planned again from the checkpoint."""
        self.is_up, self._ends_ms = False, math.inf

    def start(self) -> None:
        """Begin again with the batch that was given up, if there is one."""
        self.is_up, self._due_ms = True, self.plant.world.now_ms
        if self.told != self.done:
            self._begin()

    def step(self) -> None:
        """Do what is due now."""
        now_ms = self.plant.world.now_ms
        if not self.is_up:
            return
        if now_ms >= self._ends_ms:
            self._finish()
        if math.isinf(self._ends_ms) and now_ms >= self._due_ms:
            interval_ms = self.plant.interval_ms
            self._due_ms += interval_ms * (1 + (now_ms - self._due_ms) // interval_ms)
            self._plan()

    def _plan(self) -> None:
        world, connection = self.plant.world, self
        latest = {(log.topic, part): end for log in self.reads for part, end in log.ends.items()}
        world.look_up(self.name, frozenset(latest))
        pressed = world.pressed(self.name)
        lags = {key: end - self.done[key] for key, end in latest.items()}
        ceiling = pressed.ceiling
        if ceiling is None:
            made = lags
        elif ceiling == 0:
            made = dict.fromkeys(lags, 0)
        else:
            fitting = max(1, round(ceiling * self.plant.interval_ms / SECOND_MS))
            made = split_by_lag(fitting, lags)
        for key, end in latest.items():
            self.told[key] = min(end, max(self.done[key] + made[key], self.told[key]))
            pressed.clamp.record_end(key, end, self.told[key], connection, world.now_ms)
            world.see(self.name, key[0], end, key[1])
        if self.told != self.done:
            self.batches.append(sum(self.told.values()) - sum(self.done.values()))
            self._begin()
        self.plant.check()

    def _begin(self) -> None:
        size = sum(self.told.values()) - sum(self.done.values())
        took_ms = self.fixed_ms + size / self.per_s * SECOND_MS
        self._ends_ms = self.plant.world.now_ms + math.ceil(took_ms / CLOCK_MS) * CLOCK_MS
        self._took_ms = took_ms

    def _finish(self) -> None:
        self._ends_ms = math.inf
        starts, ends = dict(self.done), dict(self.told)
        rows = sum(ends.values()) - sum(starts.values())
        if self.writes:
            log = self.plant.log(self.writes)
            for part, start, end in log.append(round(rows * self.ratio(self._number))):
                self.plant.world.pipelines.appended(
                    self.name, log.topic, part, start, end, self.plant.world.now_ms
                )
        self.plant.world.pressed(self.name).record_bytes(rows * RECORD_BYTES)
        self.done = ends
        sources = [
            source_document(log.topic, _of(starts, log.topic), _of(ends, log.topic), rows)
            for log in self.reads
        ]
        batch = batch_document(self._number, 0, 0, rows=rows, took_ms=round(self._took_ms))
        batch["sources"] = sources
        self._number += 1
        done_ms = self.plant.world.now_ms
        self.plant.later(self.late_ms, lambda: self._report(batch, done_ms))
        self.plant.check()

    def _report(self, batch: dict, done_ms: float) -> None:
        age_ms = self.plant.world.now_ms - done_ms
        self.plant.world.report(self.name, batch=batch, age_ms=age_ms)


class Plant:
    """All jobs and logs of one pipeline, on the clock of its world.

    Args:
        world: the proxy.
        interval_ms: the trigger of all jobs; the rules of the world must say the same.
        partitions: of each topic.

    """

    def __init__(
        self, world: WiredWorld, interval_ms: float = SECOND_MS, partitions: int = 2
    ) -> None:
        self.world, self.interval_ms, self.partitions = world, interval_ms, partitions
        self.logs: dict[str, Log] = {}
        self.jobs: dict[str, Job] = {}
        self.checks: list[Callable[[], None]] = []
        """Are called whenever something was planned or written."""
        self.per_s: dict[str, float] = {}
        """What arrives in topics of sources."""
        self._owed: dict[str, float] = {}
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def log(self, topic: str) -> Log:
        return self.logs.setdefault(topic, Log(topic, self.partitions))

    def job(self, name: str, reads: str, writes: str = "", **more) -> Job:
        self.jobs[name] = Job(
            self, name, tuple(reads.split()), writes, first_ms=self.world.now_ms, **more
        )
        return self.jobs[name]

    def later(self, after_ms: float, action: Callable[[], None]) -> None:
        """Do something after a while; at once when it is 0."""
        if not after_ms:
            action()
            return
        self._count += 1
        heapq.heappush(self._later, (self.world.now_ms + after_ms, self._count, action))

    def check(self) -> None:
        for each in self.checks:
            each()

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> float:
        """Go on for so long, or until something is so; return the seconds that it took."""
        start_ms = self.world.now_ms
        while self.world.now_ms < start_ms + seconds * SECOND_MS and not until():
            for topic, per_s in self.per_s.items():
                self._owed[topic] = self._owed.get(topic, 0.0) + per_s * CLOCK_MS / SECOND_MS
                self.log(topic).append(int(self._owed[topic]))
                self._owed[topic] %= 1.0
            while self._later and self._later[0][0] <= self.world.now_ms:
                heapq.heappop(self._later)[2]()
            for job in self.jobs.values():
                job.step()
            if self.world.now_ms % LOG_END_MS == 0:
                self._ask_log_ends()
            if self.world.now_ms % TICK_MS == 0:
                self.world.tick()
            self.world.now_ms += CLOCK_MS
        return (self.world.now_ms - start_ms) / SECOND_MS

    def _ask_log_ends(self) -> None:
        for log in self.logs.values():
            for part, end in log.ends.items():
                learn_end(self.world.registry, log.topic, part, end, self.world.now_ms)


def _of(ends: dict[tuple[str, int], int], topic: str) -> dict[int, int]:
    return {part: end for (name, part), end in ends.items() if name == topic}
