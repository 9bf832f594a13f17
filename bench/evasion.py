"""Figure: what a client gets that does all it can to get more than its bound of 1 MB/s.

A client that was quiet may take ALLOWANCE_S of its bound at once. So an ordinary client takes that
first, and a little more; then the attempt goes on in its name, and may get no more than the bound.
Where a machine is so slow that the ordinary client stayed below the bound, the attempt may get what
was left over.

Real broker, proxies at their defaults, one in each throttle mode. Attempts go on side by side, as
each of them should take no more than its bound; one that got 500 MB all the same ends there.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle, repeat

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from confluent_kafka.cimpl import NewTopic

from bench import frames, greedy
from bench.greedy import Address, Run, Seat
from bench.lab import open_lab
from bench.report import Row, Verdict
from examples.devkit.broker import EmbeddedBroker

FIGURE = "evasion"
USER = ("alice", "alice-secret")
DURATION_S = 30.0
QUICK_DURATION_S = 5.0
MOST_BYTES = 500_000_000

BOUND = 1_000_000
"""Bytes per second."""
RATES: dict[str, str | int] = {"consumer_byte_rate": BOUND, "producer_byte_rate": BOUND}
RULES: list[dict[str, str | int]] = [{"client-id": "<default>", **RATES}]
"""Each client id by itself."""

ALLOWANCE_S = 10.0
"""Of the bound, that a client may take at once by Kafka's formula at its defaults."""
BURST_S = 1.0
TOLERANCE = 1.1

SPENT_BYTES = 12 * BOUND
"""What the ordinary client takes: the allowance, and enough to be held."""
SPEND_TIMEOUT_S = 60.0

TOPIC = "evasion"
TOPIC_BYTES = 60_000_000
BATCH_BYTES = 16_000
"""Of the one record in each of its batches."""
TOPIC_CONFIG = {"retention.ms": "-1"}
"""By their timestamps the records are very old."""
ADMIN_TIMEOUT_S = 30.0
LEADER_POLL_S = 0.05

MEGABYTE = 1_000_000
PRODUCED_BYTES = 100_000
"""Of one record, which is one request."""
OTHER_CLIENT_IDS = 1000
"""Fewer than `limits.max_client_entities`."""
DEPTH = 60
"""Requests under way on a connection, a few below `limits.max_in_flight_requests`."""
PATIENCE_S = 0.1

MODES = ("delay", "mute")
LOGIN = "login"


@dataclass(frozen=True, slots=True)
class Reading:
    """Asks for so many bytes at a time; see `greedy.ask`."""

    max_bytes: int = MEGABYTE
    version: int = frames.FETCH_VERSION
    connections: int = 1
    depth: int = 1
    leaves: bool = False
    patience_s: float | None = None
    is_anonymous: bool = False
    changes_client_id: bool = False

    def __call__(self, run: Run, seat: Seat) -> None:
        """Go on until the run is over."""
        client_ids: list[str | None] = [None if self.is_anonymous else seat.client_id]
        if self.changes_client_id:
            client_ids += [f"{seat.client_id}-{number}" for number in range(OTHER_CLIENT_IDS)]
        requests = [
            frames.fetch(seat.topic, self.max_bytes, client_id, self.version)
            for client_id in client_ids
        ]
        greedy.ask(
            run,
            seat,
            cycle(requests),
            connections=self.connections,
            depth=self.depth,
            leaves=self.leaves,
            patience_s=self.patience_s,
        )


