"""The state of a tier: slots that go from machine to machine, fenced by a real group."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
)
from kafka.protocol.producer import EndTxnRequest, TxnOffsetCommitRequest
from support.proxy_process import until
from support.slot_group import SlotGroup
from support.state_faults import commits_lost, written

from examples.devkit.broker import EmbeddedBroker, EmbeddedCluster
from examples.devkit.loopback import HOST
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.login import Credentials, Login
from proxy.state import KafkaStore, Record, SlotStore, StateError
from proxy.state.kafka import slot_store as store_module
from proxy.state.kafka.slot_table import GroupFence
from proxy.state.kafka.state_topic import StateTopic
from proxy.state.store import ClosedError

PATIENCE_S = 30.0
"""More than a busy machine takes."""

SLOTS = 8
COMMON = 0
SOON_S = 2.0
"""For writes that are to fail."""

ALONE = None
"""In the place of a machine: a proxy without a tier."""

WRITER = """
import os, signal, sys
from kafka.protocol.producer import EndTxnRequest, TxnOffsetCommitRequest
from proxy.cluster import kafka_client
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.login import Credentials, Login
from proxy.cluster.upstream import CONNECTION_CLOSED, UpstreamError
from proxy.state import Record, SlotStore
from proxy.state.kafka.slot_table import GroupFence

_, port, topic, group, generation, member, moment = sys.argv
store = SlotStore(
    Bootstrap([("127.0.0.1", int(port))]), topic, tier="tier", machine="killed", slots=8, common=0,
    slot_of_record=lambda key: int(key.split("/")[1]) % 8,
)
store.take(range(8), GroupFence(group, int(generation), member))
if moment == "any":
    number = 0
    while True:
        number += 1
        store.put_many([Record.of(f"a/{slot}", number) for slot in range(8)])
        print(number, flush=True)
store.put_many([Record.of(f"a/{slot}", "kept") for slot in range(8)])
ask = KafkaClient.ask
kind = {"before": TxnOffsetCommitRequest, "between": EndTxnRequest}[moment]

async def die(client, request, broker=None):
    if isinstance(request, kind):
        os.kill(os.getpid(), signal.SIGKILL)
    return await ask(client, request, broker)

KafkaClient.ask = die
store.put_many([Record.of(f"a/{slot}", "half") for slot in range(8)])
"""
"""Kills itself in the middle of its second write, or writes until it is killed."""

Open = Callable[..., SlotStore]


def slot_of_record(key: str) -> int:
    return int(key.split("/")[1]) % SLOTS


@pytest.fixture
def name(topic_names: Iterator[str]) -> str:
    """Of a topic, and of a group, that are not there yet."""
    return f"tier-{next(topic_names)}"


@pytest.fixture
def group(kafka: EmbeddedBroker, name: str) -> SlotGroup:
    return SlotGroup(kafka.port, name)


@pytest.fixture
def opened(kafka: EmbeddedBroker, name: str) -> Iterator[Open]:
    """`opened(machine, **arguments)` opens the state in the test's topic; all are closed."""
    stores: list[SlotStore] = []

    def open_(machine: str | None = "one", topic: str = name, **arguments: Any) -> SlotStore:
        stores.append(slot_store(kafka.port, topic, machine, **arguments))
        return stores[-1]

    yield open_
    for each in reversed(stores):
        each.close()


def slot_store(
    port: int, topic: str, machine: str | None, login: Login | None = None, **arguments: Any
) -> SlotStore:
    way = Bootstrap([(HOST, port)], login=login)
    if machine is ALONE:
        return KafkaStore(way, topic, **arguments)
    wanted = {"slots": SLOTS, "common": COMMON, "slot_of_record": slot_of_record} | arguments
    return SlotStore(way, topic, tier="tier", machine=machine, **wanted)


def values(store: SlotStore, prefix: str = "") -> dict[str, Any]:
    return {record.key: record.value for record in store.items(prefix)}


