"""The parts of the store of slots that do without a broker."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest

from proxy.cluster.kafka_client import Bootstrap
from proxy.cluster.upstream import NOT_READY, NonRetriableError, UpstreamError
from proxy.state import GroupFence, Record, StateError
from proxy.state.kafka.slot_store import SlotStore
from proxy.state.kafka.slot_table import SlotTable
from proxy.state.kafka.state_topic import StateTopic
from proxy.state.store import ClosedError

T = TypeVar("T")
FIRST = GroupFence("tier", 4, "member-a")
NEWER = GroupFence("tier", 5, "member-a")
ANEW = GroupFence("tier", 6, "member-b")


@pytest.fixture
def holds() -> SlotTable:
    made = SlotTable(slot_of)
    assert made.took([1, 2], made.renew(FIRST))
    return made


def refused(holds: SlotTable, *slots: int) -> bool:
    try:
        holds.check(slots)
    except StateError:
        return True
    return False


def test_only_what_was_taken_may_be_written(holds):
    assert holds.check([1, 2]) == FIRST
    assert holds.taken == {1, 2}
    with pytest.raises(StateError, match="has not the slot 3"):
        holds.check([3, 2])
    holds.release([1, 7])
    assert refused(holds, 1)
    assert not refused(holds, 2)


def test_nothing_is_written_before_the_first_generation():
    with pytest.raises(StateError, match="is not in the group"):
        SlotTable(slot_of).check([1])


def test_a_newer_generation_keeps_the_slots_and_an_older_one_is_ignored(holds):
    holds.renew(NEWER)
    assert holds.check([1]) == NEWER
    holds.renew(FIRST)
    assert holds.check([1]) == NEWER


def test_a_loss_holds_until_slots_are_taken_anew(holds):
    losses = holds.renew(NEWER)
    holds.lose()
    assert refused(holds, 1)
    assert not holds.took([1], losses)
    holds.renew(NEWER)
    assert refused(holds, 1)
    assert holds.took([1], holds.renew(NEWER))
    assert not refused(holds, 1)


def test_a_member_with_another_id_has_lost_its_slots(holds):
    losses = holds.renew(ANEW)
    assert refused(holds, 1)
    assert holds.took([2], losses)
    assert holds.check([2]) == ANEW


def record(key: str, value: int = 1) -> Record:
    return Record.of(key, value)


def slot_of(key: str) -> int:
    return int(key[-1])


def test_records_are_found_in_their_slots():
    records = SlotTable(slot_of)
    assert records.change({(1, "a/1"): record("a/1"), (2, "a/2"): record("a/2")}) == {"a/1", "a/2"}
    assert records.change({(1, "a/1"): record("a/1"), (2, "b/2"): None}) == set()
    assert records.items("a/") == [record("a/1"), record("a/2")]
    assert records.change({(1, "a/1"): None, (2, "a/2"): record("a/2", 2)}) == {"a/1", "a/2"}
    assert records.at((1, "a/1")) is None
    changed = records.replace([1, 2], {(1, "c/1"): record("c/1"), (1, "d/1"): None})
    assert changed == {"c/1", "a/2"}
    assert records.items("") == [record("c/1")]
    assert records.size_bytes == len("c/1") + 1
    assert records.replace([1, 5], {}) == {"c/1"}
    assert (records.items(""), records.size_bytes) == ([], 0)


def test_a_record_in_another_slot_than_its_own_is_misplaced():
    records = SlotTable(slot_of)
    old, new = record("a/1", 0), record("a/1")
    records.change({(3, "a/1"): old, (3, "a/3"): record("a/3"), (1, "a/1"): new})
    assert records.items("") == [record("a/1"), record("a/3")]
    assert records.took([1], records.renew(FIRST))
    assert records.misplaced() == {}
    assert records.took([3], records.renew(FIRST))
    assert records.misplaced() == {(3, "a/1"): record("a/1", 0)}
    records.change({(3, "a/1"): None})
    assert records.misplaced() == {}
    assert records.at(records.place("a/1")) == record("a/1")


class UnopenedStore(SlotStore):
    def __init__(self) -> None:
        super().__init__(Bootstrap([("broker", 9092)]), "t", tier="tier", machine="one", slots=256)

    async def _open(self) -> None:
        pass

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do what a store does to read."""
        return self._run(work, "read")

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Do it without waiting for it."""
        return self._start(work)


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (UpstreamError(NOT_READY, "no"), "check that the brokers are up"),
        (
            NonRetriableError("no", 30),
            "read and write topic t and read the group of tier tier and use transactional ids that "
            r"begin with tier/ \(kafka-acls.sh\), or run without a tier",
        ),
        (NonRetriableError("no", 10), "raise max.message.bytes of topic t"),
        (NonRetriableError("no", 87), "--topic t --partitions 256"),
    ],
)
def test_what_brokers_say_is_explained(error, fix):
    store = UnopenedStore()

    async def fail() -> None:
        raise error

    try:
        with pytest.raises(StateError, match=f"topic t cannot be read: no\n    fix: .*{fix}"):
            store.run(fail())
    finally:
        store.close()


def test_an_error_makes_leaders_and_coordinators_be_looked_for_anew():
    topic = StateTopic(Bootstrap([("broker", 9092)]), "state", 256)
    with pytest.raises(UpstreamError, match="write: NOT_LEADER"):
        topic.check(6, "write")


def test_a_store_that_is_closed_ends_what_runs_still():
    store = UnopenedStore()

    async def name() -> str:
        return threading.current_thread().name

    async def fail() -> None:
        raise ValueError("no")

    assert store.run(name()) == "kafka-state"
    with pytest.raises(ValueError, match="no"):
        store.run(fail())
    endless = store.start(forever())
    store.close()
    assert endless.cancelled()
    with pytest.raises(ClosedError, match="the state is not open"):
        store.run(name())


async def forever() -> None:
    await asyncio.Event().wait()