@dataclass(frozen=True, slots=True)
class Writing:
    """Produces, and waits for no answer; see `greedy.pour` and `greedy.drop`."""

    acks: int = 1
    connections: int = 1
    leaves: bool = False

    def __call__(self, run: Run, seat: Seat) -> None:
        """Go on until the run is over."""
        request = frames.produce(seat.topic, PRODUCED_BYTES, seat.client_id, self.acks)
        if self.leaves:
            greedy.drop(run, seat, request)
        else:
            greedy.pour(run, seat, request, connections=self.connections)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to get past a bound.

    Attributes:
        what: for people.
        act: what the client does.
        way: which proxy it goes through, a key of `Ground.proxies`.
        spends: whether the allowance is taken before; else the attempt takes it.

    """

    what: str
    act: Reading | Writing
    way: str
    spends: bool = True

    @property
    def name(self) -> str:
        """Its client id, and the name of the topic that it produces to."""
        return f"{self.what.replace(' ', '-').replace(',', '')}-{self.way}"

    @property
    def piece_bytes(self) -> int:
        """What each connection may be ahead by: a batch of the topic, or a request."""
        return PRODUCED_BYTES if isinstance(self.act, Writing) else BATCH_BYTES


_ACTS: dict[str, Reading | Writing] = {
    "1 MB at a time": Reading(),
    "50 MB at a time": Reading(50 * MEGABYTE),
    "oldest Fetch version": Reading(version=frames.OLDEST_FETCH_VERSION),
    "60 requests under way": Reading(depth=DEPTH),
    "20 connections": Reading(connections=20),
    "100 connections, 10 MB at a time": Reading(10 * MEGABYTE, connections=100),
    "no client id": Reading(depth=2, is_anonymous=True),
    "another client id in each request": Reading(depth=2, changes_client_id=True),
    "reconnect after each answer": Reading(leaves=True),
    "reconnect before the answer": Reading(leaves=True, patience_s=PATIENCE_S),
    "produce, answers not read": Writing(),
    "produce, answers not read, 10 connections": Writing(connections=10),
    "produce and reconnect": Writing(leaves=True),
    "produce without acks": Writing(acks=0),
    "produce without acks, 10 connections": Writing(acks=0, connections=10),
    "produce without acks and reconnect": Writing(acks=0, leaves=True),
}
_WHEN_QUIET = ("50 MB at a time", "60 requests under way", "100 connections, 10 MB at a time")
"""All that is asked for before the first answer is measured."""

ATTEMPTS = [
    *[Attempt(what, act, mode) for what, act in _ACTS.items() for mode in MODES],
    *[
        Attempt(f"{what}, when quiet", _ACTS[what], mode, spends=False)
        for what in _WHEN_QUIET
        for mode in MODES
    ],
    Attempt("requests behind a login in one write", Reading(depth=DEPTH, leaves=True), LOGIN),
]


@dataclass(frozen=True, slots=True)
class Ground:
    """Where attempts are made.

    Attributes:
        broker: its plain listener, as `HOST:PORT`.
        proxies: one for each throttle mode, with RULES; and for LOGIN one before the broker's SASL
            listener, with RATES for `user`.
        user: name and password.

    """

    broker: str
    proxies: dict[str, Address]
    user: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an attempt.

    Attributes:
        got_bytes: by the attempt, in `elapsed_s`.
        spent_bytes: what the ordinary client took before, in `spent_s`.
        told_ms: the longest throttle time in a Fetch response, 0 for none.
        requests: how many the attempt sent.

    """

    attempt: Attempt
    got_bytes: int
    elapsed_s: float
    spent_bytes: int
    spent_s: float
    told_ms: int
    requests: int

    @property
    def times_bound(self) -> float:
        """Rate of the attempt, in bounds."""
        return self.got_bytes / self.elapsed_s / BOUND

    @property
    def allowed_bytes(self) -> float:
        """What the attempt may get: the bound for its time, and what the client had left over.

        It has the allowance left unless that was taken, or what it took more slowly than its bound.
        """
        left_s = ALLOWANCE_S
        if self.attempt.spends:
            left_s = min(ALLOWANCE_S, max(0.0, self.spent_s - self.spent_bytes / BOUND))
        bound_s = left_s + BURST_S + TOLERANCE * self.elapsed_s
        return BOUND * bound_s + self.attempt.piece_bytes * self.attempt.act.connections

    @property
    def is_within(self) -> bool:
        """Whether no more was got than is allowed."""
        return self.got_bytes <= self.allowed_bytes


def run_all(ground: Ground, duration_s: float, most_bytes: int) -> list[Outcome]:
    """Make all attempts side by side: each should take no more than its bound.

    Args:
        ground: must be fresh: it gets topics of fixed names.
        duration_s: how long an attempt goes on.
        most_bytes: an attempt that has got so many ends early.

    """
    admin = AdminClient({"bootstrap.servers": ground.broker, "log_level": 0})
    written = [each.name for each in ATTEMPTS if isinstance(each.act, Writing)]
    _create(admin, [TOPIC, *written])
    _fill(ground.broker, admin)
    make = partial(_make, ground, admin, duration_s, most_bytes)
    # Each comes from an address of its own, for the limits by address.
    sources = [f"127.0.0.{number}" for number, _ in enumerate(ATTEMPTS, start=2)]
    with ThreadPoolExecutor(len(ATTEMPTS)) as pool:
        return list(pool.map(make, ATTEMPTS, sources))


def measure(quick: bool) -> list[Row]:
    """Make every attempt and give a row for each."""
    duration_s = QUICK_DURATION_S if quick else DURATION_S
    with open_lab() as lab:
        broker = lab.enter(EmbeddedBroker(lab.work_dir / "broker", sasl_users=dict([USER])))
        plain, sasl = _address(broker.bootstrap), _address(broker.sasl_bootstrap)
        proxies = {
            mode: lab.start_proxy(plain, RULES, mode=mode, pinned=False).bootstrap for mode in MODES
        }
        rules = [{"user": USER[0], **RATES}]
        proxies[LOGIN] = lab.start_proxy(sasl, rules, pinned=False).bootstrap
        outcomes = run_all(Ground(broker.bootstrap, proxies, USER), duration_s, MOST_BYTES)
    return [_row(outcome) for outcome in outcomes]


