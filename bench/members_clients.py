"""Figure: which clients go on, and when, while the members that serve them come and go.

Of each library a member of a group, a reader without one and an idempotent writer are owned by one
member, which is then killed, kept from coming back, and so on. Libraries have their defaults.
"""

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from pathlib import Path

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from bench import golang, traffic
from bench.lab import Lab, open_lab, unviolated_rules
from bench.lasting_clients import INTERVAL_S, LIBRARIES, PARTITION
from bench.machines import BROKER_PORTS, Machine
from bench.processes import BenchError, Child, python
from bench.report import Row, Verdict
from bench.scale import start_machines
from bench.topics import create
from examples.devkit.broker import EmbeddedBroker
from examples.devkit.jars import connector_jars, kafka_jars
from examples.devkit.loopback import HOST

FIGURE = "members-clients"
SOURCE = "members-source"
GROUP, ALONE, WRITER = "group", "alone", "writer"
ROLES = {GROUP: "group", ALONE: "no group", WRITER: "idempotent producer"}
LINE_OF = {"group": GROUP, "alone": ALONE, "written": WRITER}
"""Which client a line of a child is about, by its first word."""

OWNED_NUMBER = 1
"""Of the worker, or machine, that owns all clients."""

WARM_UP_TIMEOUT_S, WARM_UP_LINES = 60.0, 20
CALM_S = 30.0
LOOP_S = 45.0
SETTLED_S = 35.0
"""By then a worker that came out of a crash loop has its clients again."""

AFTER_S = 2.0
"""In which readers come to the end of what was written."""

BACK_S = 30.0
"""When a client has to go on at the latest: some libraries wait that long for an answer."""

END_TIMEOUT_S = 60.0
BUILD_PROGRAM = "./lasting"


@dataclass(frozen=True, slots=True)
class Library:
    """How to start the three clients of a library."""

    title: str
    command: Sequence[str]


@dataclass(frozen=True, slots=True)
class Incident:
    """What happens to the owner of all clients, and how long clients are watched from then on."""

    title: str
    happen: Callable[[Machine], None]
    watch_s: float


@dataclass(frozen=True, slots=True)
class Layout:
    """How many processes serve the clients, and what happens to them."""

    machines: int
    workers: int
    incidents: Sequence[Incident]


WORKERS = Layout(
    1,
    3,
    (
        Incident("a worker is killed", lambda it: it.kill_worker(OWNED_NUMBER), CALM_S),
        Incident(
            "a worker is killed whenever it serves",
            lambda it: it.kill_worker_again_and_again(OWNED_NUMBER, LOOP_S),
            LOOP_S + CALM_S,
        ),
        Incident("its clients come back to it", lambda _: None, SETTLED_S),
    ),
)
MACHINES = Layout(
    3,
    1,
    (
        Incident("a machine is killed", Machine.kill, CALM_S),
        Incident("it is started again", Machine.start, CALM_S),
        Incident("it is drained", Machine.drain, CALM_S),
    ),
)


@dataclass(slots=True)
class Seen:
    """What one client has done: numbers, and when on the monotonic clock."""

    numbers: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)


class Clients:
    """The three clients of a library, in a process of their own."""

    def __init__(self, library: Library, child: Child, sink: str) -> None:
        self.title, self.sink = library.title, sink
        self.seen = {role: Seen() for role in ROLES}
        self.failed = 0
        """Records that the library has given up."""
        self.begun_again = 0
        """How often a client failed, and another one took its place."""
        self._child = child
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._child.process.stdout is not None
        for line in self._child.process.stdout:
            what, _, number = line.decode().partition(" ")
            if what in LINE_OF:
                seen = self.seen[LINE_OF[what]]
                seen.numbers.append(int(number))
                seen.at_s.append(time.monotonic())
            self.failed += what == "failed"
            self.begun_again += what == "again"

    def stop(self) -> None:
        """End them; all that they did is seen."""
        self._child.process.kill()
        self._thread.join()

    @property
    def work(self) -> bool:
        """Whether all three have begun to."""
        return all(len(seen.at_s) >= WARM_UP_LINES for seen in self.seen.values())


@dataclass(frozen=True, slots=True)
class Happened:
    """An incident, when it began and when the next one did, on the monotonic clock."""

    title: str
    start_s: float
    end_s: float


