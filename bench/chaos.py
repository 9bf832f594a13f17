"""Figure: clients keep to their bounds, and lose and double nothing, while members come and go.

A raw client and a Spark query always want more than their bounds, before a real broker. First they
are served by the workers of one machine: one is killed, one is killed again and again, other rules
are put in force, another process takes over, and the machine is drained and started. Then by a tier
of three machines of two workers each: a worker is killed, a machine is killed, one is added, one is
drained, and one is stopped where it is for longer than a member of the group may be silent.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench import traffic
from bench.lab import open_lab
from bench.machines import BROKER_PORTS, Machine
from bench.member_loads import QUERY, QUERY_VALUE_BYTES, RAW, Arrivals, Members
from bench.processes import BenchError
from bench.query_reads import QueryReads, count_records, faults
from bench.rates import most_within
from bench.report import Row, Verdict
from examples.devkit.loopback import HOST

FIGURE = "chaos"
RAW_BOUND, QUERY_BOUND = 8_000_000, 2_000_000
MOST, WINDOW_S = 1.25, 30.0
"""In any window so long, so many times the bound."""

LOOK_STEP_S = 0.25
BATCH_S = 3
FREEZE_S = 12.0
LOOP_S = 20.0
"""So long a worker is killed whenever it serves: others have its clients before."""

FULL_CALM_S, QUICK_CALM_S = 60.0, 30.0
"""After each event, until the next one."""

WARM_UP_S = 40.0
END_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Goal:
    """When a client is to be at its rate again: at so much of its bound in each look from then."""

    who: str
    bound: int
    share: float
    look_s: float
    """Over which time a rate is taken."""
    back_s: float


RAW_GOAL = Goal("raw client", RAW_BOUND, 0.9, 4.0, 5.0)  # two seconds of it are some 15 answers

QUERY_GOAL = Goal("query", QUERY_BOUND, 0.8, 3.0 * BATCH_S, 15.0)
"""What it gets comes by the megabyte, and not between two batches: in a look as long as three of
them 3 of 18 may come before it or after it."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that happens to a machine."""

    title: str
    happen: Callable[[Machine], None]
    lasts: bool = False
    """Whether clients can be at their rates again only when it is over."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How many processes serve the clients, and what happens to the machine of the raw client."""

    title: str
    machines: int
    workers: int
    incidents: Sequence[Incident]


def _loop(machine: Machine) -> None:
    machine.kill_worker_again_and_again(_owner_of_raw(machine), LOOP_S)


def _kill_owner(machine: Machine) -> None:
    machine.kill_worker(_owner_of_raw(machine))


def _owner_of_raw(machine: Machine) -> int:
    """Return the worker that has the raw client."""
    return machine.broker_ports.index(_port_of_raw(machine)) // BROKER_PORTS


def _port_of_raw(machine: Machine) -> int:
    """Return the broker's port that a machine tells the raw client."""
    _, port = traffic.advertised_address((HOST, machine.port), RAW)
    return port


def _struck(machines: Sequence[Machine]) -> Machine:
    """Return the machine that is down; where all are up, the one that has the raw client."""
    for machine in machines:
        if not machine.is_up:
            return machine
    port = _port_of_raw(machines[0])
    return next(machine for machine in machines if port in machine.broker_ports)


def _reload(machine: Machine) -> None:
    """Put rules in force by which clients share what they did not before: their owners change."""
    machine.reload([*RULES, *SHARING_RULES])


def _restart(machine: Machine) -> None:
    machine.drain()
    machine.start()


def _freeze(machine: Machine) -> None:
    machine.freeze()
    time.sleep(FREEZE_S)
    machine.thaw()


RULES = (
    {"client-id": RAW, "consumer_byte_rate": RAW_BOUND},
    {"client-id": QUERY, "consumer_byte_rate": QUERY_BOUND},
)
SHARING_RULES = (
    {"client-id-prefix": "bench-", "producer_byte_rate": RAW_BOUND, "scope": "shared"},
)
WORKERS = (
    Incident("a worker is killed", _kill_owner),
    Incident(f"a worker is killed again and again for {LOOP_S:.0f} s", _loop),
    Incident("its clients come back", lambda _: None),
    Incident("other rules are put in force", _reload),
    Incident("another process takes over", Machine.replace),
    Incident("the machine is drained and started", _restart),
)
MACHINES = (
    Incident("a worker is killed", _kill_owner),
    Incident("a machine is killed", Machine.kill),
    Incident("a machine is added", Machine.start),
    Incident("a machine is drained", Machine.drain),
    Incident("a machine is added again", Machine.start),
    Incident(f"a machine is frozen for {FREEZE_S:.0f} s", _freeze, lasts=True),
)
LAYOUTS = (
    Layout("3 workers", 1, 3, WORKERS),
    Layout("3 machines", 3, 2, MACHINES),
)


