"""What clients of several members share: together no more than it, and little of it left idle."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import pytest
from support.operating import call
from support.proxy_process import until
from support.raw import RawClient, fetch, produce
from support.tier import SETTLED_S, TierMachine, client_of, owner_of, serving, tier_config

from examples.devkit.broker import EmbeddedBroker
from proxy.tier.budget_exchanges import lease_owner_slot
from proxy.tier.slot_map import SLOTS

RATE = 3_000_000
"""Bytes per second that they share: little, so that a busy machine carries it, too."""
BURST_S = 0.5
RECORD_BYTES = 20_000
NAMES = ("a", "b", "c")
BUDGET = {
    "budgets": [{"name": "link", "consumer_byte_rate": RATE}],
    "rules": [
        {"client-id": "heavy", "budget": "link", "weight": 3, "guaranteed": RATE // 4},
        {"client-id-prefix": "c", "budget": "link"},
    ],
}
SHARED = {"rules": [{"client-id-prefix": "c", "scope": "shared", "consumer_byte_rate": RATE}]}
BY_TOPIC = {"rules": [{"topic-prefix": "t", "consumer_byte_rate": RATE}]}
SHARED_FOR_S = 2.0
"""Little: who stands still for longer than its session gets other slots when it goes on."""
TOLERANCE = 0.2
LONG_S = 11.0
MOST = 1.1
"""Of what they share, in that time."""


class Reader(threading.Thread):
    """A client that asks for more all the time, wherever it is sent."""

    def __init__(self, machine: TierMachine, client_id: str, topic: str) -> None:
        super().__init__()
        self.machine, self.client_id, self.topic = machine, client_id, topic
        self.got: list[tuple[float, int]] = []
        self.ended = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.join()

    @property
    def port(self) -> int:
        return self.machine.broker_ports[1]

    def run(self) -> None:
        while not self.ended.is_set():
            try:
                with RawClient(f"127.0.0.1:{self.port}", self.client_id) as client:
                    while not self.ended.is_set():
                        answer = client.ask(fetch(12, self.topic, max_bytes=RECORD_BYTES))
                        size = len(answer.responses[0].partitions[0].records or b"")
                        self.got.append((time.monotonic(), size))
            except (OSError, EOFError):
                time.sleep(0.1)


def bytes_in(readers: list[Reader], begin_s: float, end_s: float) -> int:
    got = (each for reader in readers for each in reader.got)
    return sum(size for at_s, size in got if begin_s <= at_s < end_s)


@pytest.fixture
def machines(
    kafka: EmbeddedBroker, tmp_path: Path, quotas: dict[str, Any]
) -> Iterator[list[TierMachine]]:
    tier = "-".join(quotas["rules"][-1])  # one for each
    made = [
        TierMachine(tier_config(kafka.bootstrap, tier, name, quotas=quotas), tmp_path / name)
        for name in NAMES
    ]
    with serving(made, least=SLOTS // 10):
        yield made


@pytest.fixture
def records(kafka: EmbeddedBroker, topic: Callable[..., str]) -> str:
    """Return a topic with two batches."""
    name = topic()
    write_batches(kafka.bootstrap, name)
    return name


def write_batches(bootstrap: str, topic: str) -> None:
    """Write two batches, of one record each."""
    with RawClient(bootstrap) as writer:
        for _ in range(2):
            writer.ask(produce(9, topic, b"." * RECORD_BYTES))


def leasing_machine(machines: list[TierMachine], entity: str) -> TierMachine:
    """Return the machine that leases what clients share."""
    slot = lease_owner_slot(entity)

    def owner() -> TierMachine | None:
        members = json.loads(machines[0].get("/v1/tier")[1])["members"]
        names = [f"{each['name']}" for each in members if slot in each["slots"]]
        return next((each for each in machines if f"{each.name}/0" in names), None)

    found: TierMachine = until(owner, "somebody leases it")
    return found


def shares_of(readers: dict[str, list[Reader]], lately_s: float) -> dict[str, float]:
    """Return what each client had of what they share in the last seconds."""
    now_s = time.monotonic()
    return {
        name: bytes_in(each, now_s - lately_s, now_s) / lately_s / RATE
        for name, each in readers.items()
    }


def most_in(readers: list[Reader], window_s: float) -> float:
    """Return the most that any time of this length has seen, in parts of what they share."""
    got = sorted(each for reader in readers for each in reader.got)
    most = total = first = 0
    for at_s, size in got:
        total += size
        while got[first][0] <= at_s - window_s:
            total -= got[first][1]
            first += 1
        most = max(most, total)
    return most / window_s / RATE


@pytest.mark.parametrize(
    ("quotas", "entity"),
    [
        pytest.param(BUDGET, "budget=link", id="a budget"),
        pytest.param(SHARED, "client-id-prefix=c", id="a shared rule"),
        pytest.param(BY_TOPIC, "topic-prefix=t", id="a topic of a prefix"),
    ],
)
def test_members_share(
    machines: list[TierMachine], records: str, quotas: dict[str, Any], entity: str
) -> None:
    """Also while the owner of its slot stands still, and when that dies."""
    with ExitStack() as stack:

        def read(machine: TierMachine, client_id: str) -> list[Reader]:
            made = (Reader(machine, client_id, records) for _ in range(2))
            return [stack.enter_context(reader) for reader in made]

        heavy = owner_of(machines, "heavy")
        readers = {"heavy": read(heavy, "heavy")} if quotas is BUDGET else {}
        for machine in machines:
            client_id = client_of(machines, machine, "c")
            readers[machine.name] = read(machine, client_id)

        def are_shared(*names: str) -> bool:
            """Whether these have all of it, each by its weight."""
            shares = shares_of(readers, SHARED_FOR_S)
            weights = {name: 3.0 if name == "heavy" else 1.0 for name in names}
            whole = sum(weights.values())
            return sum(shares.values()) > 1 - TOLERANCE and all(
                abs(shares[name] * whole / weight - 1) < TOLERANCE
                for name, weight in weights.items()
            )

        until(lambda: are_shared(*readers), "each has its share", SETTLED_S)
        for stop, go_on in (
            (TierMachine.freeze, TierMachine.unfreeze),
            (TierMachine.crash, None),
        ):
            victim = leasing_machine(machines, entity)
            stop(victim)
            left = [name for name in readers if name != victim.name]
            if heavy is victim and quotas is BUDGET:
                left.remove("heavy")
            until(lambda left=left: are_shared(*left), "the others have it", SETTLED_S)
            if go_on is not None:
                go_on(victim)
                until(lambda: are_shared(*readers), "each has its share again", SETTLED_S)
        every = [reader for each in readers.values() for reader in each]
        if quotas is BUDGET:
            follow_override(next(each for each in machines if each is not victim), readers)
    assert most_in(every, LONG_S) <= MOST, "at no time was it exceeded"


def follow_override(asked: TierMachine, readers: dict[str, list[Reader]]) -> None:
    """Halve the budget at run time, and wait until all members keep to that."""
    put = partial(call, asked, "PUT", "/v1/quotas/budget=link", {"consumer_byte_rate": RATE // 2})
    until(lambda: put().status == HTTPStatus.OK, "its rate is overridden", SETTLED_S)
    until(
        lambda: 0.4 < sum(shares_of(readers, SHARED_FOR_S).values()) <= 0.6,
        "all members follow an override of the rate",
        SETTLED_S,
    )
