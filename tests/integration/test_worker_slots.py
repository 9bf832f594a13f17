"""Which worker has which slots, by their loads, and what a machine shows of that."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import confluent_kafka
import pytest
from support.machine import MACHINE, kill_worker, machine_config, until_replaced
from support.operating import call, running
from support.prometheus import program
from support.proxy_process import ProxyProcess, until

from examples.devkit.broker import EmbeddedBroker
from proxy.quota.entities import ClientIdentity
from proxy.tier.quota_keys import QuotaKeys
from proxy.tier.slot_map import SLOTS, slot_of

WORKERS = 2
RECORD_BYTES, RECORDS = 10_000, 2_000
MANY_REQUESTS = {"fetch.message.max.bytes": RECORD_BYTES, "queued.min.messages": 100}
PAUSE_S = 0.1
"""Of a reader, after some records: it leaves room on the machine for others."""

READERS = 4
JOIN_S = 60.0
CAPACITY_BYTES_PER_S = 1e6
"""What a worker is taken to relay with a whole core: on any machine its clients read more."""

MOST_OF_MEAN = 1.2
BALANCED_WITHIN_S = 300
SOON_AND_SMALL = f"""
from proxy.tier import slot_balance, slot_loads
slot_loads.LEAST_MEASURED_S = slot_loads.AVERAGE_S = 5.0
slot_balance.MEMBER_BYTES_PER_S = {CAPACITY_BYTES_PER_S}
"""


@pytest.fixture(scope="module")
def machine(
    kafka: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProxyProcess]:
    """Two workers."""
    folder = tmp_path_factory.mktemp("slots")
    config = machine_config(kafka.bootstrap, WORKERS)
    process = ProxyProcess(config, folder / "proxy", changes=SOON_AND_SMALL)
    with running(process):
        yield process


def digests(machine: ProxyProcess) -> set[str]:
    return machine.metrics().labels("rules_digest", "digest")


def slots_of_members(machine: ProxyProcess) -> list[dict[str, Any]]:
    members = json.loads(machine.get("/v1/status")[1])["members"]
    return [member["slots"] for member in members]


def carried(machine: ProxyProcess, worker: int) -> float:
    return float(slots_of_members(machine)[worker]["bytes_per_s"])


def test_each_worker_owns_as_many_slots(machine: ProxyProcess) -> None:
    def are_even() -> bool:
        seen = machine.metrics()
        owned = [seen.value("slots_owned", member=member(number)) for number in range(WORKERS)]
        return sum(owned) == SLOTS and max(owned) <= MOST_OF_MEAN * SLOTS / WORKERS

    until(are_even, "they share them")
    assert machine.metrics().value("slots_overloaded") == 0
    for slots in slots_of_members(machine):
        assert slots["owned"] <= MOST_OF_MEAN * SLOTS / WORKERS
        assert slots["overloaded"] == []


def test_all_workers_show_one_digest_which_changes_with_the_rules(machine: ProxyProcess) -> None:
    (before,) = until(lambda: digests(machine), "a digest is shown")
    (tier,) = machine.metrics().labels("rules_digest", "tier")
    assert tier.startswith("tier-")
    call(machine, "PUT", "/v1/quotas/client-id=someone", {"consumer_byte_rate": "1MiB"})
    until(lambda: len(digests(machine)) == 1 and digests(machine) != {before}, "it is another one")


def test_promtool_finds_nothing_to_say(machine: ProxyProcess) -> None:
    _, text = machine.get("/metrics")
    found = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=text.encode(),
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, b"", b"")


def member(number: int) -> str:
    return f"{MACHINE}/{number}"


def clients_of(machine: ProxyProcess, worker: int, count: int) -> list[str]:
    """Give client ids in as many slots of a worker."""
    tier = json.loads(machine.get("/v1/tier")[1])["members"]
    owned = next(set(each["slots"]) for each in tier if each["name"] == member(worker))
    keys, found = QuotaKeys(()), dict[int, str]()
    for number in range(10_000):
        name = f"reader-{number}"
        slot = slot_of(keys.key_of(ClientIdentity("main", None, name)))
        if slot in owned and len(found) < count:
            found.setdefault(slot, name)
    return list(found.values())


@contextmanager
def reading(bootstrap: str, topic: str, client_ids: list[str]) -> Iterator[dict[str, int]]:
    """Have clients read a topic again and again, in small pieces; gives how many records each."""
    over, counts = threading.Event(), dict.fromkeys(client_ids, 0)

    def read(client_id: str) -> None:
        settings = {
            "bootstrap.servers": bootstrap,
            "client.id": client_id,
            "group.id": client_id,
            "log_level": 0,
            **MANY_REQUESTS,
        }
        consumer = confluent_kafka.Consumer(settings)
        start = confluent_kafka.TopicPartition(topic, 0, 0)
        consumer.assign([start])
        while not over.is_set():
            for message in consumer.consume(100, timeout=0.2):
                if message.error() is None:
                    counts[client_id] += 1
                    if message.offset() == RECORDS - 1:
                        with suppress(confluent_kafka.KafkaException):
                            consumer.seek(start)
            time.sleep(PAUSE_S)
        consumer.close()

    threads = [threading.Thread(target=read, args=(each,), daemon=True) for each in client_ids]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        over.set()
        for thread in threads:
            thread.join(JOIN_S)


@pytest.mark.slow
def test_load_goes_to_the_worker_that_has_less_to_do(
    machine: ProxyProcess, topic: Callable[..., str], fill: Callable[..., None]
) -> None:
    name = topic()
    fill(name, RECORDS, RECORD_BYTES)
    readers = clients_of(machine, 0, READERS)
    before = machine.metrics().value("slot_moves_total", member=member(1))
    with reading(machine.bootstrap, name, readers) as counts:
        until(lambda: carried(machine, 0) > CAPACITY_BYTES_PER_S, "the first one works", 60)

        def moved() -> float:
            return machine.metrics().value("slot_moves_total", member=member(1)) - before

        until(moved, "a slot moves", BALANCED_WITHIN_S)
        owned = machine.metrics().value("slots_owned", member=member(1))
        until(lambda: carried(machine, 1) > CAPACITY_BYTES_PER_S, "the other one works", 60)
        until_replaced(machine, 0, kill_worker(machine, 0))
        assert machine.metrics().value("slots_owned", member=member(1)) >= owned
        had = dict(counts)
        until(lambda: all(counts[each] > had[each] for each in readers), "all read on", 60)


@pytest.mark.slow
def test_a_slot_that_fills_a_worker_alone_is_named_with_its_client(
    machine: ProxyProcess, topic: Callable[..., str], fill: Callable[..., None]
) -> None:
    name = topic()
    fill(name, RECORDS, RECORD_BYTES)
    (reader,) = clients_of(machine, 1, 1)
    text = "a slot fills a member alone, so that more members do not help its clients"
    title = f"client-id={reader}"
    with reading(machine.bootstrap, name, [reader]):
        (line,) = until(
            lambda: [each for each in machine.log(text) if title in each["clients"]],
            "it is logged",
            BALANCED_WITHIN_S,
        )
        assert machine.metrics().value("slots_overloaded") == 1
        shown = slots_of_members(machine)[int(line["worker"])]["overloaded"]
    assert (line["level"], [each["slot"] for each in shown]) == ("warning", [line["slot"]])
    assert title in shown[0]["clients"]
