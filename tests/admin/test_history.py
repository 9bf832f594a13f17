"""Ten minutes of rate against bound, and never more than the limits."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from admin_world import CONSUMER, MIB, AdminWorld, tick
from hypothesis import given
from hypothesis import strategies as st

from proxy.admin import history as history_module
from proxy.admin.history import HISTORY_INTERVAL_MS, RateHistory
from proxy.quota.meter import Meter
from proxy.quota.rules import Rule

START_MS = 1000.0
ENTITIES = "abcdefgh"
INTERVAL_MS = HISTORY_INTERVAL_MS


def row(entity: str, rate: float, bound: float = 100.0) -> tuple[Meter, float]:
    return Meter(CONSUMER, entity, Rule(client_id=entity, bounds={CONSUMER: bound})), rate


class Rows:
    """What is measured, until it is changed."""

    def __init__(self, *rows: tuple[Meter, float]) -> None:
        self.now = list(rows)

    def __call__(self, _: Callable[[], float]) -> list[tuple[Meter, float]]:
        return self.now


def test_a_sample_is_taken_every_interval_however_often_it_ticks():
    history = RateHistory(Rows(row("a", 1.0)))
    taken = [tick(history, START_MS + second * 1000.0) for second in range(31)]
    assert [second for second, was in enumerate(taken) if was] == [0, 5, 10, 15, 20, 25, 30]


def test_late_ticks_do_not_stretch_the_time():
    history = RateHistory(Rows(row("a", 1.0)))
    ticks = [START_MS + step * 1700.0 for step in range(2000)]
    sampled = [now_ms for now_ms in ticks if tick(history, now_ms)]
    mean_ms = (sampled[-1] - sampled[0]) / (len(sampled) - 1)
    assert abs(mean_ms - INTERVAL_MS) < 20
    assert min(after - before for before, after in pairwise(sampled)) >= INTERVAL_MS / 2


def test_a_pause_is_not_made_up_for():
    history = RateHistory(Rows(row("a", 1.0)))
    tick(history, START_MS)
    later_ms = START_MS + 3_600_000.0
    assert [tick(history, later_ms + step) for step in (0.0, 1.0, 2.0)] == [True, False, False]


def test_the_document_has_rates_and_the_changes_of_the_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(history_module, "SAMPLES", 4)
    rows = Rows()
    history = RateHistory(rows)
    for step, (rate, bound) in enumerate([(9, 5), (1, 10), (2, 10), (3.04, 20), (4, 20)]):
        rows.now = [row("a", rate, bound)]
        tick(history, START_MS + step * INTERVAL_MS)
    assert history.document(rows.now[0][0]) == {
        "interval_s": 5.0,
        "rates": [1, 2, 3.0, 4],
        "bounds": [(0, 10), (2, 20)],
    }


def test_idle_sensors_are_not_taken_in_and_gone_ones_are_forgotten():
    rows = Rows(row("idle", 0.0), row("busy", 1.0))
    history = RateHistory(rows)
    tick(history, START_MS)
    assert history.document(row("idle", 0.0)[0]) is None
    rows.now = [row("busy", 0.0)]
    tick(history, START_MS + INTERVAL_MS)
    document = history.document(row("busy", 0.0)[0])
    assert document is not None
    assert document["rates"] == [1.0, 0.0]
    rows.now = []
    tick(history, START_MS + 2 * INTERVAL_MS)
    assert history.document(row("busy", 0.0)[0]) is None


@given(
    st.lists(
        st.dictionaries(st.sampled_from(ENTITIES), st.floats(0.0, 1000.0)), min_size=1, max_size=8
    )
)
def test_those_closest_to_their_bound_stay(steps: list[dict[str, float]]):
    rows = Rows()
    history = RateHistory(rows)
    peaks: dict[str, float] = {}
    for step, rates in enumerate(steps):
        rows.now = [row(entity, rate) for entity, rate in rates.items()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(history_module, "MAX_SERIES", 3)
            tick(history, START_MS + step * INTERVAL_MS)
        kept = {each for each in ENTITIES if history.document(row(each, 0.0)[0]) is not None}
        assert len(kept) <= 3
        assert kept <= rates.keys()
        peaks = {
            each: max(rates[each], peaks.get(each, 0.0)) if each in kept else 0.0 for each in kept
        }
        new = {each: rate for each, rate in rates.items() if rate > 0 and each not in kept}
        if new and kept:
            assert max(new.values()) <= min(peaks.values())


def test_it_samples_a_real_manager():
    world = AdminWorld()
    send = world.connect("etl-orders")
    for _ in range(700):
        world.now_ms += 1000.0
        send(4 * MIB)
        tick(world.history, world.now_ms)
    (meter,) = (each for each in world.quotas.iter_meters() if each.kind is CONSUMER)
    document = world.history.document(meter)
    assert document is not None
    rates = document["rates"]
    assert isinstance(rates, list)
    assert len(rates) == 120
    assert all(abs(rate - 4 * MIB) < 0.5 * MIB for rate in rates)
