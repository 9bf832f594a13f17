"""Figure: what batches become when proxy or broker are killed while a backlog is read.

Real broker, real Spark with several queries, each with a proxy of its own whose rule makes every
batch `BOUND` records. Proxies are killed (SIGKILL) at moments that matter, stay away for a random
time and come back at their address with their state; so does the broker (killed, or stopped in
order), and both together. One more query has no adaptive rule but Spark's `maxOffsetsPerTrigger`:
it shows what Spark itself does.

Set the environment variable BENCH_SEED to repeat the outages of an earlier run.
"""

import math
import os
import random
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path

from bench.lab import Lab, open_lab
from bench.machines import BROKER_PORTS, POLL_S, Machine
from bench.outage_driver import Start
from bench.outage_judge import (
    Judged,
    Outage,
    count_records,
    faults,
    judge,
    planned_sizes,
    read_ranges,
)
from bench.outage_parts import Driver, Event
from bench.processes import BenchError
from bench.report import Row, Verdict
from bench.topics import create, fill
from examples.devkit.broker import EmbeddedBroker
from examples.devkit.loopback import free_ports

FIGURE = "outages"
SEED_VARIABLE = "BENCH_SEED"

VALUE = b"." * 20
PRODUCER_SETTINGS: Mapping[str, str | int] = {
    "linger.ms": 50,
    # As many as a consumer of Spark's polls at a time.
    "batch.num.messages": 500,
    "queue.buffering.max.messages": 200_000,
    "log_level": 0,
}
RATE = 250
TRIGGER_S = 4
BOUND = RATE * TRIGGER_S
MOST_OF_BOUND = 1.5
RECONNECT_S = 1.2
"""Kafka's clients try to connect again after `reconnect.backoff.max.ms`, 1 s, and up to a fifth
more."""
LONGEST_WAIT_S = TRIGGER_S + RECONNECT_S

WORK_S = 0.4
"""The work on each batch."""
BACKLOG = 20 * BOUND
"""Records that each query has before it at each kill: a batch of all of them shows, and still ends
in time, for the proxy bounds its bytes all the same."""
FEW = 10
WARM_UP_BATCHES = 3
BATCHES_AFTER = 3
"""That end after each outage before the next one."""
SPARK_TASKS = 4

BATCH_TIMEOUT_S = 120.0
RECOVERY_TIMEOUT_S = 240.0
"""Until a query reads again or has failed: Spark tries three times, each for a minute."""

_LOSS = re.compile(rb"may (?:have been|be) (?:lost|missed)|incorrect offsets|offset was changed")
"""What Spark logs where it finds that records, or ends of logs, are gone."""


class What(StrEnum):
    """What is killed."""

    PROXY = "proxy"
    BROKER = "broker"
    BOTH = "broker and proxy"


class Moment(StrEnum):
    """When it is killed, as seen from a query."""

    BETWEEN = "between batches"
    AMID = "amid a batch"
    ASKED = "a look-up answered"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Plan:
    """How many kills there are, and how long outages are (log-uniform).

    Attributes:
        proxy_kills: of each query's proxy.
        broker_kills: of the broker alone.
        both_kills: of the broker together with all proxies.
        longest_s: of an outage.

    """

    proxy_kills: int
    broker_kills: int
    both_kills: int
    longest_s: float
    shortest_s: float = 1.0

    def seconds(self, chance: random.Random) -> float:
        """Draw the length of an outage."""
        low, high = math.log(self.shortest_s), math.log(self.longest_s)
        return math.exp(chance.uniform(low, high))


FULL = Plan(proxy_kills=10, broker_kills=6, both_kills=4, longest_s=120.0)
QUICK = Plan(proxy_kills=2, broker_kills=1, both_kills=1, longest_s=10.0)


@dataclass(frozen=True, slots=True)
class Kind:
    """One query: its topic's partitions, options of its source, whether its rule is adaptive."""

    name: str
    partitions: int
    options: Mapping[str, str] = field(default_factory=dict)
    is_adaptive: bool = True


KINDS = (
    Kind("outage-1", 1),
    Kind("outage-2", 2, {"kafka.max.partition.fetch.bytes": "10000"}),
    Kind("outage-3", 3, {"kafka.max.partition.fetch.bytes": "10000"}),
    Kind("outage-8", 8),
    Kind("outage-none", 2, {"maxOffsetsPerTrigger": str(BOUND)}, is_adaptive=False),
)


