from collections import Counter
from dataclasses import dataclass
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.pipeline.ledger import MAX_DONE_RANGES, PendingEdges, TopicRange, merge_ranges

KEY = ("two", "B", 0)
OTHER = ("two", "B", 1)


def make(seed=1):
    random = Random(seed)
    return PendingEdges(lambda: random.getrandbits(64) | 1, lambda *_: None)


def edges(table, key=KEY):
    return [(start, end, anchor.roots) for start, end, _, anchor in table.partitions[key]]


def size_of(table):
    waiting = table.partitions.values()
    counts = Counter(anchor for at in waiting for *_, anchor in at)
    assert all(anchor.edges == number for anchor, number in counts.items())
    return counts.total() + sum(len(anchor.roots) for anchor in counts)


def test_a_whole_range_is_acked_with_its_id():
    table = make()
    anchor = table.anchor((1,))
    edge, replaced = table.produce(KEY, 0, 10, anchor)
    assert table.complete(KEY, 0, 10) == ([(anchor, edge)], 10, 0, 0)
    assert replaced == []
    assert edges(table) == []
    assert table.size == 0


PARTLY = [
    # completed, what is left of [10, 20)
    pytest.param((10, 13), [(13, 20)], id="its head"),
    pytest.param((17, 20), [(10, 17)], id="its tail"),
    pytest.param((12, 15), [(10, 12), (15, 20)], id="its middle"),
    pytest.param((5, 15), [(15, 20)], id="from before it"),
    pytest.param((15, 30), [(10, 15)], id="to behind it"),
]


@pytest.mark.parametrize(("done", "left"), PARTLY)
def test_a_part_is_acked_with_the_ids_of_what_is_left(done, left):
    table = make()
    anchor = table.anchor((1,))
    edge, _ = table.produce(KEY, 10, 20, anchor)
    acks, records, _, foreign = table.complete(KEY, *done)
    rests = list(table.partitions[KEY])
    assert [(start, end) for start, end, *_ in rests] == left
    value = edge
    for _, _, rest, _ in rests:
        assert rest != edge
        value ^= rest
    assert acks == [(anchor, value)]
    assert records == 10 - sum(end - start for start, end in left)
    assert foreign == done[1] - done[0] - records
    assert table.size == size_of(table)


def test_what_is_completed_twice_or_was_never_produced_is_told_apart():
    table = make()
    table.produce(KEY, 10, 20, table.anchor((1,)))
    table.complete(KEY, 10, 20)
    assert table.complete(KEY, 5, 25) == ([], 0, 10, 10)


def test_one_anchor_in_a_row_is_one_edge_and_another_one_is_not():
    table = make()
    one, two = table.anchor((1,)), table.anchor((2,))
    first, _ = table.produce(KEY, 0, 5, one)
    second, _ = table.produce(KEY, 5, 9, one)
    table.produce(KEY, 9, 12, two)
    table.produce(OTHER, 12, 15, two)
    assert edges(table) == [(0, 9, (1,)), (9, 12, (2,))]
    assert table.complete(KEY, 0, 9) == ([(one, first ^ second)], 9, 0, 0)


def test_offsets_that_are_used_again_lose_their_edges_without_an_ack():
    table = make()
    old, new = table.anchor((1,)), table.anchor((2,))
    table.produce(KEY, 0, 10, old)
    _, replaced = table.produce(KEY, 4, 6, new)
    assert replaced == [old]
    assert edges(table) == [(0, 4, (1,)), (4, 6, (2,)), (6, 10, (1,))]


def test_what_belongs_to_no_root_is_known_and_no_edge():
    table = make()
    assert table.produce(KEY, 0, 10, None) == (0, [])
    assert (table.size, table.partitions[KEY].known_to) == (0, 10)
    assert table.complete(KEY, 0, 10) == ([], 0, 0, 10)


def test_what_is_removed_tells_who_waited_there():
    table = make()
    table.produce(KEY, 0, 10, table.anchor((1, 2)))
    table.produce(OTHER, 0, 10, table.anchor((2, 3)))
    assert table.remove([KEY]) == {1, 2}
    assert list(table.partitions) == [OTHER]
    assert table.size == size_of(table) == 3


