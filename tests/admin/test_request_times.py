"""What the status page shows of where requests spend their time."""

from types import SimpleNamespace

import pytest

from metrics import HistogramChild
from proxy.admin.request_times import (
    KEPT_SAMPLES,
    SAMPLE_INTERVAL_MS,
    TIME_PARTS,
    RecentKafkaApiTimes,
    quantile,
)

BOUNDS = (0.001, 0.01, 0.1)


@pytest.mark.parametrize(
    ("share", "counts", "expected"),
    [
        pytest.param(0.5, (0, 0, 0, 0), 0.0, id="nothing"),
        pytest.param(0.5, (10, 0, 0, 0), 0.0005, id="middle of the first bucket"),
        pytest.param(0.5, (0, 10, 0, 0), 0.0055, id="middle of another bucket"),
        pytest.param(0.99, (98, 0, 2, 0), 0.055, id="far out"),
        pytest.param(1.0, (1, 0, 0, 0), 0.001, id="all"),
        pytest.param(0.99, (1, 0, 0, 99), 0.1, id="beyond the last bound"),
    ],
)
def test_quantiles(share, counts, expected):
    assert quantile(share, BOUNDS, counts) == pytest.approx(expected)


def api() -> SimpleNamespace:
    return SimpleNamespace(**{part: HistogramChild("h", BOUNDS) for part in TIME_PARTS})


def test_the_figures_are_of_the_last_five_minutes():
    fetch = api()
    times = RecentKafkaApiTimes({"Fetch": fetch})
    for child, seconds in zip(vars(fetch).values(), (0.05, 0.0005, 0.0), strict=True):
        child.observe(seconds)
    (shown,) = times.documents()
    assert (shown["api"], shown["measured"]) == ("Fetch", 1)
    assert shown["broker"]["p50_s"] == pytest.approx(0.055)
    assert shown["proxy"]["p99_s"] == pytest.approx(0.00099)
    now_ms = 0.0
    for _ in range(KEPT_SAMPLES + 1):
        times.sample(now_ms)
        times.sample(now_ms + 1.0)  # too soon
        now_ms += SAMPLE_INTERVAL_MS
    assert times.documents() == []
    for child in vars(fetch).values():
        child.observe(0.005)
    (shown,) = times.documents()
    assert shown["measured"] == 1
    assert shown["broker"]["p50_s"] == pytest.approx(0.0055)


def test_those_with_most_requests_come_first():
    apis = {name: api() for name in ("Rare", "Often")}
    for name, times in (("Rare", 1), ("Often", 5)):
        for child in vars(apis[name]).values():
            for _ in range(times):
                child.observe(0.0)
    assert [each["api"] for each in RecentKafkaApiTimes(apis).documents()] == ["Often", "Rare"]