def _address(bootstrap: str) -> tuple[str, int]:
    host, _, port = bootstrap.rpartition(":")
    return host, int(port)


def _row(outcome: Outcome) -> Row:
    attempt = outcome.attempt
    return Row(
        FIGURE,
        f"{attempt.what} ({attempt.way})",
        f"at most {outcome.allowed_bytes / 1e6:.1f} MB in {outcome.elapsed_s:.0f} s",
        f"{outcome.got_bytes / 1e6:.1f} MB, {outcome.times_bound:.2f} times the bound",
        Verdict.of(outcome.is_within),
        {
            "got_bytes": outcome.got_bytes,
            "elapsed_s": outcome.elapsed_s,
            "spent_bytes": outcome.spent_bytes,
            "spent_s": outcome.spent_s,
            "told_ms": outcome.told_ms,
            "requests": outcome.requests,
        },
    )


def _make(
    ground: Ground,
    admin: AdminClient,
    duration_s: float,
    most_bytes: int,
    attempt: Attempt,
    source: str,
) -> Outcome:
    """Take the allowance, then make the attempt."""
    appended: Callable[[], int] | None = None
    if isinstance(attempt.act, Writing):
        appended = partial(_appended, admin, attempt.name, PRODUCED_BYTES)
    seat = _seat(ground, attempt, source)
    started_s = time.monotonic()
    run = Run(started_s + SPEND_TIMEOUT_S, SPENT_BYTES, appended)
    if attempt.spends:
        _spend(run, seat, attempt.act)
    spent_bytes, begun_s, requests = run.got_bytes, time.monotonic(), run.requests
    run.end_s, run.most_bytes = begun_s + duration_s, most_bytes
    attempt.act(run, seat)
    total_bytes = appended() if appended else run.got_bytes
    return Outcome(
        attempt,
        got_bytes=total_bytes - spent_bytes,
        elapsed_s=time.monotonic() - begun_s,
        spent_bytes=spent_bytes,
        spent_s=begun_s - started_s,
        told_ms=run.told_ms,
        requests=run.requests - requests,
    )


def _seat(ground: Ground, attempt: Attempt, source: str) -> Seat:
    name = attempt.name
    opening, opening_answers = b"", 0
    if attempt.way == LOGIN:
        opening, opening_answers = frames.login(*ground.user, name), frames.LOGIN_ANSWERS
    topic = name if isinstance(attempt.act, Writing) else TOPIC
    return Seat(ground.proxies[attempt.way], source, name, topic, opening, opening_answers)


def _spend(run: Run, seat: Seat, act: Reading | Writing) -> None:
    """Take the allowance as an ordinary client does, who waits for each answer."""
    if isinstance(act, Writing):
        greedy.ask(run, seat, repeat(frames.produce(seat.topic, PRODUCED_BYTES, seat.client_id)))
    else:
        Reading(is_anonymous=act.is_anonymous)(run, seat)
    assert run.got_bytes >= SPENT_BYTES, f"{seat.client_id}: an ordinary client got too little"


def _create(admin: AdminClient, names: list[str]) -> None:
    """Create topics of one partition, and wait until each has a leader."""
    created = admin.create_topics([NewTopic(name, 1, 1, config=TOPIC_CONFIG) for name in names])
    for future in created.values():
        future.result(ADMIN_TIMEOUT_S)
    deadline = time.monotonic() + ADMIN_TIMEOUT_S
    for name in names:
        while not _has_leader(admin, name):
            assert time.monotonic() < deadline, f"{name} has no leader"
            time.sleep(LEADER_POLL_S)


def _has_leader(admin: AdminClient, topic: str) -> bool:
    """Return whether the broker answers for it, which is later than it names a leader."""
    try:
        return _appended(admin, topic, 0) == 0
    except KafkaException:
        return False


def _fill(broker: str, admin: AdminClient) -> None:
    """Write batches of BATCH_BYTES to TOPIC."""
    host, _, port = broker.rpartition(":")
    seat = Seat((host, int(port)), "127.0.0.1", "fill", TOPIC)
    appended = partial(_appended, admin, TOPIC, BATCH_BYTES)
    run = Run(time.monotonic() + SPEND_TIMEOUT_S, TOPIC_BYTES, appended)
    greedy.ask(run, seat, repeat(frames.produce(TOPIC, BATCH_BYTES, "fill")), depth=DEPTH)
    assert run.got_bytes >= TOPIC_BYTES, f"{TOPIC} was not filled"


def _appended(admin: AdminClient, topic: str, record_bytes: int) -> int:
    """Ask the broker how many bytes of records a topic has."""
    partition = TopicPartition(topic, 0)
    answer = admin.list_offsets({partition: OffsetSpec.latest()})[partition]
    return int(answer.result(ADMIN_TIMEOUT_S).offset) * record_bytes