@dataclass(frozen=True, slots=True)
class Happened:
    """An incident, when it began and when the next one did, on the monotonic clock.

    Clients have their rates back, at best, from `back_from_s` on.
    """

    title: str
    start_s: float
    back_from_s: float
    end_s: float


def measure(quick: bool, layouts: Sequence[Layout] = LAYOUTS) -> list[Row]:
    """Let all incidents happen in each layout, then judge."""
    calm_s = QUICK_CALM_S if quick else FULL_CALM_S
    return [row for layout in layouts for row in _measure(layout, calm_s)]


def _measure(layout: Layout, calm_s: float) -> list[Row]:
    total_s = WARM_UP_S + len(layout.incidents) * (calm_s + LOOP_S) + WINDOW_S
    records = round(QUERY_BOUND * total_s) // QUERY_VALUE_BYTES
    each_trigger = QUERY_BOUND * BATCH_S // QUERY_VALUE_BYTES
    with open_lab() as lab:
        members = Members.start(lab, layout.machines, layout.workers, RULES, records, each_trigger)
        time.sleep(WARM_UP_S)
        happened = [*_happen(members.machines, layout.incidents, calm_s)]
        rows = [_fed_row(layout, members.reads, records)]
        members.query.stop()
    query = members.query.arrivals
    for each in happened:
        rows += _judge(each, members.raw, RAW_GOAL)
        rows += _judge(each, query, QUERY_GOAL)
    return rows


def _happen(
    machines: Sequence[Machine], incidents: Sequence[Incident], calm_s: float
) -> Iterable[Happened]:
    for incident in incidents:
        machine = _struck(machines)
        start_s = time.monotonic()
        print(f"{incident.title} …", flush=True)
        incident.happen(machine)
        back_from_s = time.monotonic() if incident.lasts else start_s
        time.sleep(calm_s)
        yield Happened(incident.title, start_s, back_from_s, time.monotonic())


def _judge(happened: Happened, arrivals: Arrivals, goal: Goal) -> list[Row]:
    """Give the highest rate in a window that has the incident in it, and when it was back."""
    window = _within(arrivals, happened.start_s - WINDOW_S, happened.end_s)
    most = most_within(window.at_s, window.sizes, WINDOW_S) / WINDOW_S / goal.bound
    back_s = _back_s(arrivals, happened, goal)
    is_back = back_s is not None and back_s <= goal.back_s
    return [
        Row(
            FIGURE,
            f"{happened.title}: {goal.who}, any {WINDOW_S:.0f} s",
            f"<= {MOST:g} x bound",
            f"{most:.2f} x bound",
            Verdict.of(most <= MOST),
            {"at_s": window.at_s, "sizes": window.sizes, "incident_s": happened.start_s},
        ),
        Row(
            FIGURE,
            f"{happened.title}: {goal.who}, at its rate again",
            f"<= {goal.back_s:.0f} s",
            "not again" if back_s is None else f"{back_s:.1f} s",
            Verdict.of(is_back),
        ),
    ]


def _within(arrivals: Arrivals, start_s: float, end_s: float) -> Arrivals:
    kept = Arrivals()
    for at_s, size in zip(arrivals.at_s, arrivals.sizes, strict=True):
        if start_s <= at_s <= end_s:
            kept.add(at_s, size)
    return kept


def _back_s(arrivals: Arrivals, happened: Happened, goal: Goal) -> float | None:
    """Return after how long the client is at its rate in each look that begins then or later.

    Looks begin within the first `WINDOW_S`. None: it is not at its rate in the last one.
    """
    start_s, look_s = happened.back_from_s, goal.look_s
    looks = range(int((min(WINDOW_S, happened.end_s - look_s - start_s)) / LOOK_STEP_S))
    back = 0
    for look in looks:
        at_s = start_s + look * LOOK_STEP_S
        if sum(_within(arrivals, at_s, at_s + look_s).sizes) < goal.share * goal.bound * look_s:
            back = look + 1
    return None if back == len(looks) else back * LOOK_STEP_S


def _fed_row(layout: Layout, reads: QueryReads, records: int) -> Row:
    """Await the end of the topic, and say which rows were lost or came twice."""
    if not reads.wait(records, END_TIMEOUT_S + records * QUERY_VALUE_BYTES / QUERY_BOUND):
        raise BenchError(f"the query did not come to its end in {END_TIMEOUT_S:.0f} s")
    batches = reads.batches()
    read, wrong = count_records(batches), faults(batches)
    measured = "; ".join([f"{read} of {records} rows", *wrong[:2]])
    is_met = not wrong and read == records
    return Row(
        FIGURE, f"{layout.title}: rows of the query", "each once", measured, Verdict.of(is_met)
    )
