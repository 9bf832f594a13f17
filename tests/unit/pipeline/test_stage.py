"""When a stage asks, and what for."""

import math

import pytest
from pipeline_parts import stage

from proxy.pipeline.nodes import SILENT_MS, NodeHold, RateChangeDirection, RateMeter, Stage

SETTINGS = stage("s", "a", "b c", band=(50.0, 150.0))
LESS, MORE = RateChangeDirection.DECREASE, RateChangeDirection.INCREASE


class Run:
    """A stage that is fed one period after the other."""

    def __init__(self, max_lag: int | None = None, *, holds: bool = True) -> None:
        self.stage = Stage(SETTINGS, max_lag, 0.0)
        self.now_ms = self.total = 0.0
        self.stage.sample(self.total, self.now_ms)
        self.holds = holds

    def period(self, rates: str, lag: int | None = None) -> RateChangeDirection | None:
        for rate in map(float, rates.split()):
            self.now_ms += 1_000
            self.total += rate
            self.stage.sample(self.total, self.now_ms)
        if lag is not None:
            self.stage.lag(lag)
        verdict = self.stage.close(self.now_ms, holds=self.holds)
        return verdict.direction if verdict else None


BANDS = {
    "in the band": ("100 100 50 150", None),
    "all above": ("200 200 200 200", LESS),
    "above in as many as the ratio": ("200 200 100 100", None),
    "above in more than the ratio": ("200 200 200 100", LESS),
    "below": ("10 10 10 100", MORE),
    "nothing arrives": ("0 0 0 0", MORE),
    "both sides count together": ("10 10 200 100", MORE),
    "a tie asks for less": ("10 10 200 200", LESS),
}


@pytest.mark.parametrize(("rates", "expected"), BANDS.values(), ids=BANDS.keys())
def test_band(rates, expected):
    assert Run().period(rates) == expected


def test_the_band_moves_with_the_rate_of_the_stage_itself():
    run = Run()
    run.stage.load(NodeHold(0.4 * SETTINGS.normal_rate), ())
    assert run.period("100 100 100 100") == LESS
    assert run.period("40 40 40 40") is None


def test_without_samples_nothing_is_asked():
    assert Run().period("") is None


def test_only_a_stage_that_holds_somebody_asks_for_more():
    run = Run(holds=False)
    assert run.period("10 10 10 10") is None
    run.holds = True
    assert run.period("10 10 10 10") == MORE
    run.holds = False
    assert run.period("10 10 10 10") is None
    assert run.period("200 200 200 200") == LESS  # it keeps sampling


def test_asking_for_more_goes_on_within_the_band_until_it_is_sent_too_much():
    run = Run()
    assert run.period("100 100 100 100") is None
    assert run.period("10 10 10 10") == MORE
    assert run.period("100 100 100 100") == MORE
    assert run.period("200 200 200 200") == LESS
    assert run.period("100 100 100 100") is None


LAGS = {
    "above the bound": ([1_001], [LESS]),
    "above, and falling": ([1_200, 1_100], [LESS, None]),
    "above, and the same": ([1_200, 1_200], [LESS, LESS]),
    "at the bound": ([1_000], [None]),
    "not eased yet": ([501], [None]),
    "eased": ([500, 500], [MORE, MORE]),
    "eased, but growing": ([100, 101], [MORE, None]),
}


@pytest.mark.parametrize(("lags", "expected"), LAGS.values(), ids=LAGS.keys())
@pytest.mark.parametrize("rates", ["100 100 100 100", "10 10 10 10"])
def test_lag_asks_whatever_the_band_says(lags, expected, rates):
    run = Run(max_lag=1_000)
    assert [run.period(rates, lag) for lag in lags] == expected


def test_the_least_lag_of_a_period_counts():
    run = Run(max_lag=1_000)
    run.stage.lag(5_000)
    assert run.period("100 100 100 100", lag=200) == MORE


def test_periods_that_went_by_unnoticed_are_left_out():
    trigger = Stage(SETTINGS, None, 0.0)
    trigger.close(13_000.0, holds=False)
    assert trigger.due_ms == 16_000.0


METERS = {
    "whole intervals": ([(0, 0), (500, 1_000), (900, 2_000)], [None, 500, 400]),
    "in between": ([(0, 0), (10, 400), (500, 1_000)], [None, None, 500]),
    "late": ([(0, 0), (4_000, 4_000)], [None, 1_000]),
    "begun anew": ([(500, 0), (10, 1_000), (30, 2_000)], [None, None, 20]),
    "same time": ([(0, 0), (9, 0)], [None, None]),
}


@pytest.mark.parametrize(("readings", "expected"), METERS.values(), ids=METERS.keys())
def test_meter(readings, expected):
    meter = RateMeter(1_000.0)
    assert [meter.read(total, now_ms) for total, now_ms in readings] == expected


def test_a_stage_is_alive_for_a_while_and_may_ask_when_it_was_seen():
    stage = Stage(SETTINGS, None, 0.0)
    assert stage.is_alive(SILENT_MS)
    assert not stage.was_seen
    assert not stage.is_alive(SILENT_MS + 1)
    stage.seen(SILENT_MS)
    assert stage.was_seen
    assert stage.is_alive(2 * SILENT_MS)
    stage.ended()
    assert not stage.is_alive(SILENT_MS)
    stage.seen(SILENT_MS)
    assert stage.was_seen
    assert stage.is_alive(SILENT_MS)


def test_records_out_per_record_in_follow_the_latest_batches():
    stage = Stage(SETTINGS, None, 0.0)
    assert stage.records_out(["b"]) == 1.0
    stage.converted(100, {"b": 50, "unknown": 7})
    assert (stage.records_out(["b"]), stage.records_out(["b", "c"])) == (0.5, 0.5)
    for _ in range(50):
        stage.converted(100, {"c": 300})
    assert math.isclose(stage.records_out(["c"]), 3.0, rel_tol=1e-3)