@contextmanager
def stopped_at(kind: type, machine: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Stop the next write of a machine just before such a request: (it is there, let it go on)."""
    there, go_on = threading.Event(), threading.Event()
    ask = KafkaClient.ask

    async def ask_late(client: KafkaClient, request: Any, broker: Any = None) -> Any:
        mine = isinstance(request, kind) and request.transactional_id.endswith(machine)
        if mine and getattr(request, "committed", True):
            there.set()
            await asyncio.to_thread(go_on.wait, 60)
        return await ask(client, request, broker)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KafkaClient, "ask", ask_late)
        try:
            yield there, go_on
        finally:
            go_on.set()


class Attempt(threading.Thread):
    """A write in another thread, and what became of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work = work
        self.error: StateError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except StateError as error:
            self.error = error

    def end(self) -> StateError | None:
        self.join(60)
        assert not self.is_alive()
        return self.error


# The topic


@pytest.mark.parametrize(("machine", "slots"), [("one", SLOTS), (ALONE, 1)])
def test_the_topic_is_made_with_a_partition_for_each_slot(kafka, name, opened, machine, slots):
    opened(machine)
    with AdminClient({"bootstrap.servers": kafka.bootstrap}) as admin:
        assert len(admin.list_topics(name, timeout=30).topics[name].partitions) == slots
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)
        found = admin.describe_configs([resource])[resource].result(30)
    wanted = StateTopic.settings(1)
    assert {key: found[key].value for key in wanted} == wanted
    assert found["cleanup.policy"].value == "compact"


def test_machines_that_start_at_once_wait_while_the_topic_is_made(opened):
    """The brokers may take longer for it than a write may."""
    with ThreadPoolExecutor() as starting:
        machines = ("one", "two", "three")
        made = [starting.submit(opened, each, slots=256, timeout_s=0.02) for each in machines]
    assert [store.result().items("") for store in made] == [[], [], []]


COMPACT = {"cleanup.policy": "compact"}


@pytest.mark.parametrize(
    ("machine", "partitions", "config", "message"),
    [
        ("one", 3, COMPACT, "has 3 partitions, and the state of a tier needs one"),
        ("one", 1, COMPACT, r"is that of a proxy without a tier.*\n    fix: name another topic as"),
        (ALONE, 2, COMPACT, "has 2 partitions, and state needs a topic of one"),
        ("one", SLOTS, {}, "would lose state: its cleanup.policy is delete, .*\n    fix: set it: "),
        (ALONE, 1, {"cleanup.policy": "compact,delete"}, "would lose state: its cleanup.policy is"),
        (
            *(ALONE, 1, COMPACT | {"compression.type": "lz4"}),
            "is compressed by the brokers: its compression.type is lz4",
        ),
    ],
)
def test_a_topic_that_is_not_made_for_this_state_is_refused(
    topic, opened, machine, partitions, config, message
):
    with pytest.raises(StateError, match=message):
        opened(machine, topic(partitions, config))


# One machine


def test_slots_are_taken_written_released_and_found_again(opened, group):
    store = opened()
    (fence,) = group.generation("one")
    with pytest.raises(StateError, match="is not in the group of its tier"):
        store.put("a/1", 1)
    store.take([1, 2], fence)
    store.put_many([Record.of("a/1", 1), Record.of("a/2", 2), Record.of("b/2", 3)])
    with pytest.raises(StateError, match="has not the slot 3"):
        store.put_many([Record.of("a/1", 9), Record.of("a/3", 9)])
    with pytest.raises(StateError, match="has not the slot 3"):
        store.put_many((), delete=("a/3",))
    store.put_many((), delete=("b/2",))
    assert store.get("b/2") is None
    store.put_many((), delete=("b/2",))
    assert values(store) == {"a/1": 1, "a/2": 2}
    store.release([2])
    assert values(store) == {"a/1": 1}
    assert store.get("a/2") is None
    with pytest.raises(StateError, match="has not the slot 2"):
        store.put("a/2", 3)
    store.take([2], fence)
    assert values(store) == {"a/1": 1, "a/2": 2}
    store.close()
    store.close()
    with pytest.raises(ClosedError, match="the state is not open"):
        store.get("a/1")
    again = opened()
    (fence,) = group.generation("one")
    again.take(range(SLOTS), fence)
    assert values(again) == {"a/1": 1, "a/2": 2}


def test_a_write_of_many_batches_in_many_slots(opened, group):
    (fence,) = group.generation("one")
    records = [Record.of(f"a/{number}", "x" * 2000) for number in range(4000)]
    records.append(Record.of("b/1", "x" * 4_000_000))
    store = opened()
    store.take(range(SLOTS), fence)
    store.put_many(records)
    store.put_many([], delete=[f"a/{number}" for number in range(2000)])
    store.close()
    again = opened("two")
    again.take(range(SLOTS), group.generation("two")[0])
    assert again.items("") == sorted(records[2000:], key=lambda record: record.key)


