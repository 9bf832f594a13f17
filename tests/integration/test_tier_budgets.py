"""A budget over the members of a tier: together no more than it, and nothing left idle for long."""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest
from support.proxy_process import until
from support.raw import RawClient, fetch, produce
from support.tier import TierMachine, client_of, tier_config, until_shared

from examples.devkit.broker import EmbeddedBroker
from proxy.tier.budget_exchanges import slot_of_budget
from proxy.tier.slot_map import SLOTS

RATE = 3_000_000
"""Bytes per second of the budget: little, so that a busy machine carries it, too."""
BURST_S = 0.5
RECORD_BYTES = 20_000
NAMES = ("a", "b", "c")
QUOTAS = {
    "budgets": [{"name": "link", "consumer_byte_rate": RATE}],
    "rules": [
        {"client-id": "heavy", "budget": "link", "weight": 3, "guaranteed": RATE // 4},
        {"client-id-prefix": "c", "budget": "link"},
    ],
}
LEASED_S = 12.0
"""After which all that earlier owners may have leased is over."""
TAKEN_OVER_S = 40.0


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

    def run(self) -> None:
        while not self.ended.is_set():
            try:
                address = f"127.0.0.1:{self.machine.broker_ports[1]}"
                with RawClient(address, self.client_id) as client:
                    while not self.ended.is_set():
                        answer = client.ask(fetch(12, self.topic, max_bytes=RECORD_BYTES))
                        size = len(answer.responses[0].partitions[0].records or b"")
                        self.got.append((time.monotonic(), size))
            except (OSError, EOFError) as error:
                time.sleep(0.1)


def bytes_in(readers: list[Reader], begin_s: float, end_s: float) -> int:
    got = (each for reader in readers for each in reader.got)
    return sum(size for at_s, size in got if begin_s <= at_s < end_s)


@pytest.fixture(scope="module")
def machines(
    kafka: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[TierMachine]]:
    folder = tmp_path_factory.mktemp("budgets")
    made = [
        TierMachine(tier_config(kafka.bootstrap, "budgets", name, quotas=QUOTAS), folder / name)
        for name in NAMES
    ]
    try:
        for machine in made:
            machine.start()
        until_shared(*made, least=SLOTS // 10)
        yield made
    finally:
        for machine in made:
            machine.kill()


@pytest.fixture
def records(kafka: EmbeddedBroker, topic: Callable[..., str]) -> str:
    """Return a topic with two batches."""
    name = topic(config={"retention.ms": "-1"})
    with RawClient(kafka.bootstrap) as writer:
        for _ in range(2):
            writer.ask(produce(9, name, b"." * RECORD_BYTES))
    return name


def leasing_machine(machines: list[TierMachine]) -> TierMachine:
    """Return the machine that leases the budget."""
    members = json.loads(machines[0].get("/v1/tier")[1])["members"]
    slot = slot_of_budget("link")
    name = next(each["name"] for each in members if slot in each["slots"])
    return next(each for each in machines if name == f"{each.name}/0")


def test_members_share_a_budget(machines: list[TierMachine], records: str) -> None:
    with ExitStack() as stack:
        readers = [
            stack.enter_context(Reader(machine, client_of(machines, machine, "c"), records))
            for machine in machines
            for _ in range(2)
        ]
        began_s = time.monotonic()
        time.sleep(60)
        for t in range(0, 60):
            print(t, [round(bytes_in(readers[i:i+2], began_s+t, began_s+t+1)/1e6,2) for i in (0,2,4)], round(bytes_in(readers, began_s+t, began_s+t+1)/1e6,2))
        victim = leasing_machine(machines)
        print("victim", victim.name)
        killed_s=time.monotonic()
        victim.crash()
        time.sleep(30)
        for t in range(0, 30):
            print(t, [round(bytes_in(readers[i:i+2], killed_s+t, killed_s+t+1)/1e6,2) for i in (0,2,4)], round(bytes_in(readers, killed_s+t, killed_s+t+1)/1e6,2))
    for m in machines: print(m.name, [l for l in m.log_file.read_text().splitlines() if 'udget' in l or 'error' in l][-10:])
    assert 0