@dataclass(slots=True)
class Part:
    """A query, its proxy, and what happened to them."""

    kind: Kind
    broker: EmbeddedBroker
    proxy: Machine
    driver: Driver
    checkpoint: Path
    chance: random.Random
    fed: int = 0
    """Records in each partition."""
    outages: list[Outage] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the query, its client and its topic."""
        return self.kind.name

    @property
    def events(self) -> list[Event]:
        """What the driver told of the query."""
        return self.driver.events(self.name)

    def start(self) -> None:
        """Begin a run from the checkpoint."""
        self.driver.start(
            Start(
                self.name,
                self.proxy.bootstrap,
                self.proxy.admin_url,
                str(self.checkpoint),
                f"{TRIGGER_S} seconds",
                WORK_S,
                dict(self.kind.options),
            )
        )

    def warm_up(self) -> None:
        """Start the query and let the proxy learn its rate, then let it work on its backlog."""
        self.start()
        for _ in range(WARM_UP_BATCHES):
            since = len(self.events)
            self._feed(FEW)
            self._await("reported", 1, since)
        for _ in range(WARM_UP_BATCHES):
            self.top_up()
            since = len(self.events)
            self._await("reported", BATCHES_AFTER, since)
            if all(size <= BOUND for _, size in planned_sizes(self.events)[-BATCHES_AFTER:]):
                return
        raise BenchError(f"{self.name}: its batches are not bounded before any outage")

    def top_up(self) -> None:
        """Let there be a backlog again."""
        read = count_records(read_ranges(self.events))
        missing = BACKLOG - (self.fed * self.kind.partitions - read)
        if missing > 0:
            self._feed(math.ceil(missing / self.kind.partitions))

    def await_moment(self, moment: Moment) -> None:
        """Return when the query is there."""
        since = len(self.events)
        if moment is Moment.BETWEEN:
            self._await("reported", 1, since)
            time.sleep(self.chance.uniform(0.05, 0.3))
        elif moment is Moment.AMID:
            self._await("begun", 1, since)
            time.sleep(self.chance.uniform(0.0, WORK_S))
        elif moment is Moment.ASKED:
            self._await_plan()
        else:
            time.sleep(self.chance.uniform(0.0, TRIGGER_S))

    def recover(self) -> None:
        """Return when the query reads again; one that has failed is started again."""
        killed_s = self.outages[-1].killed_s
        if not self._has_failed(killed_s):
            self.driver.wait(self.name, self._goes_on, RECOVERY_TIMEOUT_S)
            if self._is_all_read(self.events):
                self.top_up()
                self.driver.wait(self.name, self._goes_on, RECOVERY_TIMEOUT_S)
        if self._has_failed(killed_s):
            since = len(self.events)
            self.start()
            self._await("reported", 1, since)
        self._print_last()

    def judged(self) -> list[Judged]:
        """Judge all outages, each up to the next one."""
        events = self.events
        ends = [*(outage.killed_s for outage in self.outages[1:]), math.inf]
        return [judge(*each, events) for each in zip(self.outages, ends, strict=True)]

    def _goes_on(self, events: Sequence[Event]) -> bool:
        """Say whether enough batches ended after the latest outage, all was read or it failed."""
        back_s = self.outages[-1].back_s
        after = [event.kind for event in events if event.at_s > back_s]
        ended = after.count("ended")
        return "over" in after or ended > BATCHES_AFTER or (ended > 0 and self._is_all_read(events))

    def _is_all_read(self, events: Sequence[Event]) -> bool:
        return count_records(read_ranges(events)) == self.fed * self.kind.partitions

    def _print_last(self) -> None:
        """Say how the last outage went: a long run is to show what it does."""
        last = self.judged()[-1]
        outage = last.outage
        print(
            f"{self.name}: {outage.what} away {outage.seconds:.1f} s, {outage.moment}: "
            f"batches {last.planned}, next after {_one_wait(last.wait_s)}"
            + (", failed" if last.error else ""),
            flush=True,
        )

    def _has_failed(self, since_s: float) -> bool:
        over = self.driver.events(self.name, "over")
        return any(event.at_s > since_s for event in over)

    def _feed(self, count: int) -> None:
        self.fed += count
        partitions = self.kind.partitions
        records = count * partitions
        fill(self.broker.bootstrap, self.name, partitions, VALUE, records, PRODUCER_SETTINGS)

    def _await(self, kind: str, count: int, since: int) -> None:
        def is_there(events: Sequence[Event]) -> bool:
            return sum(event.kind == kind for event in events) >= count

        if not self.driver.wait(self.name, is_there, BATCH_TIMEOUT_S, since):
            raise BenchError(f"{self.name}: no {count} batches {kind} in {BATCH_TIMEOUT_S:.0f} s")

    def _await_plan(self) -> None:
        """Return when Spark has noted the offsets of its next batch, which it then reads."""
        planned = self.checkpoint / "offsets"
        before = {entry.name for entry in planned.iterdir()}
        deadline_s = time.monotonic() + BATCH_TIMEOUT_S
        while {entry.name for entry in planned.iterdir()} <= before:
            if time.monotonic() > deadline_s:
                raise BenchError(f"{self.name}: no batch was planned in {BATCH_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)


def measure(quick: bool) -> list[Row]:
    """Kill and judge; a few times and for seconds only when quick."""
    return run(QUICK if quick else FULL)


def run(plan: Plan) -> list[Row]:
    """Kill as planned and give the rows."""
    seed = int(os.environ.get(SEED_VARIABLE) or random.randrange(2**32))
    print(f"{FIGURE}: {SEED_VARIABLE}={seed}", flush=True)
    chance = random.Random(seed)
    with open_lab() as lab:
        broker = lab.enter(EmbeddedBroker(lab.work_dir / "broker"))
        driver = Driver.begin(lab, SPARK_TASKS)
        parts = [_prepare(lab, broker, driver, kind, chance) for kind in KINDS]
        with ThreadPoolExecutor(len(parts)) as threads:
            for _ in threads.map(Part.warm_up, parts):
                pass
            for _ in threads.map(partial(_kill_proxies, plan=plan), parts):
                pass
            whats = [What.BROKER] * plan.broker_kills + [What.BOTH] * plan.both_kills
            for what in whats:
                _kill_broker(broker, parts, what, plan.seconds(chance), chance)
                for _ in threads.map(Part.recover, parts):
                    pass
            judged = {part.name: part.judged() for part in parts}
            kills = plan.proxy_kills * sum(kind.is_adaptive for kind in KINDS) + len(whats)
            rows = _rows(parts, judged, f"{kills} kills, seed {seed}")
        rows.append(_warnings_row(driver.child.log_path.read_bytes()))
    return rows


def _prepare(
    lab: Lab, broker: EmbeddedBroker, driver: Driver, kind: Kind, chance: random.Random
) -> Part:
    create(broker.bootstrap, kind.name, kind.partitions)
    rule: dict[str, object] = {"client-id": kind.name, "consumer_byte_rate": "1GB"}
    if kind.is_adaptive:
        rule["adaptive"] = {
            "batch_interval": f"{TRIGGER_S}s",
            "min_rate": RATE,
            "max_rate": RATE,
        }
    folder = lab.work_dir / kind.name
    state = {"state": {"kind": "sqlite", "path": str(folder / "state.db")}}
    ports = free_ports(3 + BROKER_PORTS)
    ports = range(ports[0], ports[-1] + 1)
    proxy = Machine(folder, kind.name, broker.bootstrap, [rule], ports, state)
    lab.at_end(proxy.kill)
    proxy.start()
    checkpoint = lab.work_dir / f"{kind.name}-checkpoint"
    return Part(kind, broker, proxy, driver, checkpoint, random.Random(chance.random()))


def _kill_proxies(part: Part, plan: Plan) -> None:
    """Kill the proxy of one query, again and again, at each kind of moment in turn."""
    moments = list(Moment)
    first = part.chance.randrange(len(moments))
    for number in range(plan.proxy_kills):
        moment = moments[(first + number) % len(moments)]
        part.top_up()
        part.await_moment(moment)
        killed_s = time.monotonic()
        part.proxy.kill()
        time.sleep(plan.seconds(part.chance))
        part.proxy.start()
        part.outages.append(
            Outage(part.name, What.PROXY, moment, killed_s, back_s=time.monotonic())
        )
        part.recover()


def _kill_broker(
    broker: EmbeddedBroker,
    parts: Sequence[Part],
    what: What,
    seconds: float,
    chance: random.Random,
) -> None:
    """Kill or stop the broker at a moment of one query, and kill all proxies with it if wanted."""
    for part in parts:
        part.top_up()
    moment = chance.choice(list(Moment))
    seen = chance.choice([part for part in parts if part.kind.is_adaptive])
    seen.await_moment(moment)
    end_broker = chance.choice((broker.kill, broker.stop))
    killed_s = time.monotonic()
    end_broker()
    if what is What.BOTH:
        for part in parts:
            part.proxy.kill()
    time.sleep(seconds)
    broker.start()
    if what is What.BOTH:
        for part in parts:
            part.proxy.start()
    back_s = time.monotonic()
    for part in parts:
        as_seen = moment if part is seen else Moment.ANY
        part.outages.append(Outage(part.name, what, as_seen, killed_s, back_s))


def _rows(parts: Sequence[Part], judged: Mapping[str, list[Judged]], title: str) -> list[Row]:
    ours = [each for part in parts if part.kind.is_adaptive for each in judged[part.name]]
    plain = [each for part in parts if not part.kind.is_adaptive for each in judged[part.name]]
    rows = [Row(FIGURE, title, "", f"{len(ours)} outages of a query", Verdict.INFO)]
    for what in What:
        of_kind = [each for each in ours if each.outage.what == what]
        if of_kind:
            rows += [_batches_row(what, of_kind), _waits_row(what, of_kind)]
    waits = _seen(each.wait_s for each in plain)
    rows += [
        Row(
            FIGURE,
            "waits of a query without a bound",
            "",
            _wait_text(waits),
            Verdict.INFO,
            {"outages": [asdict(each) for each in plain]},
        ),
        _failures_row(ours, plain),
    ]
    for part in parts:
        wrong = faults(read_ranges(part.events))
        rows.append(
            Row(
                FIGURE,
                f"{part.name}: records lost or doubled",
                "none",
                "; ".join(wrong[:2]) or "none",
                Verdict.of(not wrong),
                {"faults": wrong},
            )
        )
    return rows


def _batches_row(what: What, judged: Sequence[Judged]) -> Row:
    largest = [max(each.planned, default=0) / BOUND for each in judged]
    above = [share for share in largest if share > MOST_OF_BOUND]
    lengths = [each.outage.seconds for each in judged]
    return Row(
        FIGURE,
        f"{what} away {min(lengths):.0f}-{max(lengths):.0f} s: batches",
        f"none above {MOST_OF_BOUND:g} times its bound",
        f"largest {max(largest):.1f}; after {len(above)} of {len(judged)} outages one above",
        Verdict.of(not above),
        {"outages": [asdict(each) for each in judged]},
    )


def _waits_row(what: What, judged: Sequence[Judged]) -> Row:
    waits = _seen(each.wait_s for each in judged if each.error is None)
    unfinished = sum(each.wait_s is None and each.error is None for each in judged)
    text = _wait_text(waits)
    if unfinished:
        text += f"; {unfinished} never went on"
    return Row(
        FIGURE,
        f"{what} back: until the next batch",
        f"at most a trigger, {TRIGGER_S} s, and {RECONNECT_S:g} s to connect",
        text,
        Verdict.of(not unfinished and max(waits, default=0.0) <= LONGEST_WAIT_S),
    )


def _failures_row(ours: Sequence[Judged], plain: Sequence[Judged]) -> Row:
    failed = [each for each in ours if each.error is not None]
    own = [each for each in plain if each.error is not None]
    shortest = min((each.outage.seconds for each in failed), default=None)
    text = f"{len(failed)} of {len(ours)}"
    if shortest is not None:
        text += f", the shortest outage {shortest:.0f} s"
    return Row(
        FIGURE,
        "queries that failed",
        "",
        f"{text}; without a bound {len(own)} of {len(plain)}",
        Verdict.INFO,
        {"errors": [each.error for each in failed]},
    )


def _warnings_row(log: bytes) -> Row:
    found = [line.decode(errors="replace") for line in log.splitlines() if _LOSS.search(line)]
    return Row(
        FIGURE,
        "warnings of Spark: lost records, incorrect offsets",
        "none",
        f"{len(found)}",
        Verdict.of(not found),
        {"lines": found},
    )


def _seen(waits: Iterable[float | None]) -> list[float]:
    return [wait_s for wait_s in waits if wait_s is not None]


def _one_wait(wait_s: float | None) -> str:
    return "none" if wait_s is None else f"{wait_s:.1f} s"


def _wait_text(waits: Sequence[float]) -> str:
    if not waits:
        return "no batch began"
    return f"median {statistics.median(waits):.1f} s, longest {max(waits):.1f} s"
