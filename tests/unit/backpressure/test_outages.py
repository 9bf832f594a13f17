"""A driver over many outages at random moments, in virtual time: no batch above its bound."""

import math
from dataclasses import dataclass, field
from random import Random

import pytest
from backpressure_parts import INTERVAL_MS, VERSION, answer, ask, tell_earliest, told
from driver_script import PER_BATCH, RATE, world_of

from proxy.progress.tracker import QueryReader
from proxy.wire.list_offsets import EARLIEST, LATEST

BACKLOG = 1_000_000
PROCESSING_TIME = {"kind": "processing_time", "interval_ms": INTERVAL_MS}
NUMBERS_PER_LOOKUP = 4
CHECK_MS = 20.0
HEARTBEAT_MS = 500.0
FIRST_HEARTBEAT_MS = 1000.0
"""The longest time from the proxy's return to the first heartbeat."""


@dataclass
class Driver:
    """A driver whose every delay is drawn; it asks, plans, reads, reports and sends heartbeats."""

    chance: Random
    max_report_ms: float
    reads_ahead: float
    """Share of batches that find all their records read ahead."""
    least: int = 1
    """It plans no smaller batch, as with minOffsetsPerTrigger."""
    settings: dict = field(default_factory=lambda: {"min_rate": RATE, "max_rate": RATE})
    executor_first: float = 0.0
    """Share of outages after which executors that have read ahead look up before the driver."""
    world: object = field(init=False)

    def __post_init__(self) -> None:
        self.world = world_of(**self.settings)
        self.number = 6
        self.done = 0
        self.last_batch_id: int | None = None
        self.is_waiting = False
        self.sizes: list[int] = []
        self.waits: list[float] = []
        self.reports: list[tuple[float, int, int, float]] = []
        """When each is due, from and to where the batch went, when it was done."""
        self.heartbeat_ms = 0.0
        self.world.start(trigger=PROCESSING_TIME)
        self.world.pass_ms(1)
        self.lookups = self.world.lookups()
        tell_earliest(self.world, self.lookups, {0: 0})

    def pass_ms(self, ms: float) -> None:
        """Let time pass, with the reports and heartbeats that come meanwhile."""
        until_ms = self.world.now_ms + ms
        while True:
            due = [self.reports[0][0]] if self.reports else []
            at_ms = min([*due, self.heartbeat_ms])
            if at_ms > until_ms:
                break
            self.world.now_ms = max(self.world.now_ms, at_ms)
            if due and due[0] == at_ms:
                _, start, end, done_ms = self.reports.pop(0)
                age_ms = self.world.now_ms - done_ms
                self.world.batch({0: end}, starts={0: start}, rate=RATE, age_ms=age_ms)
            else:
                known = {"is_waiting": self.is_waiting, "last_batch_id": self.last_batch_id}
                self.world.send("running", **known)
                self.heartbeat_ms = self.world.now_ms + HEARTBEAT_MS
        self.world.now_ms = until_ms
        self.world.backpressure.tick(until_ms)

    def outage(self) -> None:
        """The proxy is killed, and comes back after a while; or all connections end."""
        self.number += self.chance.randint(1, 60)
        if self.chance.random() < 0.3:
            self.lookups.closed()
            self.pass_ms(self.chance.uniform(100, 20_000))
        else:
            self.world.crash(self.chance.uniform(1000, 25_000))
            back_ms = self.world.now_ms
            self.heartbeat_ms = back_ms + self.chance.uniform(0, FIRST_HEARTBEAT_MS)
            self.reports = [
                (max(due_ms, self.heartbeat_ms), *rest) for due_ms, *rest in self.reports
            ]
        self.pass_ms(self.chance.uniform(0, 1200))
        if self.chance.random() < 0.2:  # Spark makes a new client
            self.number = 6
        if self.chance.random() < self.executor_first:
            for _ in range(self.chance.randint(1, 3)):
                self._look_as_executor()
        self.lookups = self.world.lookups()

    def _look_as_executor(self) -> None:
        """Look up both ends of the log, by request numbers that may be near those of the driver.

        One may have looked up the start on an earlier connection.
        """
        executor, number = self.world.lookups(), self.number + self.chance.randint(0, 900)
        for timestamp in self.chance.choice([(EARLIEST, LATEST), (LATEST,), (LATEST, EARLIEST)]):
            asked = ask([0], timestamp, correlation_id=number)
            while (wait_ms := executor.wait_ms(asked, self.world.now_ms)) > 0:
                self.pass_ms(min(wait_ms, CHECK_MS))
            frame = answer({0: 0 if timestamp == EARLIEST else self.done + BACKLOG})
            executor.answered(asked, VERSION, frame, self.world.now_ms)
        executor.is_executor = True

    def look(self) -> int:
        """Ask for the end; return what is told."""
        asked = ask([0], correlation_id=self.number)
        began_ms = self.world.now_ms
        while (wait_ms := self.lookups.wait_ms(asked, self.world.now_ms)) > 0:
            self.pass_ms(min(wait_ms, CHECK_MS))
        self.waits.append(self.world.now_ms - began_ms)
        latest = {0: self.done + BACKLOG}
        return told(self.world, self.lookups, latest, correlation_id=self.number)[0]

    def trigger(self, *, is_killed: bool) -> None:
        """Plan a batch and do it, with an outage in it somewhere if so wanted."""
        self.is_waiting = False
        trigger_ms = self.world.now_ms
        moment = self.chance.choice(["before", "answered", "amid", "done"]) if is_killed else ""
        if moment == "before":
            self.outage()
        self.number += NUMBERS_PER_LOOKUP
        end = self.look()
        if moment == "answered" and self.chance.random() < 0.5:
            # The answer is lost on its way; the driver asks again.
            self.world.keep()
            self.outage()
            self.number += NUMBERS_PER_LOOKUP
            end = self.look()
        if end - self.done >= self.least:
            self.sizes.append(end - self.done)
            # Nobody has read ahead before the first batch of a run.
            if len(self.sizes) == 1 or self.chance.random() >= self.reads_ahead:
                QueryReader(self.world.query).fetch_asked(
                    "t", None, [(0, self.done)], self.world.now_ms
                )
            if moment == "amid":
                self.pass_ms(self.chance.uniform(0, 500))
                self.outage()
            self.pass_ms(self.chance.uniform(10, 1.2 * INTERVAL_MS))
            due_ms = math.inf
            if self.max_report_ms < math.inf:
                due_ms = self.world.now_ms + self.chance.uniform(1, self.max_report_ms)
            due_ms = max([due_ms, *(each[0] for each in self.reports)])
            self.last_batch_id = (-1 if self.last_batch_id is None else self.last_batch_id) + 1
            self.reports.append((due_ms, self.done, end, self.world.now_ms))
            self.done = end
        if moment == "done":
            self.outage()
        elapsed_ms = self.world.now_ms - trigger_ms
        self.is_waiting = True
        self.pass_ms(max(1.0, INTERVAL_MS - elapsed_ms))