@pytest.mark.slow
def test_256_slots_of_one_machine(opened, group):
    def slot(key: str) -> int:
        return int(key.split("/")[1]) % 256

    store = opened(slots=256, slot_of_record=slot)
    (fence,) = group.generation("one")
    started = time.monotonic()
    store.take(range(256), fence)
    empty_s = time.monotonic() - started
    store.put_many([Record.of(f"a/{number}", number) for number in range(2560)])
    store.close()
    again = opened("two", slots=256, slot_of_record=slot)
    (fence,) = group.generation("two")
    started = time.monotonic()
    again.take(range(256), fence)
    taken_s = time.monotonic() - started
    assert len(again.items("")) == 2560
    assert empty_s < PATIENCE_S
    assert taken_s < PATIENCE_S


def test_records_whose_slot_changed_with_the_rules(opened, group):
    shift = 0
    store = opened(slot_of_record=lambda key: (int(key.split("/")[1]) + shift) % SLOTS)
    store.take([1, 2], group.generation("one")[0])
    store.put_many([Record.of("a/1", "old"), Record.of("a/2", "old")])
    shift = 1
    assert store.items("") == []
    assert store.get("a/1") is None
    misplaced = list(store.slots.misplaced().values())
    assert sorted(record.key for record in misplaced) == ["a/1", "a/2"]
    with pytest.raises(StateError, match="has not the slot 3"):
        store.put_many(misplaced)
    store.put_many([record for record in misplaced if record.key == "a/1"])
    store.drop_misplaced(["a/1", "a/2"])
    assert store.slots.misplaced() == {}
    assert values(store) == {"a/1": "old"}
    store.close()
    again = opened("two", slot_of_record=lambda key: (int(key.split("/")[1]) + 1) % SLOTS)
    again.take(range(SLOTS), group.generation("two")[0])
    assert values(again) == {"a/1": "old"}
    assert again.slots.misplaced() == {}


@pytest.mark.parametrize("how", ["write", "release", "close"])
def test_a_write_that_failed_is_undone(opened, group, how):
    store = opened(timeout_s=SOON_S)
    (fence,) = group.generation("one")
    store.take([1, 2], fence)
    store.put("a/1", "old")
    with commits_lost(), pytest.raises(StateError, match="cannot be written: lost"):
        store.put_many([Record.of("a/2", "new")], delete=["a/1"])
    assert values(store) == {"a/1": "old"}
    if how == "write":
        store.put("b/1", 1)
        store.put_many((), delete=("b/1",))
    elif how == "release":
        store.release([1, 2])
    else:
        store.close()
    again = opened("two")
    again.take([1, 2], group.generation("two")[0])
    assert values(again) == {"a/1": "old"}


# Two machines


def test_a_slot_moves_with_the_last_write_in_flight(opened, group):
    one, two = opened("one"), opened("two")
    mine, theirs = group.generation("one", "two")
    one.take(range(SLOTS), mine)
    with stopped_at(EndTxnRequest, "one") as (there, go_on):
        write = Attempt(lambda: one.put("a/1", "last"))
        assert there.wait(30)
        release = Attempt(lambda: one.release([1]))
        time.sleep(0.05)
        assert release.is_alive()
        go_on.set()
        assert release.end() is None
        assert write.end() is None
    mine, theirs = group.generation("one", "two")
    one.slots.renew(mine)
    two.take([1], theirs)
    assert values(two) == {"a/1": "last"}
    two.put("a/1", "later")
    with pytest.raises(StateError, match="has not the slot 1"):
        one.put("a/1", "never")
    one.put("a/2", "still mine")


def test_an_old_owner_that_the_group_has_left_behind_writes_nothing(opened, group):
    one, two = opened("one", timeout_s=SOON_S), opened("two")
    (mine,) = group.generation("one")
    one.take(range(SLOTS), mine)
    one.put("a/1", "old")
    (theirs,) = group.generation("two")
    two.take(range(SLOTS), theirs)
    with pytest.raises(StateError, match=r"is beyond generation|UNKNOWN_MEMBER_ID"):
        one.put("a/1", "never")
    two.put("a/2", "new")
    expected = {"a/1": "old", "a/2": "new"}
    assert values(two) == expected
    two.release(range(SLOTS))
    (theirs,) = group.generation("two")
    two.take(range(SLOTS), theirs)
    assert values(two) == expected


