"""Figures that compare the proxy with HAProxy in TCP mode with one thread: a table of loads.

HAProxy runs as installed, once copying and once with `splice-auto`; the faster of the two is the
yardstick. Where Kroxylicious is installed, its figures are shown beside them. A client that is
followed has an adaptive rule and a query, as the README tells users to write. With acks=0 there is
no response: timed is the way to the broker, with a pause after each request. By TLS both encrypt
with one thread, by the same cipher; the client does not decrypt (see `tls_records`).
"""

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench import traffic
from bench.comparison import (
    CAPACITY,
    CPU_EACH,
    CPU_PER_GB,
    P50,
    THROUGHPUT,
    Contest,
    Goal,
    Line,
    Ring,
    anywhere,
)
from bench.lab import Certificate, Target, followed_rule, open_lab, topic_rule, unviolated_rules
from bench.processes import BenchError
from bench.report import Row
from bench.tls_records import tls_context

CLIENT_ID, FOLLOWED_ID = "bench-compared", "bench-followed"
PROXY, FOLLOWED, NOT_FOLLOWED = "proxy", "followed", "not followed"
BY_TOPIC, NO_TOPIC = "by topic", "not by topic"
METERED, NOT_METERED = "metered", "not metered"
ROUNDS = 7
CONNECT_TIMEOUT_S = 10.0
JAVA_WARM_UP = 20  # as long as so many trials
MEDIUM_BYTES, LARGE_BYTES = 20_000, 1_000_000
CONNECTIONS, MANY, MOST = 2, 16, 256
# librdkafka before 2.5 asks with version 11, Java and later ones with the last that is offered: 15.
OLD_VERSION = 11
# max.in.flight.requests.per.connection of Kafka's Java client.
DEPTH = 5
# Of a producer that waits for nothing, but for the last of a train.
UNANSWERED = 20
ACKS = {"0": 0, "1": 1, "all": -1}

# What the process under test carries counts beside p50: for requests that wait for one another, the
# wake-ups are much of a round trip.
SMALL_GOALS = (
    Goal(PROXY, P50, 1.0),
    Goal(PROXY, CAPACITY, 1.0),
    Goal(FOLLOWED, P50, 1.1),
    Goal(FOLLOWED, CAPACITY, 0.8),
)
WALKED_GOALS = (Goal(PROXY, P50, 0.45), Goal(FOLLOWED, P50, 1.0), Goal(FOLLOWED, CAPACITY))
PRODUCE_GOALS = (Goal(PROXY, P50, 1.0), Goal(PROXY, CAPACITY, 1.0))


