"""Which batches are under way, told from what a driver asks and is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.pipeline.batch_limit import UnreportedBatchCounter

HERE, THERE = {("a", 0), ("a", 1)}, {("a", 2)}
"""Partitions of two brokers."""


@pytest.mark.parametrize(
    ("asked", "begins"),
    [
        ([HERE], [True]),
        ([HERE, THERE], [True, False]),
        ([HERE, HERE], [True, True]),
        ([HERE, THERE, HERE, THERE], [True, False, True, False]),
        ([HERE, THERE, THERE, HERE], [True, False, True, False]),
    ],
    ids=["first", "two brokers", "again", "again at two", "again, the other first"],
)
def test_a_partition_that_is_asked_for_again_makes_another_plan(asked, begins):
    planned = UnreportedBatchCounter()
    assert [planned.look_up(partitions, 0) for partitions in asked] == begins


def test_a_report_ends_the_plan():
    planned = UnreportedBatchCounter()
    assert planned.look_up(HERE, 0)
    planned.reported()
    assert planned.look_up(THERE, 10)


def test_batches_without_a_report_are_counted():
    planned = UnreportedBatchCounter()
    planned.look_up(HERE, 0)
    assert planned.batches(10, 0) == 1
    planned.look_up(HERE, 10)
    assert planned.batches(10, 0) == 1, "it was told nothing new yet"
    assert planned.batches(20, 0) == 2
    planned.look_up(HERE, 20)
    planned.look_up(HERE, 20)
    assert planned.batches(20, 0) == 2, "it asks and is told nothing new"
    assert planned.batches(20, 10) == 1
    assert planned.batches(20, 20) == 0


def test_what_was_told_to_a_run_that_is_over_is_forgotten():
    planned = UnreportedBatchCounter()
    for told in (0, 10, 20, 30):
        planned.look_up(HERE, told)
    assert planned.batches(40, 0) == 4
    assert planned.batches(15, 0) == 2
    assert planned.batches(15, 15) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2))))
def test_as_many_as_were_told_more_and_are_not_reported(steps):
    planned, told, plans, done = UnreportedBatchCounter(), 0, [], 0
    for more, reports in steps:
        planned.look_up(HERE, told)
        if more:
            told += more
            plans.append(told)
        for _ in range(min(reports, len(plans))):
            done = plans.pop(0)
            planned.reported()
        assert planned.batches(told, done) == len(plans)