@pytest.mark.parametrize("kind", [TxnOffsetCommitRequest, EndTxnRequest])
def test_what_an_old_owner_has_under_way_counts_before_the_handover_or_never(opened, group, kind):
    one, two = opened("one", timeout_s=10.0), opened("two")
    (mine,) = group.generation("one")
    one.take(range(SLOTS), mine)
    one.put("a/1", "old")
    with stopped_at(kind, "one") as (there, go_on):
        write = Attempt(lambda: one.put("a/1", "late"))
        assert there.wait(30)
        (theirs,) = group.generation("two")
        started = time.monotonic()
        two.take(range(SLOTS), theirs)
        assert time.monotonic() - started < PATIENCE_S
        found = two.get("a/1").value
        two.put("a/3", "new")
        go_on.set()
        one.slots.lose()
        error = write.end()
    assert found == "old"
    assert error is not None
    two.release(range(SLOTS))
    two.take(range(SLOTS), theirs)
    assert values(two) == {"a/1": "old", "a/3": "new"}


@pytest.mark.parametrize("moment", ["before", "between"])
def test_an_owner_killed_in_the_middle_of_a_transaction(kafka, name, opened, group, moment):
    (fence,) = group.generation("killed")
    arguments = [str(kafka.port), name, name, str(fence.generation), fence.member_id, moment]
    ended = subprocess.run([sys.executable, "-c", WRITER, *arguments], check=False, timeout=60)
    assert ended.returncode == -9
    two = opened("two")
    (theirs,) = group.generation("two")
    started = time.monotonic()
    two.take(range(SLOTS), theirs)
    assert time.monotonic() - started < PATIENCE_S
    assert values(two) == {f"a/{slot}": "kept" for slot in range(SLOTS)}
    two.put("a/1", "new")
    assert values(two, "a/1") == {"a/1": "new"}


