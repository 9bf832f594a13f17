"""How the bench judges what it compares."""

import pytest

from bench.comparison import P50, THROUGHPUT, Goal
from bench.report import Verdict


@pytest.mark.parametrize(
    ("goal", "ratio", "text", "verdict"),
    [
        (Goal("proxy", P50, 1.0), 1.0, "at most 1x", Verdict.MET),
        (Goal("proxy", P50, 1.1), 1.11, "at most 1.1x", Verdict.MISSED),
        (Goal("proxy", THROUGHPUT, 2.5), 2.5, "at least 2.5x", Verdict.MET),
        (Goal("proxy", THROUGHPUT, 2.5), 2.4, "at least 2.5x", Verdict.MISSED),
        (Goal("proxy", P50), 9.0, "", Verdict.INFO),
    ],
)
def test_ratios_are_judged_by_which_way_is_better(goal, ratio, text, verdict):
    assert (goal.text, goal.verdict(ratio)) == (text, verdict)
