"""Sets of offsets, against plain sets."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.progress.offset_ranges import OffsetRanges, RangeSet

OFFSETS = st.integers(0, 60)
STEPS = st.lists(st.tuples(st.sampled_from(["add", "remove", "below", "extend"]), OFFSETS, OFFSETS))


def made(*pairs, max_ranges=100) -> OffsetRanges:
    ranges = OffsetRanges(max_ranges)
    for start, end in pairs:
        ranges.add(start, end)
    return ranges


def offsets(ranges) -> set[int]:
    return {offset for start, end in ranges for offset in range(start, end)}


def check_schema(ranges):
    pairs = list(ranges)
    assert all(start < end for start, end in pairs)
    assert all(low[1] < high[0] for low, high in pairwise(pairs))


@pytest.mark.parametrize(
    ("before", "added", "after", "new"),
    [
        pytest.param([], (3, 5), [(3, 5)], 2, id="first"),
        pytest.param([(0, 5)], (5, 9), [(0, 9)], 4, id="reading on"),
        pytest.param([(0, 5)], (0, 5), [(0, 5)], 0, id="again"),
        pytest.param([(5, 9)], (0, 5), [(0, 9)], 5, id="touches from below"),
        pytest.param([(0, 2), (4, 6), (8, 10)], (1, 9), [(0, 10)], 4, id="over three"),
        pytest.param([(0, 2), (8, 10)], (4, 6), [(0, 2), (4, 6), (8, 10)], 2, id="between"),
        pytest.param([(0, 2)], (7, 7), [(0, 2)], 0, id="empty"),
        pytest.param([(0, 2)], (7, 3), [(0, 2)], 0, id="backwards is empty"),
    ],
)
def test_adding(before, added, after, new):
    ranges = made(*before)
    assert ranges.add(*added) == new
    assert list(ranges) == after


@pytest.mark.parametrize(
    ("removed", "after"),
    [
        pytest.param((0, 10), [(20, 30)], id="whole"),
        pytest.param((3, 5), [(0, 3), (5, 10), (20, 30)], id="hole"),
        pytest.param((5, 25), [(0, 5), (25, 30)], id="over a gap"),
        pytest.param((10, 20), [(0, 10), (20, 30)], id="the gap alone"),
        pytest.param((0, 99), [], id="all"),
        pytest.param((5, 5), [(0, 10), (20, 30)], id="nothing"),
    ],
)
def test_removing(removed, after):
    ranges = made((0, 10), (20, 30))
    ranges.remove(*removed)
    assert list(ranges) == after


@given(STEPS, OFFSETS, OFFSETS)
def test_it_is_a_set_of_offsets(steps, start, end):
    ranges, model = OffsetRanges(100), set()
    for what, low, high in steps:
        span = set(range(low, high))
        if what == "add":
            assert ranges.add(low, high) == len(span - model)
            model |= span
        elif what == "extend":
            goes_on = bool(model) and low == max(model) + 1 and low < high
            assert ranges.extend(low, high) is goes_on
            model |= span if goes_on else set()
        elif what == "remove":
            ranges.remove(low, high)
            model -= span
        else:
            ranges.remove_below(low)
            model = {offset for offset in model if offset >= low}
        check_schema(ranges)
        assert offsets(ranges) == model
    assert (ranges.starts[:1], bool(ranges)) == ([min(model)] if model else [], bool(model))
    assert ranges.filled_gaps == 0
    assert offsets(ranges.missing(start, end)) == set(range(start, end)) - model
    assert ranges.covered(start, end) == len(set(range(start, end)) & model)
    for offset in range(61):
        end_at = next(n for n in range(offset, 99) if n not in model)
        assert ranges.end_at(offset) == (end_at if offset in model else None)


@given(STEPS, STEPS)
def test_what_is_in_one_and_not_in_the_other(steps, others):
    one = made(*((low, high) for _, low, high in steps))
    other = made(*((low, high) for _, low, high in others))
    left = [gap for start, end in one for gap in other.missing(start, end)]
    assert offsets(left) == offsets(one) - offsets(other)


@given(STEPS, st.integers(1, 4))
def test_at_the_bound_nothing_is_lost_and_what_comes_in_is_counted(steps, max_ranges):
    ranges, model = OffsetRanges(max_ranges), set()
    for what, low, high in steps:
        before, filled_gaps = offsets(ranges), ranges.filled_gaps
        span = set(range(low, high))
        if what == "add":
            assert ranges.add(low, high) == len(span - before)
            exact, model = before | span, model | span
        elif what == "remove":
            ranges.remove(low, high)
            exact, model = before - span, model - span
        else:
            ranges.remove_below(low)
            model = {offset for offset in model if offset >= low}
            exact = {offset for offset in before if offset >= low}
        check_schema(ranges)
        assert len(ranges) <= max_ranges
        assert offsets(ranges) >= model
        assert offsets(ranges) >= exact
        assert len(offsets(ranges) - exact) == ranges.filled_gaps - filled_gaps


def test_at_the_bound_the_nearest_two_become_one():
    ranges = made((0, 1), (10, 11), (13, 14), max_ranges=2)
    assert list(ranges) == [(0, 1), (10, 14)]
    assert ranges.filled_gaps == 2


@given(STEPS, st.integers(1, 4))
def test_or_the_lowest_are_dropped_and_nothing_comes_in(steps, max_ranges):
    ranges, model = OffsetRanges(max_ranges, drop_lowest=True), set()
    for what, low, high in steps:
        span = set(range(low, high))
        if what == "add":
            ranges.add(low, high)
            model |= span
        elif what == "remove":
            ranges.remove(low, high)
            model -= span
        else:
            ranges.remove_below(low)
            model = {offset for offset in model if offset >= low}
        check_schema(ranges)
        assert len(ranges) <= max_ranges
        assert offsets(ranges) == {
            offset for offset in model if offset >= (ranges.starts or [0])[0]
        } or (not ranges and not model)
        model = offsets(ranges)
        assert ranges.filled_gaps == 0


def test_a_set_of_times():
    held = RangeSet[float](2)
    assert (held.add(0.5, 1.0), held.add(2.0, 2.5), held.add(0.75, 1.25)) == (0.5, 0.5, 0.25)
    assert held.covered(0.0, 2.25) == 1.0
    assert (held.add(10.0, 11.0), list(held)) == (1.0, [(0.5, 2.5), (10.0, 11.0)])
    assert held.filled_gaps == 0.75


def test_memory_does_not_grow_with_offsets():
    ranges = OffsetRanges(8)
    ranges.add(0, 2**62)
    assert list(ranges) == [(0, 2**62)]
    for offset in range(0, 10_000, 2):
        ranges.remove(offset, offset + 1)
    assert len(ranges) <= 8


def test_a_copy_is_another_set():
    ranges = made((0, 5))
    ranges.copy().add(5, 9)
    assert list(ranges) == [(0, 5)]


def test_a_set_needs_room_for_a_range():
    with pytest.raises(ValueError, match="max_ranges must be 1 or more"):
        OffsetRanges(0)
