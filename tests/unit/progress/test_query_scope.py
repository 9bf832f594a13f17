"""Which names a list of patterns covers."""

import pytest

from proxy.progress.report import ALL_QUERIES, ReportableQueries

SCOPE = ReportableQueries(("team-a-*", "orders", "[x].*"))


@pytest.mark.parametrize("name", ["team-a-etl", "team-a-", "orders", "[x].y"])
def test_names_and_beginnings_are_covered(name: str) -> None:
    assert SCOPE.covers(name)
    assert ALL_QUERIES.covers(name)


@pytest.mark.parametrize(
    "name", ["team-b-etl", "team-a", "Team-a-etl", "my-team-a-etl", "orders-2", "order", "xzy", ""]
)
def test_others_are_not(name: str) -> None:
    assert not SCOPE.covers(name)
    assert not ReportableQueries(()).covers(name)
