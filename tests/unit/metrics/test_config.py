"""Values that a metric's configuration takes and refuses."""

import dataclasses
import math

import pytest

from metrics import MetricConfig, Quota


def test_the_defaults_are_those_of_kafka_client_quotas():
    config = MetricConfig()

    assert (config.samples, config.window_ms) == (11, 1000.0)
    assert config.event_window is None
    assert config.quota is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param({"samples": 0}, "samples must be 1 or more, got 0", id="no samples"),
        pytest.param({"samples": -1}, "samples must be 1 or more", id="negative samples"),
        pytest.param({"window_ms": 0.0}, "window_ms must be finite and at least 1", id="no window"),
        pytest.param({"window_ms": 0.5}, "at least 1, got 0.5", id="below a clock tick"),
        pytest.param({"window_ms": math.inf}, "must be finite", id="endless window"),
        pytest.param({"window_ms": math.nan}, "must be finite", id="window that is no number"),
        pytest.param({"event_window": 0}, "event_window must be 1 or more", id="no events"),
    ],
)
def test_a_bad_value_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        MetricConfig(**values)


@pytest.mark.parametrize("bound", [math.inf, -math.inf, math.nan])
def test_a_bound_must_be_finite(bound):
    with pytest.raises(ValueError, match="finite"):
        Quota(bound)


@pytest.mark.parametrize(
    ("quota", "value", "accepted"),
    [
        pytest.param(Quota(10), 9.9, True, id="below an upper bound"),
        pytest.param(Quota(10), 10, True, id="at an upper bound"),
        pytest.param(Quota(10), 10.1, False, id="above an upper bound"),
        pytest.param(Quota(10, is_upper=False), 10.1, True, id="above a lower bound"),
        pytest.param(Quota(10, is_upper=False), 10, True, id="at a lower bound"),
        pytest.param(Quota(10, is_upper=False), 9.9, False, id="below a lower bound"),
    ],
)
def test_which_values_a_quota_accepts(quota, value, accepted):
    assert quota.accepts(value) is accepted


def test_quotas_are_values():
    assert Quota(5) == Quota(5, is_upper=True)
    assert Quota(5) != Quota(5, is_upper=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Quota(5).bound = 6
