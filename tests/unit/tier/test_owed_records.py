"""What clients owe travels with their slot, and never becomes more on the way."""

import pytest
from parts.virtual_time import VirtualTime

from proxy import debt_records
from proxy.debt_records import DEBTS_SCHEMA
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.manager import SensorDebt
from proxy.state import MemoryStore, Record
from proxy.tier.tier_store import (
    MOST_SERVED_ON_MS,
    OWED,
    slot_key,
    take_debts,
    write_debts,
)


def etl(owed_ms: float) -> SensorDebt:
    client = ClientIdentity("main", None, "etl")
    return SensorDebt(client, "client-id=etl", QuotaKind.CONSUMER_BYTE_RATE, owed_ms)


def web(owed_ms: float) -> SensorDebt:
    client = ClientIdentity("main", "anna", "web")
    return SensorDebt(client, "user=anna", QuotaKind.PRODUCER_BYTE_RATE, owed_ms)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    clock = VirtualTime()

    class Clock:
        @staticmethod
        def time() -> float:
            return clock.now_s

        @staticmethod
        def clock_gettime(_clock: int) -> float:
            return 0.0

    monkeypatch.setattr(debt_records, "time", Clock)
    monkeypatch.setattr(debt_records, "boot_id", str)  # as on another machine
    return clock


def test_who_is_served_on_the_way_owes_as_much_at_its_end(clock: VirtualTime) -> None:
    store = MemoryStore()
    write_debts(store, [(7, etl(3000.0)), (7, web(500.0))])
    clock.pass_ms(MOST_SERVED_ON_MS)
    assert take_debts(store, [7]) == [etl(pytest.approx(3000.0)), web(pytest.approx(500.0))]


def test_nobody_is_served_on_for_longer(clock: VirtualTime) -> None:
    store = MemoryStore()
    write_debts(store, [(7, etl(3000.0)), (7, web(500.0))])
    clock.pass_ms(MOST_SERVED_ON_MS + 1000)
    assert take_debts(store, [7]) == [etl(pytest.approx(2000.0))]


def test_a_clock_that_goes_back_makes_nothing_more(clock: VirtualTime) -> None:
    store = MemoryStore()
    write_debts(store, [(7, etl(3000.0))])
    clock.pass_ms(-60_000)
    assert take_debts(store, [7]) == [etl(3000.0)]


def test_each_slot_has_its_own_and_is_taken_once(clock: VirtualTime) -> None:
    store = MemoryStore()
    write_debts(store, [(1, etl(10.0)), (2, web(20.0))])
    assert [each.key for each in store.items("")] == [slot_key(OWED, 1), slot_key(OWED, 2)]
    assert take_debts(store, {2, 3}) == [web(20.0)]
    assert take_debts(store, {2, 3}) == []
    assert take_debts(store, {1}) == [etl(10.0)]
    assert store.items("") == []


def test_nothing_owed_writes_nothing(clock: VirtualTime) -> None:
    store = MemoryStore()
    write_debts(store, [])
    assert store.items("") == []


@pytest.mark.parametrize("value", [[], {}, {"at_s": "x", "owed": []}, {"at_s": 1, "owed": [[]]}])
def test_a_damaged_record_costs_only_itself(clock: VirtualTime, value: object) -> None:
    store = MemoryStore()
    write_debts(store, [(2, web(20.0))])
    store.put_many([Record.of(slot_key(OWED, 1), value, DEBTS_SCHEMA)])  # type: ignore[arg-type]
    assert take_debts(store, {1, 2}) == [web(20.0)]
    assert store.items("") == []
