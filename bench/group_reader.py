"""Part of the figure `groups`: a Sarama consumer group reads a topic on all ways at once."""

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from bench import topics
from bench.golang import build, version_of
from bench.group_ways import BOUND_BYTES, Brokers, Way
from bench.lab import Lab
from bench.report import Row, Verdict

FIGURE = "groups"
WHAT = "Sarama groups"
TARGET = "no more than with Kafka's own quota"
RATE_TOLERANCE = 0.05
USEFUL_SHARE = 0.95
LIBRARY = "github.com/IBM/sarama"
TOPIC = "bench-groups"
PARTITIONS = 6
VALUE_BYTES = 1000
# More than the longest run reads, burst and all, so that no run ends before its time.
RECORDS = 40_000
FULL_ROUNDS = 2
FULL_S = 90.0
QUICK_ROUNDS = 1
QUICK_S = 40.0
# Both Kafka and the proxy let a quiet client take 10 s of its bound at once, and the group has to
# form before; the rate is fitted after that.
WARM_UP_S = 20.0
FIT_STEP_S = 0.1
ANSWER_MARGIN_S = 30.0
# Of Kafka's error UNKNOWN_MEMBER_ID, as Sarama words it.
REMOVED = "member is not known"
# A usual producer's batches, so that Fetch responses may end after any 16 kB of a partition.
PRODUCER_SETTINGS = {"linger.ms": 20, "batch.size": 16_384}


@dataclass(frozen=True, slots=True)
class Variant:
    """A group: its members, and the most bytes of one partition in a Fetch response."""

    members: int
    fetch_bytes: int

    @property
    def name(self) -> str:
        """Client id and prefix of the group ids."""
        return f"sarama-{self.members}-{self.fetch_bytes >> 10}"

    @property
    def title(self) -> str:
        """As printed in the table."""
        plural = "" if self.members == 1 else "s"
        return f"Sarama, {self.members} member{plural}, {self.fetch_bytes >> 10} KiB"


# Sarama's own size is 1 MiB: four seconds' worth of the bound for each partition of a response.
VARIANTS = (Variant(1, 1 << 20), Variant(2, 256 << 10), Variant(3, 1 << 20))


@dataclass(frozen=True, slots=True)
class Read:
    """What one run of the group came to; the fields of the program's JSON and the fitted rate.

    Attributes:
        rate: bytes of Fetch responses per second after the warm-up.
        useful_share: of the bytes of Fetch responses, in values of records received for the first
            time. What a broker cuts off at a limit is charged, and read again.
        skipped: records before a partition's last received one that nobody received.
        generations: how often the group formed; 1 when it never had to again.
        heartbeat_wait_max_s: longest time from the sending of a heartbeat to its answer.
        heartbeat_gap_max_s: longest time between two heartbeats of a member in one generation.
            The library sends none while it waits for a Fetch of the same broker.

    """

    rate: float
    useful_share: float
    received: int
    duplicates: int
    skipped: int
    generations: int
    errors: dict[str, int]
    session_ends: dict[str, int]
    fetch_versions: dict[str, int]
    heartbeat_wait_max_s: float
    heartbeat_gap_max_s: float
    largest_fetch_bytes: int

    @property
    def removals(self) -> int:
        """How often a member learned that the group had gone on without it."""
        return sum(count for text, count in self.session_ends.items() if REMOVED in text)

    @property
    def rate_error(self) -> float:
        """Share by which the rate is above (or below) the bound."""
        return self.rate / BOUND_BYTES - 1


@dataclass(frozen=True, slots=True)
class Run:
    """A group on one way, and what it read in each round."""

    variant: Variant
    way: Way
    reads: list[Read] = field(default_factory=list)

    @property
    def duplicates(self) -> int:
        """Records received again, all rounds together."""
        return sum(read.duplicates for read in self.reads)


def measure(lab: Lab, go: str, brokers: Brokers, quick: bool) -> list[Row]:
    """Fill a topic on both brokers, read it by every group on all ways, and give the rows.

    All groups of a round read side by side: each has a client id of its own, so a quota of its own.
    """
    rounds, duration_s = (QUICK_ROUNDS, QUICK_S) if quick else (FULL_ROUNDS, FULL_S)
    program = str(build(go, lab.work_dir / "group"))
    for broker in (brokers.own, brokers.plain):
        topics.create(broker.bootstrap, TOPIC, PARTITIONS)
        value = os.urandom(VALUE_BYTES)
        topics.fill(broker.bootstrap, TOPIC, PARTITIONS, value, RECORDS, PRODUCER_SETTINGS)
    runs = [Run(variant, way) for variant in VARIANTS for way in brokers.ways(lab)]
    for number in range(rounds):
        children = [
            lab.start_helper("group", _command(program, run, number, duration_s)) for run in runs
        ]
        for run, child in zip(runs, children, strict=True):
            answer = child.wait_line(
                lambda line: line.startswith("{"), duration_s + ANSWER_MARGIN_S
            )
            run.reads.append(_parse(answer, duration_s))
    return [row for variant in VARIANTS for row in _rows(_of(runs, variant))]