@dataclass(frozen=True, slots=True)
class Duel:
    """One figure.

    Attributes:
        figure: as printed.
        contests: its loads.
        seconds: of each trial, and of one in a quick run.
        clients: by name of a line through the proxy, its client id.
        rival: the line that the others are compared with; empty for HAProxy.
        by_tls: clients connect by TLS.

    """

    figure: str
    contests: Sequence[Contest]
    seconds: tuple[float, float]
    clients: Mapping[str, str] = field(default_factory=lambda: {PROXY: CLIENT_ID})
    rival: str = ""
    by_tls: bool = False

    def measure(self, quick: bool) -> list[Row]:
        """Run all lines in turn and give the rows."""
        full_s, quick_s = self.seconds
        with open_lab() as lab:
            certificate = lab.make_certificate() if self.by_tls else None
            loads = [contest.load for contest in self.contests]
            fetched = {load.max_bytes // load.partitions for load in loads if load.acks is None}
            direct = lab.start_generator(fetched)
            rivals = [] if self.rival else lab.start_haproxy(direct.address, certificate)
            rules, queries = unviolated_rules(), []
            if BY_TOPIC in self.clients:
                rules = [topic_rule(self.clients[BY_TOPIC]), *rules]
            if FOLLOWED in self.clients:
                rules, queries = [followed_rule(FOLLOWED_ID), *rules], [{"name": FOLLOWED_ID}]
            proxy = lab.start_proxy(
                direct.address, rules, queries=queries, certificate=certificate
            ).target()
            targets = dict.fromkeys(self.clients, proxy)
            if METERED in self.clients:  # no interval ends: the generator takes no records
                metered = lab.start_proxy(direct.address, rules, usage={"interval": "1h"})
                targets[METERED] = metered.target()
            lines = [
                Line(name, targets[name], client_id) for name, client_id in self.clients.items()
            ]
            by_java = [] if self.rival or self.by_tls else lab.start_kroxylicious(direct.address)
            lines += [Line(target.name, target, CLIENT_ID) for target in (*rivals, *by_java)]
            contests = self.contests
            if certificate is not None:
                contests = _by_tls(contests, [proxy, *rivals], certificate)
            elif not self.rival:
                lines.append(Line(direct.name, direct, CLIENT_ID))
            names = [self.rival] if self.rival else [target.name for target in rivals]
            rounds, duration_s = (1, quick_s) if quick else (ROUNDS, full_s)
            ring = Ring(lab, direct, lines, names, rounds, duration_s)
            for target in by_java:  # it compiles what it runs
                warming_up = replace(contests[0], longer=1 if quick else JAVA_WARM_UP)
                ring.try_once(Line(target.name, target, CLIENT_ID), warming_up)
            return [row for contest in contests for row in ring.run(self.figure, contest)]


def _small() -> Iterator[Contest]:
    small = traffic.small_batch_bytes()
    asked = {
        "100 B record": (small, 1, 0),
        f"100 B record, version {OLD_VERSION}": (small, 1, OLD_VERSION),
        "20 kB": (MEDIUM_BYTES, 1, 0),
        "50 x 20 kB": (MEDIUM_BYTES, 50, 0),
        "300 x 3 kB": (3_000, 300, 0),
    }
    for title, (batch_bytes, partitions, version) in asked.items():
        load = anywhere(
            connections=1,
            max_bytes=batch_bytes * partitions,
            batch_bytes=batch_bytes,
            partitions=partitions,
            in_session=True,
            version=version,
        )
        yield Contest(title, load, WALKED_GOALS if partitions > 1 else SMALL_GOALS, latency=True)
    for connections in (MANY, MOST):
        for depth in (1, DEPTH):
            # One request of a session at a time. No consumer that we know has several under way
            # on a connection; one that had would know where each record batch ends.
            load = anywhere(
                connections=connections,
                max_bytes=small,
                batch_bytes=small,
                depth=depth,
                in_session=depth == 1,
                reads_on=depth > 1,
            )
            longer = 3 if connections == MOST else 1
            title = f"100 B record, {connections} x {depth}"
            yield Contest(title, load, SMALL_GOALS, longer=longer)


def _partitions(*goals: Goal) -> Iterator[Contest]:
    for partitions in (1, 10, 100):
        load = anywhere(
            connections=1,
            max_bytes=MEDIUM_BYTES * partitions,
            batch_bytes=MEDIUM_BYTES,
            partitions=partitions,
            in_session=True,
        )
        yield Contest(f"{partitions} x 20 kB", load, goals, latency=True)


def _large(*goals: Goal) -> list[Contest]:
    load = anywhere(connections=CONNECTIONS, max_bytes=LARGE_BYTES, in_session=True)
    return [Contest(f"1 MB, {CONNECTIONS} connections", load, goals)]


def _produced() -> Iterator[Contest]:
    small = traffic.small_batch_bytes()
    for size, max_bytes in {"100 B": small, "20 kB": MEDIUM_BYTES, "1 MB": LARGE_BYTES}.items():
        for name, acks in ACKS.items():
            load = anywhere(connections=1, max_bytes=max_bytes, acks=acks)
            yield Contest(f"{size}, acks={name}", load, PRODUCE_GOALS, latency=True)
    load = anywhere(connections=1, max_bytes=small, acks=1, unanswered=UNANSWERED)
    title = f"100 B, {UNANSWERED} with acks=0, then acks=1"
    yield Contest(title, load, PRODUCE_GOALS, latency=True)
    for connections in (1, MANY, MOST):
        load = anywhere(connections=connections, max_bytes=small, depth=DEPTH, acks=1)
        longer = 3 if connections == MOST else 1
        title = f"100 B, acks=1, {connections} x {DEPTH}"
        yield Contest(title, load, PRODUCE_GOALS, longer=longer)
    goals = Goal(PROXY, THROUGHPUT, 1.2), Goal(PROXY, CPU_PER_GB, 1.0)
    for name, acks in ACKS.items():
        load = anywhere(connections=CONNECTIONS, max_bytes=LARGE_BYTES, depth=DEPTH, acks=acks)
        yield Contest(f"1 MB, acks={name}, {CONNECTIONS} connections", load, goals)


def _by_tls(
    contests: Sequence[Contest], targets: Sequence[Target], certificate: Certificate
) -> list[Contest]:
    """Have clients connect by TLS, and name the cipher, which must be the same at all targets."""
    ciphers = {target.name: _cipher(target, certificate) for target in targets}
    if len(set(ciphers.values())) > 1:
        raise BenchError(f"different ciphers: {ciphers}")
    return [
        replace(
            contest,
            title=f"{contest.title}, {ciphers[PROXY]}",
            load=replace(contest.load, ca_file=certificate.ca_file),
        )
        for contest in contests
    ]


def _cipher(target: Target, certificate: Certificate) -> str:
    context = tls_context(certificate.ca_file)
    with (
        socket.create_connection(target.address, CONNECT_TIMEOUT_S) as plain,
        context.wrap_socket(plain) as connection,
    ):
        cipher = connection.cipher()
    return cipher[0] if cipher else "none"


DUELS = {
    "large": Duel(
        "large fetch",
        _large(Goal(PROXY, THROUGHPUT, 2.3), Goal(PROXY, CPU_PER_GB, 1.0)),
        (1.5, 1.0),
    ),
    "progress": Duel(
        "progress",
        _large(Goal(FOLLOWED, THROUGHPUT, 0.95), Goal(FOLLOWED, CPU_PER_GB)),
        (1.5, 1.0),
        {FOLLOWED: FOLLOWED_ID, NOT_FOLLOWED: CLIENT_ID},
        rival=NOT_FOLLOWED,
    ),
    "topics": Duel(
        "rule with a topic",
        [*_partitions(Goal(BY_TOPIC, P50), Goal(BY_TOPIC, CPU_EACH))],
        (1.0, 0.5),
        {BY_TOPIC: "bench-topic", NO_TOPIC: CLIENT_ID},
        rival=NO_TOPIC,
    ),
    "metering": Duel(
        "metering",
        [
            *(
                replace(each, goals=(Goal(METERED, P50, 1.02), Goal(METERED, CPU_EACH)))
                for each in _small()
            ),
            *_large(Goal(METERED, THROUGHPUT, 0.99), Goal(METERED, CPU_PER_GB)),
        ],
        (1.0, 0.5),
        {METERED: CLIENT_ID, NOT_METERED: CLIENT_ID},
        rival=NOT_METERED,
    ),
    "small": Duel(
        "small fetch", [*_small()], (1.0, 0.5), {PROXY: CLIENT_ID, FOLLOWED: FOLLOWED_ID}
    ),
    "produce": Duel("produce", [*_produced()], (0.8, 0.5)),
    "tls": Duel(
        "tls",
        [
            replace(next(_small()), goals=(Goal(PROXY, P50), Goal(PROXY, CAPACITY))),
            *_large(Goal(PROXY, THROUGHPUT, 0.7), Goal(PROXY, CPU_PER_GB)),
        ],
        (1.5, 1.0),
        by_tls=True,
    ),
}
