"""Shares by lag add up exactly and are as near to proportion as whole numbers can be."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.backpressure.shares import shares

LAGS = st.dictionaries(
    st.tuples(st.sampled_from("ab"), st.integers(0, 30)), st.integers(0, 10**12), max_size=30
)

WORKED = [
    ("in proportion", 100, [10, 30, 60, 100], [5, 15, 30, 50]),
    ("the largest remainder gets the one left", 10, [10, 10, 43], [2, 1, 7]),
    ("of equal remainders the first", 2, [5, 5, 5], [1, 1, 0]),
    ("no lag, no share", 7, [0, 9, 0], [0, 7, 0]),
    ("enough for all", 100, [3, 4], [3, 4]),
    ("nothing to share", 0, [3, 4], [0, 0]),
]


@pytest.mark.parametrize(
    ("total", "lags", "expected"), [row[1:] for row in WORKED], ids=[row[0] for row in WORKED]
)
def test_worked_figures(total, lags, expected):
    made = shares(total, {("t", index): lag for index, lag in enumerate(lags)})
    assert list(made.values()) == expected


def test_no_partition():
    assert shares(10, {}) == {}


@settings(deadline=None)
@given(total=st.integers(0, 10**12), lags=LAGS)
def test_they_add_up_and_are_within_one_of_proportion(total, lags):
    made = shares(total, lags)
    whole = sum(lags.values())
    assert made.keys() == lags.keys()
    assert sum(made.values()) == min(total, whole)
    for key, lag in lags.items():
        assert 0 <= made[key] <= lag
        if total < whole:
            assert abs(made[key] - Fraction(total * lag, whole)) < 1