def test_a_sweep_removes_roots_that_have_ended_and_edges_of_nobody():
    table = make()
    table.produce(KEY, 0, 10, table.anchor((1, 2)))
    table.produce(KEY, 10, 20, table.anchor((2,)))
    table.produce(OTHER, 0, 10, table.anchor((3,)))
    table.sweep({1, 3})
    assert edges(table) == [(0, 10, (1,))]
    assert edges(table, OTHER) == [(0, 10, (3,))]
    assert table.size == size_of(table) == 4
    acks, *_ = table.complete(KEY, 10, 20)
    assert acks == []


@pytest.mark.parametrize(
    ("bound", "going"),
    [(7, []), (6, [5]), (5, [5, 6]), (4, [5, 6, 7]), (3, [5, 6, 7, 8]), (0, [5, 6, 7, 8])],
)
def test_says_which_roots_must_go_oldest_first(bound, going):
    table = make()
    table.produce(KEY, 0, 10, table.anchor((5, 6, 8)))
    table.produce(KEY, 10, 20, table.anchor((7, 8)))
    assert table.size == 7
    waits_nowhere = 4
    assert table.excess([waits_nowhere, 5, 6, 7, 8, 9], bound) == going


def test_many_roots_go_when_a_few_are_not_enough():
    table = make()
    total = 10_000
    for root in range(total):
        table.produce(KEY, root, root + 1, table.anchor((root,)))
    assert table.excess(range(total), 10) == list(range(total - 5))


def test_completing_in_order_leaves_nothing_behind():
    table = make()
    at = table.partitions[KEY]
    total = 1_280
    for number in range(total):
        table.produce(KEY, number, number + 1, table.anchor((number,)))
    for number in range(total):
        ((anchor, _),), *_ = table.complete(KEY, number, number + 1)
        assert anchor.roots == (number,)
        assert len(at.starts) == len(at.anchors) == total - number - 1
    assert list(at.done) == [(0, total)]


def test_a_root_waits_at_the_first_stage_in_order_that_has_an_edge_of_it():
    """The worked example: the source sends edge 1 to one and 2 to two; both send on to three."""
    table = make()
    order = ("one", "two", "three")
    root = table.anchor((9,))

    def waits_at():
        return table.first_stages([9, 10], order)

    table.produce(("one", "A", 0), 0, 1, root)
    table.produce(("two", "A", 0), 0, 1, root)
    assert waits_at() == {9: "one"}
    table.complete(("one", "A", 0), 0, 1)
    table.produce(("three", "B", 0), 0, 1, root)
    assert waits_at() == {9: "two"}
    table.complete(("two", "A", 0), 0, 1)
    table.produce(("three", "B", 1), 0, 1, root)
    assert waits_at() == {9: "three"}
    table.complete(("three", "B", 0), 0, 1)
    assert waits_at() == {9: "three"}
    table.complete(("three", "B", 1), 0, 1)
    assert waits_at() == {}


def test_remembers_so_many_completed_ranges():
    table = make()
    for number in range(2 * MAX_DONE_RANGES):
        table.complete(KEY, 3 * number, 3 * number + 1)
    assert len(table.partitions[KEY].done) == MAX_DONE_RANGES
    assert table.complete(KEY, 0, 1) == ([], 0, 0, 1)
    last = 3 * (2 * MAX_DONE_RANGES - 1)
    assert table.complete(KEY, last, last + 1) == ([], 0, 1, 0)


def test_refuses_an_edge_over_another_one():
    table = make()
    table.restore(KEY, (5, 10, 77, table.anchor((1,), 4)))
    for start, end in ((0, 6), (9, 12), (5, 10), (6, 7), (0, 20)):
        with pytest.raises(ValueError, match="another edge"):
            table.restore(KEY, (start, end, 78, table.anchor((1,), 5)))
    table.restore(KEY, (10, 12, 78, table.anchor((1,), 6)))
    assert table.anchor((2,)).number == 7


