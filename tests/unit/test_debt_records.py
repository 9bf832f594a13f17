"""Debts in the state: what changes is written, and what is read is no more than was owed."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from parts.quota_world import QuotaWorld

from proxy import debt_records
from proxy.debt_records import DEBT_PARTS, DEBTS, LEAST_KEPT_MS, DebtStore
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.manager import SensorDebt
from proxy.quota.rules import Rule
from proxy.state import MemoryStore, Record

MB = 1_000_000
KIND = QuotaKind.PRODUCER_BYTE_RATE
HOUR_S = 3600.0


class Clocks:
    """The machine's, in the place of `time`: one that can be set, and one since its start."""

    CLOCK_MONOTONIC = 1

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_s, self.up_s = 1_000_000.0, 50.0
        monkeypatch.setattr(debt_records, "time", self)

    def time(self) -> float:
        return self.wall_s

    def clock_gettime(self, _clock: int) -> float:
        return self.up_s

    def passes(self, seconds: float) -> None:
        self.wall_s += seconds
        self.up_s += seconds

    @property
    def now_ms(self) -> float:
        return self.up_s * 1000


class CountedStore(MemoryStore):
    """Counts what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = self.written = 0

    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> int:
        new = list(records)
        self.writes += 1
        self.written += len(new)
        return super().put_many(new, delete=delete)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def debt(name: str, owed_ms: float, held_ms: float = 0.0) -> SensorDebt:
    return SensorDebt(
        ClientIdentity("main", None, name), f"client-id={name}", KIND, owed_ms, held_ms
    )


def test_what_was_owed_is_owed_less_the_time(clocks: Clocks) -> None:
    store = MemoryStore()
    owed = [debt("a", 40_000.0, 30_000.0), debt("b", 1500.0), debt("c", 3_600_000.0)]
    DebtStore().write(store, owed, clocks.now_ms)
    clocks.passes(2.0)
    left = DebtStore().read(store, clocks.now_ms)
    expected = [debt("a", 38_000.0, 28_000.0), debt("c", 3_598_000.0)]
    assert sorted(left, key=lambda each: each.entity) == expected


@pytest.mark.parametrize(
    ("jump_s", "reboots", "left_ms"),
    [
        pytest.param(9 * HOUR_S, False, 38_000.0, id="put forward"),
        pytest.param(-9 * HOUR_S, False, 38_000.0, id="put back"),
        pytest.param(-9 * HOUR_S, True, 40_000.0, id="put back before the machine began again"),
        pytest.param(0.0, True, 38_000.0, id="the machine began again"),
    ],
)
def test_a_clock_that_was_set(
    clocks: Clocks, jump_s: float, reboots: bool, left_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    DebtStore().write(store, [debt("a", 40_000.0)], clocks.now_ms)
    clocks.passes(2.0)
    clocks.wall_s += jump_s
    if reboots:
        monkeypatch.setattr(debt_records, "boot_id", lambda: "another")
    (left,) = DebtStore().read(store, clocks.now_ms)
    assert left.owed_ms == pytest.approx(left_ms)


def test_only_what_changes_is_written(clocks: Clocks) -> None:
    store, records = CountedStore(), DebtStore()
    owed = [debt(f"client-{number}", 60_000.0) for number in range(10_000)]
    records.write(store, owed, clocks.now_ms)
    assert store.written == DEBT_PARTS
    clocks.passes(1.0)
    owed = [replace(each, owed_ms=each.owed_ms - 1000.0) for each in owed]
    records.write(store, owed, clocks.now_ms)
    assert store.writes == 1, "as they are worked off"
    owed[7] = replace(owed[7], owed_ms=80_000.0)
    records.write(store, owed, clocks.now_ms)
    assert (store.writes, store.written) == (2, DEBT_PARTS + 1)
    clocks.passes(1.0)
    owed = [replace(each, owed_ms=each.owed_ms - 1000.0) for each in owed if each is not owed[9]]
    records.write(store, owed, clocks.now_ms)
    assert store.written == DEBT_PARTS + 2, "one was forgiven"
    assert len(DebtStore().read(store, clocks.now_ms)) == 9999
    records.write(store, [], clocks.now_ms)
    assert store.items(DEBTS) == []


def test_a_process_goes_on_with_the_records_of_the_one_before(clocks: Clocks) -> None:
    store = CountedStore()
    DebtStore().write(store, [debt("a", 9000.0), debt("b", 9000.0)], clocks.now_ms)
    records = DebtStore()
    left = records.read(store, clocks.now_ms)
    records.write(store, left, clocks.now_ms)
    assert store.writes == 1
    records.write(store, left[:1], clocks.now_ms)
    assert len(DebtStore().read(store, clocks.now_ms)) == 1


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "{}", '{"boot":"","at_s":"x","up_s":1,"owed":[]}', "null"),
        '{"boot":"","at_s":1%s,"up_s":1,"owed":[]}' % ("0" * 400),
        pytest.param("[" * 100_000, id="nested deeply"),
    ],
)
def test_a_record_that_cannot_be_read_is_left_out(clocks: Clocks, text: str) -> None:
    store = MemoryStore()
    records = DebtStore()
    records.write(store, [debt("a", 9000.0)], clocks.now_ms)
    store.put_many([Record(f"{DEBTS}{DEBT_PARTS}", text, debt_records.DEBTS_SCHEMA)])
    assert len(DebtStore().read(store, clocks.now_ms)) == 1


def test_debts_that_nobody_has_come_for_are_kept_on() -> None:
    """So that a second crash does not forgive them; and whoever comes waits as it had to before."""
    world = QuotaWorld(Rule(client_id="a", bounds={KIND: 1.0 * MB}))
    quotas = world.quotas
    quotas.take_debts([debt("a", 40_000.0, 30_000.0)], world.now_ms)
    world.pass_ms(1000.0)

    def owed() -> list[SensorDebt]:
        walk = quotas.owing(lambda _: True, lambda: world.now_ms, LEAST_KEPT_MS)
        return [each for each in walk if each is not None]

    assert owed() == [debt("a", 39_000.0, 29_000.0)]
    client = world.client_quotas("a", listener="main")
    assert client.owed_ms(KIND, world.now_ms) == 29_000.0
    (left,) = owed()
    assert left.owed_ms == 39_000.0