@pytest.mark.parametrize("reads_ahead", [0.0, 0.9], ids=["each batch fetches", "read ahead"])
@pytest.mark.parametrize(
    "max_report_ms", [50.0, 900.0, 5000.0, 30000.0], ids="reports in {:g} ms".format
)
@pytest.mark.parametrize("executor_first", [0.0, 0.8], ids=["", "executor first"])
@pytest.mark.parametrize("seed", range(4))
def test_no_batch_is_above_its_bound(seed, executor_first, max_report_ms, reads_ahead):
    driver = Driver(Random(seed), max_report_ms, reads_ahead, executor_first=executor_first)
    for count in range(3):
        QueryReader(driver.world.query).fetch_asked(
            "t", None, [(0, driver.done)], driver.world.now_ms
        )
        driver.done += PER_BATCH
        told(driver.world, driver.lookups, {0: driver.done}, correlation_id=driver.number)
        driver.pass_ms(INTERVAL_MS)
        driver.world.batch({0: driver.done}, rate=RATE)
        driver.last_batch_id = count
    for count in range(60):
        driver.trigger(is_killed=count % 3 == 2)
    assert len(driver.sizes) > 30
    assert max(driver.sizes) <= PER_BATCH, driver.sizes


@pytest.mark.parametrize("reads_ahead", [0.0, 0.9, 1.0], ids="{:g} of batches read ahead".format)
@pytest.mark.parametrize("max_report_ms", [50.0, 5000.0, 30000.0, math.inf])
@pytest.mark.parametrize(
    "bound",
    [{"min_rate": RATE, "max_rate": RATE}, {"initial_rate": RATE, "max_rate": RATE}],
    ids=["slow start", "initial rate"],
)
@pytest.mark.parametrize("seed", range(4))
def test_no_first_batch_of_a_run_is_above_its_bound(seed, bound, max_report_ms, reads_ahead):
    driver = Driver(Random(seed), max_report_ms, reads_ahead, settings=bound)
    for _ in range(40):
        driver.trigger(is_killed=False)
    assert driver.sizes[0] == PER_BATCH
    assert len(driver.sizes) > 30
    assert max(driver.sizes) <= PER_BATCH, driver.sizes


@pytest.mark.parametrize("max_report_ms", [50.0, 5000.0, 30000.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_driver_that_plans_no_small_batch_gets_on(seed, max_report_ms):
    least = 30 * PER_BATCH
    driver = Driver(Random(seed), max_report_ms, 0.9, least)
    for _ in range(80):
        driver.trigger(is_killed=False)
    assert len(driver.sizes) > 10
    assert max(driver.sizes) <= 2 * least, driver.sizes
