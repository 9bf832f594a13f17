"""What clients owe travels with their slot, and never becomes more on the way."""

import pytest
from parts.virtual_time import VirtualTime

from proxy.state import MemoryStore, Record
from proxy.workers import owed_records
from proxy.tier.records import OwedRecords
from proxy.tier.records import OWED, slot_key

ETL = ["main", None, "etl", "client-id=etl", "consumer_byte_rate"]
WEB = ["main", "anna", "web", "user=anna", "producer_byte_rate"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    clock = VirtualTime()

    class Clock:
        @staticmethod
        def time() -> float:
            return clock.now_s

    monkeypatch.setattr(owed_records, "time", Clock)
    return clock


def test_of_what_is_owed_the_time_on_the_way_is_gone(clock: VirtualTime) -> None:
    owed = OwedRecords(MemoryStore())
    owed.write([(7, [*ETL, 3000.0]), (7, [*WEB, 500.0])])
    clock.pass_ms(1000)
    assert owed.take([7]) == [[*ETL, pytest.approx(2000.0)]]


def test_a_clock_that_goes_back_makes_nothing_more(clock: VirtualTime) -> None:
    owed = OwedRecords(MemoryStore())
    owed.write([(7, [*ETL, 3000.0])])
    clock.pass_ms(-60_000)
    assert owed.take([7]) == [[*ETL, 3000.0]]


def test_each_slot_has_its_own_and_is_taken_once(clock: VirtualTime) -> None:
    store = MemoryStore()
    owed = OwedRecords(store)
    owed.write([(1, [*ETL, 10.0]), (2, [*WEB, 20.0])])
    assert [each.key for each in store.items("")] == [slot_key(OWED, 1), slot_key(OWED, 2)]
    assert owed.take({2, 3}) == [[*WEB, 20.0]]
    assert owed.take({2, 3}) == []
    assert owed.take({1}) == [[*ETL, 10.0]]
    assert store.items("") == []


def test_nothing_owed_writes_nothing(clock: VirtualTime) -> None:
    store = MemoryStore()
    OwedRecords(store).write([])
    assert store.items("") == []


@pytest.mark.parametrize("value", [[], {}, {"at_s": "x", "owed": []}, {"at_s": 1, "owed": [[]]}])
def test_a_damaged_record_costs_only_itself(clock: VirtualTime, value: object) -> None:
    store = MemoryStore()
    owed = OwedRecords(store)
    owed.write([(2, [*WEB, 20.0])])
    store.put_many([Record.of(slot_key(OWED, 1), value)])  # type: ignore[arg-type]
    assert owed.take({1, 2}) == [[*WEB, 20.0]]
    assert store.items("") == []
