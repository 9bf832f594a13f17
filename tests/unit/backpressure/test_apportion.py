"""Shares by lag: exact in sum, near to proportion, and at least one record for whoever has any."""

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.backpressure.driver_view import split_by_lag

LAGS = st.dictionaries(
    st.tuples(st.sampled_from("ab"), st.integers(0, 30)),
    st.one_of(st.integers(0, 40), st.integers(0, 10**12)),
    max_size=30,
)
TOTALS = st.one_of(st.integers(0, 100), st.integers(0, 10**12))

WORKED = [
    ("in proportion", 100, [10, 30, 60, 100], [5, 15, 30, 50]),
    ("the largest remainder gets the one left", 10, [10, 10, 43], [2, 1, 7]),
    ("of equal remainders the first", 7, [5, 5, 5], [3, 2, 2]),
    ("no lag, no share", 7, [0, 9, 0], [0, 7, 0]),
    ("enough for all", 100, [3, 4], [3, 4]),
    ("a small one beside very much", 100, [3, 10_000_000], [1, 99]),
    ("small ones leave less to each other", 6, [10, 11, 100, 100], [1, 1, 2, 2]),
    ("as many partitions as records", 3, [1, 1, 1000], [1, 1, 1]),
    ("more partitions than records", 2, [5, 0, 1, 10_000_000], [1, 0, 1, 1]),
    ("no record, but lag", 0, [3, 4, 0], [1, 1, 0]),
]


@pytest.mark.parametrize(
    ("total", "lags", "expected"), [row[1:] for row in WORKED], ids=[row[0] for row in WORKED]
)
def test_worked_figures(total, lags, expected):
    made = split_by_lag(total, {("t", index): lag for index, lag in enumerate(lags)})
    assert list(made.values()) == expected


def test_no_partition():
    assert split_by_lag(10, {}) == {}


def parts_of(total: int, lags: dict) -> dict:
    """Exact parts: in proportion, but 1 where that is less, in as many rounds as that takes."""
    ones: set = set()
    while True:
        rest = {key: lag for key, lag in lags.items() if key not in ones}
        whole = sum(rest.values())
        parts = {key: Fraction((total - len(ones)) * lag, whole) for key, lag in rest.items()}
        below = {key for key, part in parts.items() if part < 1}
        if not below:
            return parts | dict.fromkeys(ones, Fraction(1))
        ones |= below


@settings(deadline=None)
@given(total=TOTALS, lags=LAGS)
def test_they_add_up_and_nobody_with_lag_gets_nothing(total, lags):
    made = split_by_lag(total, lags)
    lagging = {key: lag for key, lag in lags.items() if lag}
    assert made.keys() == lags.keys()
    assert sum(made.values()) == min(max(total, len(lagging)), sum(lags.values()))
    for key, lag in lags.items():
        assert min(lag, 1) <= made[key] <= lag


@settings(deadline=None)
@given(total=TOTALS, lags=LAGS)
def test_they_are_within_one_of_proportion(total, lags):
    made = split_by_lag(total, lags)
    lagging = {key: lag for key, lag in lags.items() if lag}
    total = min(max(total, len(lagging)), sum(lags.values()))
    for key, part in parts_of(total, lagging).items():
        assert abs(made[key] - part) < 1


@settings(deadline=None)
@given(total=TOTALS, lags=LAGS)
def test_more_lag_is_never_a_smaller_share(total, lags):
    made = split_by_lag(total, lags)
    for one, other in combinations(lags, 2):
        low, high = sorted((one, other), key=lags.__getitem__)
        assert made[low] <= made[high] or lags[low] == lags[high]


@settings(deadline=None)
@given(total=TOTALS, lags=LAGS)
def test_they_are_at_most_one_more_than_sparks_own_limit(total, lags):
    """It rounds parts below 1 up and all others down, and lets the sum be what it is."""
    whole = sum(lags.values())
    for key, share in split_by_lag(total, lags).items():
        part = Fraction(total * lags[key], whole) if whole else Fraction(0)
        sparks = min(lags[key], max(1, int(part)))
        assert share <= sparks + 1
        assert (share > 0) == (sparks > 0)


@settings(deadline=None, max_examples=50)
@given(total=st.integers(1, 50), lags=st.lists(st.integers(0, 500), min_size=1, max_size=20))
def test_batch_by_batch_all_is_read_in_no_more_batches_than_it_takes(total, lags):
    """With nothing new: no batch is left smaller than it may be, and none waits for another."""
    left = {("t", index): lag for index, lag in enumerate(lags)}
    batches = 0
    while any(left.values()):
        before, made = left, split_by_lag(total, left)
        left = {key: lag - made[key] for key, lag in before.items()}
        assert all(left[key] < lag for key, lag in before.items() if lag)
        batches += 1
    assert batches <= -(-sum(lags) // total)
