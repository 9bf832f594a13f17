"""The way back to the rule's own bound, step by step."""

import pytest

from proxy.backpressure.backpressure import (
    RETURN_FACTOR,
    RETURN_STEP_MS,
    RETURN_STEPS,
    BoundRecovery,
)
from proxy.quota.meter import AdaptedBound

WHY = "no report for more than 30 s"


def test_steps_until_the_rules_own_bound():
    way = BoundRecovery(1000.0, WHY, 0.0)
    seen = [way.bound(4000.0, RETURN_STEP_MS * step).bound for step in range(5)]
    assert seen == [1500.0, 2250.0, 3375.0, None, None]


def test_each_step_says_why():
    way = BoundRecovery(1000.0, WHY, 0.0)
    assert way.bound(4000.0, 0.0) == AdaptedBound(
        1500.0, f"{WHY}: step 1 back to the rule's own bound"
    )
    assert way.bound(4000.0, 2500.0).reason == f"{WHY}: step 2 back to the rule's own bound"
    assert way.bound(4000.0, 1e9) == AdaptedBound(None, f"{WHY}: the rule's own bound")


@pytest.mark.parametrize("static", [1e12, 1e300])
def test_it_does_not_take_for_ever(static):
    way = BoundRecovery(1.0, WHY, 0.0)
    last = way.bound(static, RETURN_STEP_MS * (RETURN_STEPS - 1))
    assert last.bound == pytest.approx(RETURN_FACTOR**RETURN_STEPS)
    assert way.bound(static, RETURN_STEP_MS * RETURN_STEPS).bound is None


def test_the_rules_own_bound_may_change_on_the_way():
    way = BoundRecovery(1000.0, WHY, 0.0)
    assert way.bound(1200.0, 0.0).bound is None
    assert way.bound(1600.0, 0.0).bound == 1500.0
