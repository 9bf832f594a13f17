"""The jobs of the figure `backpressure`: what is fed to each, and what its work costs.

Costs are sleeps in the driver, so that two cores are enough for several queries at once. The jobs
with joins and state cost what Spark needs for them; their ways run one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

TRIGGER_S = 1.0
"""Between two batches of every query, if they take no longer."""
PARTITIONS = 4
RATE = 500.0
"""Records per second that are fed where nothing else is said."""
FULL_CAPACITY_ROW_S = PARTITIONS * TRIGGER_S / (RATE * TRIGGER_S)
"""Cost of a record with which a batch of one interval's records takes all of the interval."""
SPARK_SHARE = 0.15
"""Of a trigger, which Spark itself takes for a small batch on a machine that is not busy."""
FEED_S = 30.0
STATE_FEED_S = 18.0
"""For each of the rounds of a job whose ways take turns."""


class Kind(StrEnum):
    """What a query does."""

    WORK = "work"
    """Sleeps for each record and for each batch."""
    SELF_JOIN = "self-join"
    JOIN = "join"
    COUNT = "count"

    @property
    def topics(self) -> int:
        """How many topics such a query reads."""
        return 2 if self is Kind.JOIN else 1


@dataclass(frozen=True, slots=True)
class Phase:
    """Records at a steady rate for a while; the rate is that of all topics together."""

    seconds: float
    rate: float = RATE


STEADY = (Phase(FEED_S),)


@dataclass(frozen=True, slots=True)
class Job:
    """One job.

    Attributes:
        name: by which it is chosen; part of the query names.
        says: what it is, for people.
        phases: what is fed, one after the other.
        backlog: records that are there before the queries start.
        shares: of the partitions, which of them gets how many of the records.
        kind: what its queries do.
        fixed_s: cost of a batch, whatever its size.
        row_s: cost of a record; those of different partitions cost it at the same time.
        slow: when each record costs `slow_factor` times as much, in seconds after the start.
        slow_batches: as many first batches cost `slow_factor` times as much per record.
        slow_factor: see there.
        pause_every: each batch of a number that this divides takes `pause_s` longer; 0 for none.
        pause_s: see there.
        row_s_of_others: costs of further queries in each way, each with its own client id.
        fits: whether there is a batch size with which all batches keep to the trigger.

    """

    name: str
    says: str
    phases: Sequence[Phase] = STEADY
    backlog: int = 0
    shares: tuple[int, ...] = (1,) * PARTITIONS
    kind: Kind = Kind.WORK
    fixed_s: float = 0.0
    row_s: float = 0.0
    slow: tuple[float, float] | None = None
    slow_batches: int = 0
    slow_factor: float = 1.0
    pause_every: int = 0
    pause_s: float = 0.0
    row_s_of_others: tuple[float, ...] = ()
    fits: bool = True

    @property
    def at_once(self) -> bool:
        """Whether its ways may run at the same time: they do not keep the cores busy."""
        return self.kind is Kind.WORK

    @property
    def row_costs_s(self) -> tuple[float, ...]:
        """Cost of a record for each of the queries of a way."""
        return (self.row_s, *self.row_s_of_others)

    @property
    def feed_s(self) -> float:
        """How long it is fed."""
        return sum(phase.seconds for phase in self.phases)

    def fed_after(self, elapsed_s: float) -> int:
        """How many records are due so long after the start, the backlog not among them."""
        due = 0.0
        for phase in self.phases:
            due += phase.rate * min(max(elapsed_s, 0.0), phase.seconds)
            elapsed_s -= phase.seconds
        return int(due)


def _fixed(intervals: float) -> Job:
    return Job(
        f"fixed-{intervals:g}",
        f"{intervals:g} intervals for each batch, nothing for a record",
        fixed_s=intervals * TRIGGER_S,
        fits=intervals < 1,
    )


def _per_record(percent: int) -> Job:
    return Job(
        f"record-{percent}",
        f"batches of one interval's records take {percent} % of it",
        row_s=(percent / 100 - SPARK_SHARE) * FULL_CAPACITY_ROW_S,
    )


JOBS = {
    job.name: job
    for job in (
        _fixed(0),
        _fixed(0.3),
        _fixed(1.1),
        _fixed(2),
        _per_record(40),
        _per_record(90),
        Job(
            "burst",
            "30,000 records after a trickle of 5/s",
            phases=(Phase(15, 5), Phase(1.5, 20_000)),
        ),
        Job(
            "backlog",
            "30,000 records at the start, then 500/s at 13 % of capacity",
            backlog=30_000,
            row_s=0.001,
        ),
        Job(
            "slow-start",
            "the first 3 batches cost 5 times as much, then 40 % of capacity",
            row_s=0.4 * FULL_CAPACITY_ROW_S,
            slow_batches=3,
            slow_factor=5,
        ),
        Job(
            "skew",
            "9 of 10 records in one of 4 partitions, at half its capacity",
            row_s=0.5 / (0.9 * RATE),
            shares=(27, 1, 1, 1),
        ),
        Job(
            "slow-minute",
            "40 % of capacity, for 15 s 4 times as much",
            phases=(Phase(45),),
            row_s=0.4 * FULL_CAPACITY_ROW_S,
            slow=(12, 27),
            slow_factor=4,
        ),
        Job(
            "ten-times",
            "20 % of capacity, for 15 s 10 times as much",
            phases=(Phase(60),),
            row_s=0.2 * FULL_CAPACITY_ROW_S,
            slow=(12, 27),
            slow_factor=10,
        ),
        Job(
            "pauses",
            "25 % of capacity, each 10th batch takes 3 s longer",
            phases=(Phase(45),),
            row_s=0.25 * FULL_CAPACITY_ROW_S,
            pause_every=10,
            pause_s=3,
            fits=False,
        ),
        Job(
            "two",
            "two queries in one session, at 20 % and 60 % of capacity",
            row_s=0.2 * FULL_CAPACITY_ROW_S,
            row_s_of_others=(0.6 * FULL_CAPACITY_ROW_S,),
        ),
        Job(
            "self-join",
            "a topic joined with itself",
            phases=(Phase(STATE_FEED_S),),
            kind=Kind.SELF_JOIN,
        ),
        Job(
            "join",
            "two topics joined, with watermarks, after a backlog of 10,000",
            phases=(Phase(STATE_FEED_S),),
            backlog=10_000,
            kind=Kind.JOIN,
        ),
        Job(
            "count",
            "counts by window and key, in RocksDB",
            phases=(Phase(STATE_FEED_S),),
            kind=Kind.COUNT,
        ),
    )
}
QUICK_JOBS = ("fixed-0.3", "fixed-1.1", "burst")
QUICK_SHARE = 0.4
"""Of the time that a job is fed, in a quick run."""