@pytest.mark.parametrize(
    "wrong", [("B", -1, 0, 1), ("B", 0, -1, 1), ("B", 0, 2, 1), ("B", 0, 0, 2**63)]
)
def test_refuses_ranges_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="cannot be"):
        TopicRange(*wrong)


def test_ranges_are_merged_by_partition():
    ranges = [("B", 0, 5, 7), ("B", 0, 0, 5), ("B", 1, 7, 9), ("A", 0, 3, 3), ("B", 0, 6, 6)]
    assert merge_ranges(TopicRange(*each) for each in ranges) == [
        TopicRange("B", 0, 0, 7),
        TopicRange("B", 1, 7, 9),
    ]


@dataclass
class Offset:
    """One offset of the model."""

    roots: tuple = ()
    is_done: bool = False


class DocumentModel:
    """The table with every offset by itself."""

    def __init__(self):
        self.offsets = {}
        self.broken = set()

    def at(self, key, offset):
        return self.offsets.setdefault((key, offset), Offset())

    def produced(self, key, start, end, roots):
        for offset in range(start, end):
            self.broken.update(self.at(key, offset).roots)
            self.offsets[key, offset] = Offset(roots)

    def completed(self, key, start, end):
        records = repeated = foreign = 0
        for number in range(start, end):
            offset = self.at(key, number)
            records += bool(offset.roots)
            repeated += offset.is_done
            foreign += not offset.roots and not offset.is_done
            self.offsets[key, number] = Offset((), is_done=True)
        return records, repeated, foreign

    def waiting(self):
        return {root for offset in self.offsets.values() for root in offset.roots}


def operation():
    span = st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda it: (it[0], sum(it)))
    return st.one_of(
        st.tuples(
            st.just("produced"),
            st.sampled_from([KEY, OTHER]),
            span,
            st.one_of(st.none(), st.sets(st.integers(1, 5), min_size=1, max_size=3)),
        ),
        st.tuples(st.just("completed"), st.sampled_from([KEY, OTHER]), span),
        st.tuples(st.just("on"), st.sampled_from([KEY, OTHER]), st.integers(1, 5)),
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(operation(), max_size=40), st.integers(0, 1000))
def test_does_the_same_as_a_model_of_every_offset(operations, seed):
    table, model, values = make(seed), DocumentModel(), Counter()
    ends, anchors, numbers = Counter(), {}, count(100)
    for kind, key, *rest in operations:
        if kind == "completed":
            ((start, end),) = rest
            acks, *covered = table.complete(key, start, end)
            for anchor, value in acks:
                for root in anchor.roots:
                    values[root] ^= value
            assert tuple(covered) == model.completed(key, start, end)
        else:
            if kind == "on":  # appends to the anchor of before, as one batch does
                start, end = ends[key], ends[key] + rest[0]
                anchor = anchors.get(key)
                if anchor is None:
                    anchor = anchors[key] = table.anchor((next(numbers),))
            else:
                (start, end), roots = rest
                anchor = table.anchor(tuple(sorted(roots))) if roots else None
                anchors.pop(key, None)
            ends[key] = end
            made, replaced = table.produce(key, start, end, anchor)
            assert bool(made) is (anchor is not None)
            broken = model.broken
            model.broken = set()
            model.produced(key, start, end, anchor.roots if anchor else ())
            assert {root for old in replaced for root in old.roots} == model.broken
            model.broken |= broken
            for root in anchor.roots if anchor else ():
                values[root] ^= made
        assert table.size == size_of(table)
        found = {
            (each, offset): anchor.roots
            for each, at in table.partitions.items()
            for start, end, _, anchor in at
            for offset in range(start, end)
        }
        assert found == {at: one.roots for at, one in model.offsets.items() if one.roots}
        # A root's value is 0 when nothing waits, unless offsets of it were used again.
        for root, value in values.items():
            if root in model.waiting() or root in model.broken:
                assert value != 0
            else:
                assert value == 0