def _command(program: str, run: Run, number: int, duration_s: float) -> list[str]:
    return [
        program,
        f"-brokers={run.way.bootstrap}",
        f"-topic={TOPIC}",
        f"-group={run.variant.name}-{run.way.mode}-{number}",
        f"-client-id={run.variant.name}",
        f"-records={RECORDS}",
        f"-members={run.variant.members}",
        f"-fetch-bytes={run.variant.fetch_bytes}",
        f"-duration={duration_s}s",
    ]


def _parse(answer: str, duration_s: float) -> Read:
    found = json.loads(answer)
    fetches = [(fetch["at_s"], fetch["bytes"]) for fetch in found["fetches"] or ()]
    return Read(
        _fitted_rate(fetches, WARM_UP_S, duration_s),
        (found["received"] - found["duplicates"])
        * VALUE_BYTES
        / max(sum(size for _, size in fetches), 1),
        found["received"],
        found["duplicates"],
        found["skipped"],
        found["generations"],
        found["errors"],
        found["session_ends"],
        found["fetch_versions"],
        found["heartbeat_wait_max_s"],
        found["heartbeat_gap_max_s"],
        max((size for _, size in fetches), default=0),
    )


def _fitted_rate(fetches: Sequence[tuple[float, int]], start_s: float, end_s: float) -> float:
    """Return the slope, in bytes per second, of the straight line through the bytes so far.

    One Fetch response may be several seconds' worth of the bound: the bytes between two points in
    time depend on where these fall, the slope hardly does.
    """
    steps = int((end_s - start_s) / FIT_STEP_S)
    times = [start_s + step * FIT_STEP_S for step in range(steps + 1)]
    totals, total, left = [], 0, iter([*fetches, (end_s + FIT_STEP_S, 0)])
    at_s, size = next(left)
    for time_s in times:
        while at_s <= time_s:
            total += size
            at_s, size = next(left)
        totals.append(total)
    return statistics.linear_regression(times, totals).slope


def _of(runs: Sequence[Run], variant: Variant) -> list[Run]:
    return [run for run in runs if run.variant == variant]


def _rows(runs: Sequence[Run]) -> list[Row]:
    own = sum(run.duplicates for run in runs if run.way.is_own)
    return [row for run in runs for row in _rows_of(run, own)]


def _rows_of(run: Run, own: int) -> list[Row]:
    is_own, reads = run.way.is_own, run.reads
    twice = f"{run.duplicates} of {sum(read.received for read in reads)} received twice"
    within = all(abs(read.rate_error) <= RATE_TOLERANCE for read in reads)
    samples: dict[str, object] = {
        "reads": [asdict(read) for read in reads],
        "library": f"{LIBRARY} {version_of(LIBRARY)}",
        "holds": str(run.way.holds()),
        "fetch_versions_at_the_proxy": run.way.fetch_versions(),
    }
    return [
        Row(
            FIGURE,
            f"{run.variant.title}, {run.way.name}",
            "" if is_own else TARGET,
            twice if is_own else f"{twice} ({own} with Kafka's own)",
            Verdict.INFO if is_own else Verdict.of(run.duplicates <= own),
            samples,
        ),
        Row(
            FIGURE,
            "  rate against the bound",
            "" if is_own else f"within {RATE_TOLERANCE:.0%}",
            ", ".join(f"{read.rate_error:+.1%}" for read in reads),
            Verdict.INFO if is_own else Verdict.of(within),
        ),
        Row(
            FIGURE,
            "  useful bytes",
            "" if is_own else f"at least {USEFUL_SHARE:.0%}",
            ", ".join(f"{read.useful_share:.1%} of those charged" for read in reads),
            Verdict.INFO
            if is_own
            else Verdict.of(all(read.useful_share >= USEFUL_SHARE for read in reads)),
        ),
        Row(FIGURE, "  group", "", _group(reads), Verdict.INFO),
        Row(FIGURE, "  Fetch", "", _fetch(run), Verdict.INFO),
    ]


def _group(reads: Sequence[Read]) -> str:
    return (
        f"{'/'.join(str(read.generations) for read in reads)} generations, "
        f"{sum(read.removals for read in reads)} times a member was removed, "
        f"up to {max(read.heartbeat_gap_max_s for read in reads):.1f} s between heartbeats, "
        f"{sum(read.skipped for read in reads)} records skipped"
    )


def _fetch(run: Run) -> str:
    versions = {version for read in run.reads for version in read.fetch_versions}
    largest = max(read.largest_fetch_bytes for read in run.reads)
    text = f"version {', '.join(sorted(versions, key=int))}, up to {largest / 1000:.0f} kB"
    return text if run.way.is_own else f"{text}; {run.way.holds()}"
