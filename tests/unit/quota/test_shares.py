"""Who gets how much of a rate that is divided."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.quota.shares import Claim, divide_fairly

ETL = Claim(weight=3, guaranteed=60, most=150)
NOTEBOOK = Claim()

WORKED = [
    pytest.param([ETL, NOTEBOOK, NOTEBOOK], [120, 40, 40], id="by weight"),
    pytest.param([replace(ETL, most=30), NOTEBOOK, NOTEBOOK], [30, 85, 85], id="one wants less"),
    pytest.param([ETL, *[NOTEBOOK] * 6], [66.67, *[22.22] * 6], id="six more"),
    pytest.param([ETL, *[NOTEBOOK] * 12], [60, *[11.67] * 12], id="its guarantee"),
    pytest.param([ETL], [150], id="alone, its ceiling"),
    pytest.param([], [], id="nobody"),
    pytest.param([replace(ETL, most=0)], [0], id="nobody wants anything"),
]


@pytest.mark.parametrize(("claims", "shares"), WORKED)
def test_worked_figures(claims, shares):
    assert divide_fairly(200, claims) == pytest.approx(shares, abs=0.01)


def test_guarantees_that_are_too_large_are_cut_in_proportion():
    assert divide_fairly(60, [Claim(guaranteed=60), Claim(guaranteed=30), Claim()]) == [40, 20, 0]


RATES = st.floats(0.0, 1e6)
CLAIMS = st.builds(
    lambda weight, guaranteed, above, demand: Claim(
        weight, guaranteed, min(guaranteed + above, demand)
    ),
    st.floats(0.01, 100.0),
    RATES,
    st.one_of(RATES, st.just(math.inf)),
    st.one_of(RATES, st.just(math.inf)),
)


@given(st.floats(1.0, 1e6), st.lists(CLAIMS, max_size=20))
def test_all_is_given_and_nobody_could_have_more_but_of_who_has_more(rate, claims):
    shares = divide_fairly(rate, claims)
    wanted = math.fsum(claim.most for claim in claims)
    assert math.fsum(shares) == pytest.approx(min(rate, wanted), rel=1e-6, abs=1e-6)
    floors = math.fsum(claim.floor for claim in claims)
    for share, claim in zip(shares, claims, strict=True):
        assert -1e-9 <= share <= claim.most * (1 + 1e-9)
        assert floors > rate or share >= claim.floor - 1e-6
    levels = [share / claim.weight for share, claim in zip(shares, claims, strict=True)]
    hungry = [
        level
        for level, share, claim in zip(levels, shares, claims, strict=True)
        if share < claim.most - 1e-6 * rate
    ]
    for level, share, claim in zip(levels, shares, claims, strict=True):
        if floors < rate and hungry and share > claim.floor * (1 + 1e-6) + 1e-6:
            assert level <= min(hungry) * (1 + 1e-6) + 1e-6
