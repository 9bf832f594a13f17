"""Machines of a tier: they share all clients, come and go, and serve each other's meanwhile."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
import yaml
from support.clients import CLIENTS, Access, Client, Librdkafka, Read
from support.operating import call, quota_proxy, running
from support.proxy_process import until
from support.raw import RawClient, fetch, produce
from support.tier import (
    TierMachine,
    client_of,
    owner_of,
    report_to,
    serving,
    tier_config,
    until_shared,
)

from examples.devkit.broker import EmbeddedBroker
from proxy.tier.slot_balance import LEAST_LOAD
from proxy.tier.slot_map import SLOTS

RECORDS = 200
NAMES = ("a", "b", "c")
SHARE = int(LEAST_LOAD * SLOTS / len(NAMES))
"""Slots that each machine has at least."""
WAIT_S = 60
BOUND_BYTES_S = 200_000
RULES = [{"client-id": "everywhere", "consumer_byte_rate": BOUND_BYTES_S}]
RECORD_BYTES = 20_000
MEASURED_S = 6.0
BURSTS_S = 3.0
"""Of the bound: what each of three members lets pass at once."""


@pytest.fixture(scope="module")
def tier(
    kafka: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[TierMachine]]:
    """Three machines; in the end they must drain in order and without faults in their logs."""
    folder = tmp_path_factory.mktemp("tier")
    machines = [
        TierMachine(tier_config(kafka.bootstrap, "tier", name, rules=RULES), folder / name)
        for name in NAMES
    ]
    with serving(machines, least=SHARE):
        yield machines
        for machine in machines:
            machine.stop()


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_all_clients_read_and_write(
    tier: list[TierMachine], topic: Callable[..., str], client: Client
) -> None:
    name = topic(partitions=2)
    values = [(n % 2, b"%08d" % n) for n in range(RECORDS)]
    client.produce(Access(tier[0].bootstrap, client.name), name, values)
    read = client.consume(Access(tier[1].bootstrap, client.name), name, RECORDS)
    assert read.count == RECORDS


def test_the_command_says_who_owns_what(tier: list[TierMachine]) -> None:
    code, text, _ = quota_proxy("tier", "--json", "--url", tier[0].admin_url)
    assert code == 0
    said = json.loads(text)
    assert (said["name"], said["machine"], said["slots"]) == ("tier", "a", SLOTS)
    owned = {each["name"]: each["slots"] for each in said["members"]}
    assert sorted(slot for slots in owned.values() for slot in slots) == list(range(SLOTS))
    for machine in tier:
        assert machine.slots() == len(owned[f"{machine.name}/0"])
    answers = {each["name"]: (each["answers"], each["problem"]) for each in said["machines"]}
    assert answers == {"a/0": (None, None), "b/0": (True, None), "c/0": (True, None)}
    code, text, _ = quota_proxy("tier", "--url", tier[1].admin_url)
    assert code == 0
    # Another round may have been held meanwhile.
    assert re.search(rf"generation \d+  slots {SLOTS}, settled", text)
    assert all(f"{name}/0" in text for name in NAMES)


def test_an_override_is_in_force_everywhere(tier: list[TierMachine]) -> None:
    assert put_somewhere(tier, "/v1/quotas/client-id=slow", {"consumer_byte_rate": 1234})
    for machine in tier:
        until(lambda machine=machine: "1234" in machine.get("/v1/quotas")[1], machine.name)


def put_somewhere(tier: list[TierMachine], path: str, document: object) -> bool:
    """Put it at the machine that takes it."""
    return any(call(machine, "PUT", path, document).status == 200 for machine in tier)


def test_who_goes_to_all_machines_gets_no_more(
    tier: list[TierMachine], kafka: EmbeddedBroker, topic: Callable[..., str]
) -> None:
    name = topic()
    with RawClient(kafka.bootstrap) as writer:
        for _ in range(2):  # a batch is sent whole, whatever was asked for
            writer.ask(produce(9, name, b"." * RECORD_BYTES))
    began_s = time.monotonic()
    read_bytes = [0] * len(tier)

    def goes_on() -> bool:
        """Whether more than the bursts and its bound is still to come: a stall only delays that."""
        assert time.monotonic() < began_s + WAIT_S, read_bytes
        return sum(read_bytes) < BOUND_BYTES_S * (BURSTS_S + MEASURED_S)

    def read(at: int) -> None:
        """Go on where visitors are let go."""
        address = f"127.0.0.1:{tier[at].broker_ports[1]}"
        while goes_on():
            try:
                with RawClient(address, "everywhere") as client:
                    while goes_on():
                        answer = client.ask(fetch(12, name, max_bytes=RECORD_BYTES))
                        read_bytes[at] += len(answer.responses[0].partitions[0].records or b"")
            except (OSError, EOFError):
                continue

    with ThreadPoolExecutor() as pool:
        list(pool.map(read, range(len(tier))))
    took_s = time.monotonic() - began_s
    assert sum(read_bytes) < BOUND_BYTES_S * (took_s + BURSTS_S), (read_bytes, took_s)


def test_readers_outlive_the_death_of_their_owner(
    tier: list[TierMachine], topic: Callable[..., str]
) -> None:
    """Of three clients on one machine none loses a record, nor gets one twice."""
    name = topic(partitions=2)
    half = RECORDS // 2
    victim, others = tier[2], tier[:2]
    bootstrap = ",".join(machine.bootstrap for machine in tier)

    writer = Access(others[0].bootstrap, client_of(tier, others[0], "writer"))

    def write(numbers: range) -> None:
        values = [(n % 2, b"%08d" % n) for n in numbers]
        Librdkafka().produce(writer, name, values)

    write(range(half))
    here, crashed = threading.Barrier(len(CLIENTS) + 1), threading.Event()

    def read(client: Client) -> Read:
        def halfway() -> None:
            here.wait(WAIT_S)
            crashed.wait(WAIT_S)

        access = Access(bootstrap, client_of(tier, victim, client.name))
        return client.consume(access, name, RECORDS, at=(half, halfway))

    with ThreadPoolExecutor() as pool:
        reads = [pool.submit(read, client) for client in CLIENTS]
        here.wait(WAIT_S)
        victim.crash()
        crashed.set()
        write(range(half, RECORDS))
        for client, task in zip(CLIENTS, reads, strict=True):
            values = [value for part in task.result().values.values() for value in part]
            assert sorted(map(int, values)) == list(range(RECORDS)), client.name
    until_shared(*others)
    victim.start()
    until_shared(*tier, least=SHARE)


def test_progress_is_known_to_the_next_owner(
    tier: list[TierMachine], topic: Callable[..., str]
) -> None:
    """A machine that leaves in order hands its queries over, and comes back."""
    name = topic()
    leaving = tier[1]
    client_id = report_to(tier, leaving, "query", name)
    leaving.stop()
    others = [tier[0], tier[2]]
    until_shared(*others)
    until(lambda: is_known(others, client_id), "the next owner knows it")
    leaving.start()
    until_shared(*tier, least=SHARE)


def test_a_rule_for_several_queries_leaves_each_with_its_owner(
    tier: list[TierMachine], topic: Callable[..., str]
) -> None:
    client_ids = [report_to(tier, machine, "staying", topic()) for machine in tier[:2]]
    rule = {"consumer_byte_rate": 10_000_000, "scope": "shared"}
    assert put_somewhere(tier, "/v1/quotas/client-id-prefix=staying", rule)
    for machine in tier:
        until(
            lambda machine=machine: "client-id-prefix=staying" in machine.get("/v1/quotas")[1],
            "all have the rule",
        )
    until_shared(*tier)
    # Each by itself: slots may move at any time, but those of one key all at once.
    until(
        lambda: len({owner_of(tier, client_id).name for client_id in client_ids}) > 1,
        "they have different owners",
    )
    for client_id in client_ids:
        until(lambda client_id=client_id: is_known(tier, client_id), f"{client_id} is known")


def is_known(machines: list[TierMachine], client_id: str) -> bool:
    """Return whether the owner of a query knows its progress."""
    owner = owner_of(machines, client_id)
    return client_id in owner.get(f"/v1/progress?member={owner.name}")[1]


def test_of_two_with_one_name_the_later_one_stays(
    tier: list[TierMachine], kafka: EmbeddedBroker, tmp_path: Path
) -> None:
    older = tier[2]
    tier[2] = TierMachine(tier_config(kafka.bootstrap, "tier", "c", rules=RULES), tmp_path)
    tier[2].start()
    assert older.wait() == 1
    assert "another process has joined" in older.log_file.read_text()
    until_shared(*tier, least=SHARE)


@pytest.mark.slow
def test_a_successor_takes_the_place_of_a_machine(
    tier: list[TierMachine], topic: Callable[..., str], tmp_path: Path
) -> None:
    older = tier[0]
    settings = yaml.safe_load(older.config_file.read_text())
    tier[0] = TierMachine(settings, tmp_path, ["--take-over", str(older.pid)])
    tier[0].start()
    assert older.wait() == 0
    older.check_log()
    until_shared(*tier, least=SHARE)
    name = topic()
    values = [(0, b"%08d" % n) for n in range(RECORDS)]
    Librdkafka().produce(Access(tier[0].bootstrap, "after"), name, values)
    assert Librdkafka().consume(Access(tier[0].bootstrap, "after"), name, RECORDS).count == RECORDS


def test_the_topic_of_a_single_proxy_is_refused(
    kafka: EmbeddedBroker, topic: Callable[..., str], tmp_path: Path
) -> None:
    settings = tier_config(kafka.bootstrap, "other", "a")
    settings["state"]["topic"] = topic()
    file = tmp_path / "proxy.yaml"
    file.write_text(json.dumps(settings))
    code, _, errors = quota_proxy("run", "-c", file)
    assert code == 1
    assert "name another topic as state.topic" in errors


def test_the_topic_of_another_tier_is_refused_while_that_has_members(
    kafka: EmbeddedBroker, tmp_path: Path
) -> None:
    first, second = (f"tier-{uuid4().hex[:8]}" for _ in range(2))
    settings = tier_config(kafka.bootstrap, second, "a")
    settings["state"]["topic"] = f"{first}-state"
    other = TierMachine(settings, tmp_path / "other")
    with running(TierMachine(tier_config(kafka.bootstrap, first, "a"), tmp_path / "one")):
        code, _, errors = quota_proxy("run", "-c", other.config_file)
        assert code == 1
        assert f"another tier, with members in quota-proxy-tier-{first}" in errors
    with running(other):  # as after another name for the tier
        until_shared(other)