class Source:
    """Writes numbered records to a topic, until it is stopped, past the proxy."""

    def __init__(self, bootstrap: str) -> None:
        self.written = 0
        self._bootstrap, self._over = bootstrap, threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return when all is written."""
        self._over.set()
        self._thread.join()

    def _write(self) -> None:
        producer = Producer({"bootstrap.servers": self._bootstrap, "enable.idempotence": True})
        while not self._over.wait(INTERVAL_S):
            producer.produce(SOURCE, b"%d" % self.written, partition=PARTITION)
            self.written += 1
            producer.poll(0)
        if producer.flush(END_TIMEOUT_S):
            raise BenchError(f"{SOURCE} was not written")


def measure(quick: bool, layout: Layout = WORKERS) -> list[Row]:
    """Let all incidents happen with all clients at once, then judge; `quick` leaves Go out."""
    with open_lab() as lab:
        libraries = [*_libraries(lab.work_dir, with_go=not quick)]
        broker = lab.enter(EmbeddedBroker(lab.work_dir / "broker"))
        create(broker.bootstrap, SOURCE, 1)
        machines = start_machines(
            lab, broker.bootstrap, unviolated_rules(), layout.machines, layout.workers
        )
        owner = machines[OWNED_NUMBER % layout.machines]
        source = Source(broker.bootstrap)
        clients = [_start(lab, each, broker.bootstrap, machines, layout) for each in libraries]
        _await_work(clients)
        happened = [*_happen(owner, layout.incidents)]
        source.stop()
        time.sleep(AFTER_S)
        for each in clients:
            each.stop()
        return [
            row
            for each in clients
            for row in _judge(each, happened, source.written, broker.bootstrap)
        ]


def _libraries(folder: Path, *, with_go: bool) -> Iterable[Library]:
    for jar in (*connector_jars(), *kafka_jars()):
        name, _, version = jar.stem.rpartition("-")
        if name == "kafka-clients":
            command = python("bench.lasting_java", f"--jar={jar}")
            yield Library(f"Java {version}", command)
    for name in LIBRARIES:
        yield Library(name, python("bench.lasting_clients", f"--library={name}"))
    go = golang.find_go() if with_go else None
    if go is not None:
        yield Library("franz-go", [str(golang.build(go, folder / "lasting", BUILD_PROGRAM))])


def _start(
    lab: Lab, library: Library, cluster: str, machines: Sequence[Machine], layout: Layout
) -> Clients:
    name = library.title.replace(" ", "-")
    sink = f"members-sink-{name}"
    create(cluster, sink, 1)
    # It begins at one that will not be killed, as far as there is another one.
    bootstrap = machines[0].bootstrap
    is_owned = partial(_is_owned, machines, layout)
    options = {role: _owned_name(f"{name}-{role}", is_owned) for role in ROLES}
    options |= {"bootstrap": bootstrap, "source": SOURCE, "sink": sink}
    given = [f"--{key}={value}" for key, value in options.items()]
    return Clients(library, lab.start_helper(name, [*library.command, *given]), sink)


def _owned_name(name: str, is_owned: Callable[[str], bool]) -> str:
    return next(each for number in count() if is_owned(each := f"{name}-{number}"))


def _is_owned(machines: Sequence[Machine], layout: Layout, client_id: str) -> bool:
    """Return whether the one to which all happens owns a client: by the port that it is told."""
    _, port = traffic.advertised_address((HOST, machines[0].port), client_id)
    owner = machines[OWNED_NUMBER % layout.machines]
    places = owner.broker_ports
    if layout.machines == 1:
        places = places[OWNED_NUMBER * BROKER_PORTS : (OWNED_NUMBER + 1) * BROKER_PORTS]
    return port in places


def _await_work(clients: Sequence[Clients]) -> None:
    deadline_s = time.monotonic() + WARM_UP_TIMEOUT_S
    while idle := [each.title for each in clients if not each.work]:
        if time.monotonic() > deadline_s:
            raise BenchError(f"these clients do not begin: {', '.join(idle)}")
        time.sleep(INTERVAL_S)


def _happen(owner: Machine, incidents: Iterable[Incident]) -> Iterable[Happened]:
    for incident in incidents:
        start_s = time.monotonic()
        print(f"{incident.title} …", flush=True)
        incident.happen(owner)
        time.sleep(max(start_s + incident.watch_s - time.monotonic(), 0.0))
        yield Happened(incident.title, start_s, time.monotonic())


def _judge(
    clients: Clients, happened: Sequence[Happened], written: int, cluster: str
) -> Iterable[Row]:
    for role, seen in clients.seen.items():
        if role == WRITER:
            at_sink = Counter(_read_all(cluster, clients.sink))
            # What was acknowledged has to be there; what was given up counts as lost, too.
            lost = sum(number not in at_sink for number in seen.numbers) + clients.failed
            twice = at_sink.total() - len(at_sink)
        else:
            times = Counter(seen.numbers)
            lost = sum(number not in times for number in range(written))
            twice = times.total() - len(times)
        gaps = [longest_gap_s(seen.at_s, each.start_s, each.end_s) for each in happened]
        silent = [_gap_text(each, gap) for each, gap in zip(happened, gaps, strict=True)]
        again = f", {clients.begun_again} begun again" if clients.begun_again else ""
        is_met = not lost and not twice and all(gap <= BACK_S for gap in gaps)
        yield Row(
            FIGURE,
            f"{clients.title}, {ROLES[role]}",
            f"silent <= {BACK_S:.0f} s, none lost or twice",
            f"{'; '.join(silent)}; {lost} lost, {twice} twice{again}",
            Verdict.of(is_met),
            {"at_s": seen.at_s, "happened_s": [each.start_s for each in happened], "gaps_s": gaps},
        )


def _gap_text(happened: Happened, gap_s: float) -> str:
    is_silent = gap_s >= happened.end_s - happened.start_s
    return f"{happened.title}: " + ("silent" if is_silent else f"{gap_s:.1f} s")


def longest_gap_s(at_s: Sequence[float], start_s: float, end_s: float) -> float:
    """Return the longest time without anything between two moments."""
    within = [start_s, *at_s[bisect_left(at_s, start_s) : bisect_left(at_s, end_s)], end_s]
    return max(after - before for before, after in pairwise(within))


def _read_all(cluster: str, topic: str) -> Iterable[int]:
    settings = {"bootstrap.servers": cluster, "group.id": "bench", "enable.partition.eof": True}
    consumer = Consumer(settings)
    consumer.assign([TopicPartition(topic, PARTITION, 0)])
    deadline_s = time.monotonic() + END_TIMEOUT_S
    try:
        while time.monotonic() < deadline_s:
            for message in consumer.consume(1000, 1.0):
                error = message.error()
                if error is None:
                    yield int(message.value())
                elif error.code() == KafkaError._PARTITION_EOF:
                    return
        raise BenchError(f"{topic} has no end")
    finally:
        consumer.close()