@pytest.mark.slow
@pytest.mark.parametrize("writes", [1, 7, 30])
def test_an_owner_killed_at_any_time(kafka, name, opened, group, writes):
    (fence,) = group.generation("killed")
    arguments = [str(kafka.port), name, name, str(fence.generation), fence.member_id, "any"]
    command = [sys.executable, "-c", WRITER, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        told = [int(process.stdout.readline()) for _ in range(writes)]
        process.kill()
        told += [int(line) for line in process.stdout if line.endswith("\n")]
    two = opened("two")
    two.take(range(SLOTS), group.generation("two")[0])
    (found,) = set(values(two).values())
    assert found in (told[-1], told[-1] + 1)


def test_a_stranger_who_ends_no_transaction(kafka, name, opened, group, monkeypatch):
    store = opened()
    (fence,) = group.generation("one")
    store.take([2], fence)
    stranger = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": f"{name}-other"})
    stranger.init_transactions(30)
    stranger.begin_transaction()
    stranger.produce(name, b"{}", b"a/1", partition=1)
    assert stranger.flush(30) == 0
    monkeypatch.setattr(store_module, "LOAD_TIMEOUT_S", 1.0)
    under_way = rf"a transaction is under way in partition 1 of topic {name}\n    fix: let nothing"
    with pytest.raises(StateError, match=under_way):
        store.take([1, 2], fence)
    assert store.slots.taken == {2}
    store.put("a/2", 1)
    stranger.abort_transaction(30)
    store.take([1, 2], fence)
    assert values(store) == {"a/2": 1}


def test_the_machine_that_comes_back_after_a_kill_ends_its_own_transaction(
    kafka, name, opened, group
):
    (fence,) = group.generation("killed")
    arguments = [str(kafka.port), name, name, str(fence.generation), fence.member_id, "between"]
    subprocess.run([sys.executable, "-c", WRITER, *arguments], check=False, timeout=60)
    again = opened("killed")
    (fence,) = group.generation("again")
    again.take(range(SLOTS), fence)
    assert set(values(again).values()) == {"kept"}


def test_a_live_machine_whose_transaction_another_one_ended_writes_again(opened, group):
    """It was slow, not gone: it has other slots, or the same ones."""
    one = opened("one")
    (mine,) = group.generation("one")
    one.take(range(SLOTS), mine)
    opened("one").close()  # begins to write under the same name
    one.put("a/1", 1)
    assert values(one) == {"a/1": 1}


def test_a_new_generation_while_a_write_is_under_way(opened, group):
    one = opened("one")
    (mine,) = group.generation("one")
    one.take(range(SLOTS), mine)
    with stopped_at(TxnOffsetCommitRequest, "one") as (there, go_on):
        write = Attempt(lambda: one.put("a/1", "kept"))
        assert there.wait(30)
        newer, _ = group.generation("one", "two")
        go_on.set()
        time.sleep(0.3)
        assert write.is_alive()
        one.slots.renew(newer)
        assert write.end() is None
    assert values(one) == {"a/1": "kept"}
    two = opened("two")
    (theirs,) = group.generation("two")
    two.take(range(SLOTS), theirs)
    assert values(two) == {"a/1": "kept"}


def test_writes_go_on_through_many_generations(opened, group):
    """Each write is told to be kept or not; what was told is what the next owner finds."""
    one = opened("one")
    (mine,) = group.generation("one")
    one.take(range(SLOTS), mine)
    kept: Counter[str] = Counter()
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            for slot in range(SLOTS):
                one.put(f"a/{slot}", kept[f"a/{slot}"] + 1)
                kept[f"a/{slot}"] += 1

    writer = Attempt(write)
    for number in range(6):
        mine, *_ = group.generation("one", f"other-{number}")
        one.slots.renew(mine)
        time.sleep(0.2)
    until(lambda: len(kept) == SLOTS and min(kept.values()) > 2, "all are written more than once")
    ended.set()
    assert writer.end() is None
    two = opened("two")
    (theirs,) = group.generation("two")
    two.take(range(SLOTS), theirs)
    assert values(two) == kept


def test_a_slot_that_goes_to_and_fro_loses_and_doubles_nothing(opened, group):
    """Counters are read by each owner and counted on."""
    stores = {"one": opened("one"), "two": opened("two")}
    fences = dict(zip(stores, group.generation(*stores), strict=True))
    owner, other = "one", "two"
    stores[owner].take(range(SLOTS), fences[owner])
    for number in range(8):
        store = stores[owner]
        for slot in range(SLOTS):
            found = store.get(f"a/{slot}")
            assert (found.value if found else 0) == number
            store.put(f"a/{slot}", number + 1)
            store.put(f"gone/{slot}", number)
        store.put_many([], delete=[f"gone/{slot}" for slot in range(SLOTS)])
        store.release(range(SLOTS))
        fences = dict(zip(stores, group.generation(*stores), strict=True))
        owner, other = other, owner
        stores[owner].take(range(SLOTS), fences[owner])
        assert stores[owner].items("gone/") == []
    assert values(stores[owner]) == {f"a/{slot}": 8 for slot in range(SLOTS)}
    assert stores[other].items("a/1") == []


def test_after_a_loss_nothing_is_written_until_slots_are_taken_anew(opened, group):
    one, two = opened("one", timeout_s=SOON_S), opened("two")
    (mine,) = group.generation("one")
    one.take(range(SLOTS), mine)
    one.put("a/1", "old")
    one.slots.lose()
    assert one.slots.taken == frozenset()
    with pytest.raises(StateError, match="is not in the group of its tier"):
        one.put("a/1", "never")
    assert values(one) == {"a/1": "old"}
    (theirs,) = group.generation("two")
    two.take([1], theirs)
    two.put("a/1", "theirs")
    two.release([1])
    mine, _ = group.generation("one", "two")
    one.slots.renew(mine)
    with pytest.raises(StateError, match="has not the slot 1"):
        one.put("a/1", "never")
    one.take(range(SLOTS), mine)
    assert values(one) == {"a/1": "theirs"}
    one.put("a/1", "mine again")


def test_a_member_that_joined_anew_must_take_its_slots_anew(opened, group):
    one = opened("one")
    (mine,) = group.generation("one")
    one.take([1], mine)
    group.generation("two")
    mine, _ = group.generation("one", "two")
    one.slots.renew(mine)
    with pytest.raises(StateError, match="has not the slot 1"):
        one.put("a/1", "never")


def test_records_are_once_in_the_topic_after_all(kafka, name, opened, group):
    """Read as another consumer of committed records would read them."""
    one = opened("one")
    (mine,) = group.generation("one")
    one.take(range(SLOTS), mine)
    for number in range(20):
        one.put(f"a/{number % SLOTS}", number)
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": f"{name}-reader",
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([name])
    found: list[Any] = []
    until(lambda: read_into(found, consumer) >= 20, "all is read")
    time.sleep(0.5)
    read_into(found, consumer)
    consumer.close()
    assert sorted(found) == list(range(20))


def read_into(found: list[Any], consumer: Consumer) -> int:
    for message in consumer.consume(100, 0.5):
        assert message.error() is None
        assert dict(message.headers())["writer"] == b"tier/one"
        found.append(json.loads(message.value()))
    return len(found)


# The common slot


def test_the_common_slot_is_read_by_all(opened, group):
    one, two = opened("one"), opened("two")
    changes: list[frozenset[str]] = []
    two.follow_common(changes.append)
    (mine, theirs) = group.generation("one", "two")
    one.take(range(4), mine)
    two.take(range(4, 8), theirs)
    one.put("quotas/0", 1)
    started = time.monotonic()
    until(lambda: changes, "the change is told")
    assert time.monotonic() - started < PATIENCE_S
    assert changes == [frozenset({"quotas/0"})]
    assert two.get("quotas/0").value == 1
    one.put("a/1", "of no concern")
    one.put_many((), delete=("quotas/0",))
    until(lambda: two.get("quotas/0") is None, "the deletion is seen")
    with pytest.raises(StateError, match="has not the slot 0"):
        two.put("quotas/0", 2)
    one.put("quotas/8", 3)
    assert opened("three").get("quotas/8").value == 3


def test_the_common_slot_changes_hands(opened, group):
    stores = {"one": opened("one"), "two": opened("two")}
    told: dict[str, list[str]] = {"one": [], "two": []}
    for each, store in stores.items():
        store.follow_common(told[each].extend)
    order = ["one", "two"]
    for number in range(1, 6):
        fences = dict(zip(stores, group.generation(*stores), strict=True))
        owner, other = order
        stores[other].release([COMMON])
        stores[owner].take([COMMON], fences[owner])
        assert values(stores[owner]) == ({"quotas/0": number - 1} if number > 1 else {})
        stores[owner].put("quotas/0", -1)
        stores[owner].put("quotas/0", number)
        until(lambda n=number, o=other: values(stores[o]) == {"quotas/0": n}, "it is seen")
        order.reverse()
    assert set(told["one"]) == set(told["two"]) == {"quotas/0"}
    stores["one"].release([COMMON])
    time.sleep(1.0)
    assert values(stores["one"]) == {"quotas/0": 5}


def test_a_topic_that_was_made_anew_gets_all_that_there_was(kafka, name, opened, group):
    one, two = opened("one"), opened("two")
    two.follow_common(lambda _keys: None)
    (mine, theirs) = group.generation("one", "two")
    one.take(range(4), mine)
    two.take(range(4, 8), theirs)
    for number in range(3):
        one.put_many([Record.of(f"a/{slot}", number) for slot in range(4)])
        two.put_many([Record.of(f"a/{slot}", number) for slot in range(4, 8)])
    until(lambda: two.get("a/0").value == 2, "the common slot is followed")
    with AdminClient({"bootstrap.servers": kafka.bootstrap}) as admin:
        admin.delete_topics([name])[name].result(PATIENCE_S)
    until(lambda: name not in topics(kafka), "it is gone")
    opened("three")  # which makes it
    for store in (one, two):
        slot = min(store.slots.taken)
        # The first write finds that it is another topic, and the second one has all.
        store.put(f"b/{slot}", "first")
        store.put(f"b/{slot}", "second")
    until(lambda: two.get("b/0") is not None, "the common slot is followed again")
    one.close()
    two.close()
    (fence,) = group.generation("four")
    four = opened("four")
    four.take(range(SLOTS), fence)
    assert values(four, "a/") == {f"a/{slot}": 2 for slot in range(SLOTS)}
    assert values(four, "b/") == {"b/0": "second", "b/4": "second"}


def topics(kafka: EmbeddedBroker) -> Collection[str]:
    with AdminClient({"bootstrap.servers": kafka.bootstrap}) as admin:
        return admin.list_topics(timeout=PATIENCE_S).topics


# Brokers that are away


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "other"), [("one", "two"), (ALONE, ALONE)])
def test_a_broker_that_goes_and_comes_back(tmp_path, machine, other):
    with EmbeddedBroker(tmp_path) as broker:
        group = SlotGroup(broker.port, "tier")

        def having(machine: str | None, **arguments: Any) -> SlotStore:
            store = slot_store(broker.port, "the-state", machine, **arguments)
            if machine is not ALONE:
                store.follow_common(lambda _: None)
                store.take(range(1, SLOTS), *group.generation(machine))
            return store

        store = having(machine, timeout_s=1.0)
        store.put("a/1", 1)
        broker.kill()
        for _ in range(2):
            with pytest.raises(StateError, match=r"cannot be written: .*Connection refused"):
                store.put("a/1", 2)
        assert store.get("a/1").value == 1
        broker.start()
        until(lambda: written(store, "a/2", 3), "it is written")
        store.close()
        with closing(having(other)) as again:
            assert values(again) == {"a/1": 1, "a/2": 3}
            broker.kill()
        with pytest.raises(ClosedError, match="the state is not open"):
            again.get("a/1")


@pytest.mark.slow
def test_one_broker_of_three_may_go(tmp_path):
    properties = {
        "transaction.state.log.replication.factor": "3",
        "transaction.state.log.min.isr": "2",
        "offsets.topic.replication.factor": "3",
    }
    with EmbeddedCluster(tmp_path, 3, properties=properties) as cluster:
        port = cluster.brokers[0].port
        group = SlotGroup(port, "tier")
        store = slot_store(port, "the-state", "one", timeout_s=30.0)
        (fence,) = group.generation("one")
        store.take(range(SLOTS), fence)
        store.put_many([Record.of(f"a/{slot}", 1) for slot in range(SLOTS)])
        cluster.brokers[2].kill()  # the first is the only controller, and must stay
        store.put_many([Record.of(f"a/{slot}", 2) for slot in range(SLOTS)])
        store.close()
        with closing(slot_store(port, "the-state", "two", timeout_s=30.0)) as again:
            (fence,) = group.generation("two")
            again.take(range(SLOTS), fence)
            assert set(values(again).values()) == {2}


def test_a_fence_that_nobody_knows(opened, group):
    store = opened(timeout_s=SOON_S)
    store.take([1], GroupFence(group.group_id, 7, "nobody"))
    with pytest.raises(
        StateError, match=r"is beyond generation 7: .*\n    fix: nothing: it writes"
    ):
        store.put("a/1", 1)


@pytest.mark.slow
def test_the_rights_that_the_documentation_names_are_enough(tmp_path):
    properties = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    topic_rights = (
        AclOperation.CREATE,
        AclOperation.DESCRIBE_CONFIGS,
        AclOperation.READ,
        AclOperation.WRITE,
    )
    rights = [(ResourceType.TOPIC, "the-state", operation) for operation in topic_rights]
    rights.append((ResourceType.GROUP, "the-group", AclOperation.READ))
    writers = ResourceType.TRANSACTIONAL_ID, "tier/", AclOperation.WRITE
    login = Login(Credentials("PLAIN", "alice", "alice-secret"))
    with EmbeddedBroker(
        tmp_path, sasl_users={"alice": "alice-secret"}, properties=properties
    ) as broker:
        port = int(broker.sasl_bootstrap.rpartition(":")[2])
        with AdminClient({"bootstrap.servers": broker.bootstrap}) as admin:
            allow(admin, rights)
            forbidden = (
                "read the group of tier tier and use transactional ids that begin with tier/"
            )
            with pytest.raises(StateError, match=f"fix: let quota-proxy .*{forbidden}"):
                slot_store(port, "the-state", "one", login=login)
            allow(admin, [writers])

        def may_write() -> bool:
            with suppress(StateError):
                slot_store(port, "the-state", "one", login=login).close()
                return True
            return False

        until(may_write, "the broker knows the right")
        group = SlotGroup(broker.port, "the-group")
        with closing(slot_store(port, "the-state", "one", login=login)) as store:
            store.take(range(SLOTS), group.generation("one")[0])
            store.put("a/1", 1)
        with closing(slot_store(port, "the-state", "two", login=login)) as store:
            store.take(range(SLOTS), group.generation("two")[0])
            assert values(store) == {"a/1": 1}


def allow(admin: AdminClient, rights: list[tuple[ResourceType, str, AclOperation]]) -> None:
    acls = [
        AclBinding(
            kind,
            name,
            ResourcePatternType.PREFIXED,
            "User:alice",
            "*",
            operation,
            AclPermissionType.ALLOW,
        )
        for kind, name, operation in rights
    ]
    for made in admin.create_acls(acls).values():
        made.result(30)
