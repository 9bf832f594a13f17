import math
from dataclasses import dataclass, field
from functools import reduce
from operator import xor
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.pipeline.ledger import BUCKETS, TIMED_OUT, Ledger, SourceBatch, WallClockOffset

TIMEOUT_MS = 1_000.0
TURN_MS = TIMEOUT_MS / (BUCKETS - 1)
OWNER = SourceBatch("one", 7, 100)
MAX_TREE = 12


class Telling(Ledger):
    """A ledger that says what a call has ended."""

    def init(self, *given):
        super().init(*given)
        return self.ended()

    def ack(self, *given):
        super().ack(*given)
        return self.ended()

    def fail(self, *given):
        super().fail(*given)
        return self.ended()

    def tick(self, now_ms):
        super().tick(now_ms)
        return self.take_ended()

    def ended(self):
        return next(iter(self.take_ended()), None)


def make(timeout_ms=TIMEOUT_MS, random=None, wall=None):
    return Telling(timeout_ms, random or Random(1), wall or WallClockOffset(0.0), lambda *_: None)


def test_the_worked_example():
    ledger = make()
    assert ledger.init(9, 1 ^ 2, OWNER, 10.0, 20.0) is None
    assert ledger.ack(9, 1 ^ 3, 21.0) is None
    assert ledger.ack(9, 2 ^ 4, 22.0) is None
    assert ledger.roots[9].value == 3 ^ 4
    assert ledger.ack(9, 3, 23.0) is None
    ended = ledger.ack(9, 4, 24.0)
    assert (ended.root, ended.owner, ended.reason) == (9, OWNER, "")
    assert (ended.started_ms, ended.ended_ms) == (10.0, 24.0)
    assert len(ledger.roots) == 0


def test_an_init_without_edges_completes_at_once():
    assert make().init(9, 0, OWNER, 0.0, 0.0).reason == ""


def test_acks_may_come_before_the_init():
    ledger = make()
    edge, onward = 5, 6
    assert ledger.ack(9, onward, 1.0) is None
    assert ledger.ack(9, edge ^ onward, 1.0) is None
    assert ledger.init(9, edge, OWNER, 0.0, 2.0).reason == ""


def test_a_fail_before_the_init_is_told_with_it():
    ledger = make()
    ledger.ack(9, 5, 0.0)
    assert ledger.fail(9, "first", 0.0) is None
    assert ledger.fail(9, "second", 0.0) is None
    ended = ledger.init(9, 5, OWNER, 0.0, 3.0)
    assert ended.reason == "first"


def test_a_fail_of_an_unknown_root_is_ignored_and_counted():
    ledger = make()
    assert ledger.fail(9, "why", 0.0) is None
    assert 9 not in ledger.roots
    assert ledger.counts.unknown_fails == 1


def test_a_second_init_changes_nothing_and_is_counted():
    ledger = make()
    ledger.init(9, 5, OWNER, 0.0, 0.0)
    assert ledger.init(9, 5, SourceBatch("two", 1), 9.0, 9.0) is None
    assert ledger.counts.repeated_inits == 1
    assert ledger.ack(9, 5, 10.0).owner == OWNER


def test_late_acks_fall_out_and_are_counted():
    ledger = make()
    ledger.init(9, 5, OWNER, 0.0, 0.0)
    ledger.fail(9, "why", 0.0)
    ledger.ack(9, 5, 1.0)
    assert len(ledger.roots) == 1
    assert ledger.tick(1.0 + TIMEOUT_MS + TURN_MS) == []
    assert len(ledger.roots) == 0
    assert ledger.counts.ownerless == 1


@settings(deadline=None)
@given(
    heard_ms=st.floats(0, 10_000),
    steps=st.lists(st.floats(1, TURN_MS), min_size=20, max_size=60),
    offset_ms=st.floats(0, 1e6),
)
def test_times_out_after_its_time_and_at_most_a_turn_later(heard_ms, steps, offset_ms):
    ledger = make(wall=WallClockOffset(offset_ms))
    ledger.init(9, 5, OWNER, heard_ms, heard_ms)
    now_ms = before_ms = heard_ms
    for step in [*steps, 3 * TIMEOUT_MS]:
        before_ms, now_ms = now_ms, now_ms + step
        told = ledger.tick(now_ms)
        if told:
            break
    assert [(end.root, end.reason, end.ended_ms) for end in told] == [(9, TIMED_OUT, now_ms)]
    slack_ms = 1e-6
    assert now_ms - heard_ms >= TIMEOUT_MS - slack_ms
    assert before_ms - heard_ms <= TIMEOUT_MS + TURN_MS + slack_ms


def test_a_ledger_that_is_seldom_ticked_ends_nothing_too_soon():
    ledger = make()
    ledger.tick(0.0)
    ledger.init(9, 5, OWNER, 0.0, 50 * TIMEOUT_MS)
    assert ledger.tick(50 * TIMEOUT_MS + 1) == []
    assert 9 in ledger.roots


class Scripted(Random):
    """Gives the numbers that it was given."""

    def __init__(self, numbers):
        super().__init__(0)
        self.numbers = iter(numbers)

    def getrandbits(self, k, /):
        assert k == 64
        return next(self.numbers)


def test_ids_are_never_0_and_roots_never_used():
    ledger = make(random=Scripted([0, 0, 4, 4, 0, 5]))
    assert ledger.new_id() == 4
    ledger.init(4, 1, OWNER, 0.0, 0.0)
    assert ledger.new_root() == 5


class TestTimeout:
    @pytest.mark.parametrize("factor", [0.25, 4.0])
    def test_another_timeout_counts_for_those_that_are_there(self, factor):
        ledger = make()
        ledger.init(1, 5, OWNER, 0.0, 10_000.0)
        timeout_ms = TIMEOUT_MS * factor
        ledger.set_timeout(timeout_ms)
        assert ledger.tick(10_000.0 + timeout_ms / 2) == []
        assert len(ledger.tick(10_000.0 + TURN_MS + timeout_ms * 1.5)) == 1

    @pytest.mark.parametrize("timeout_ms", [0.0, -1.0, math.inf, math.nan])
    def test_refuses_what_cannot_be_and_changes_nothing(self, timeout_ms):
        ledger = make()
        ledger.init(1, 5, OWNER, 0.0, 0.0)
        with pytest.raises(ValueError, match="above 0"):
            ledger.set_timeout(timeout_ms)
        assert ledger.tick(TIMEOUT_MS) == []
        assert len(ledger.tick(TIMEOUT_MS + TURN_MS)) == 1


def test_counts_what_is_pending():
    ledger = make()
    for root, size_bytes in ((1, 60), (2, 40), (3, 5)):
        ledger.init(root, 5, SourceBatch("one", root, size_bytes), 0.0, 0.0)
    ledger.ack(4, 5, 0.0)  # nobody's yet
    assert (ledger.pending_batches, ledger.pending_bytes) == (3, 105)
    ledger.ack(1, 5, 1.0)
    ledger.fail(2, "why", 1.0)
    assert (ledger.pending_batches, ledger.pending_bytes) == (1, 5)
    ledger.tick(TIMEOUT_MS * BUCKETS)
    assert (ledger.pending_batches, ledger.pending_bytes) == (0, 0)


@dataclass
class Tree:
    """A root of the model: all its edges, by whether they were made and finished."""

    turn: int
    started_ms: float
    owner: SourceBatch | None = None
    failed: str | None = None
    made: set = field(default_factory=set)
    finished: set = field(default_factory=set)


class DocumentModel:
    """The ledger with whole trees."""

    def __init__(self):
        self.trees = {}
        self.told = []

    def tree(self, root, now_ms):
        return self.trees.setdefault(root, Tree(math.floor(now_ms / TURN_MS), now_ms))

    def check(self, root, now_ms):
        tree = self.trees[root]
        if tree.owner is None:
            return
        if tree.failed is None and tree.made != tree.finished:
            return
        del self.trees[root]
        self.tell(root, tree, now_ms, tree.failed or "")

    def tell(self, root, tree, now_ms, reason):
        self.told.append((root, tree.owner, tree.started_ms, now_ms, reason))

    def init(self, root, made, now_ms, owner):
        tree = self.tree(root, now_ms)
        if tree.owner is None:
            tree.owner, tree.started_ms = owner, now_ms
            tree.made |= made
            self.check(root, now_ms)

    def ack(self, root, finished, made, now_ms):
        tree = self.tree(root, now_ms)
        tree.finished.add(finished)
        tree.made |= made
        self.check(root, now_ms)

    def fail(self, root, reason, now_ms):
        if root in self.trees:
            self.trees[root].failed = self.trees[root].failed or reason
            self.check(root, now_ms)

    def tick(self, now_ms):
        turn = math.floor(now_ms / TURN_MS)
        old = [(t.started_ms, r, t) for r, t in self.trees.items() if t.turn + BUCKETS <= turn]
        for _, root, tree in sorted(old, key=lambda one: one[:2]):
            del self.trees[root]
            if tree.owner is not None:
                self.tell(root, tree, now_ms, TIMED_OUT)


@st.composite
def histories(draw):
    """Operations on a few trees in any order, each ack once, with repeated inits and fails."""
    random = Random(draw(st.integers(0, 2**32)))
    operations = []
    for root in range(1, draw(st.integers(1, 4)) + 1):
        first = {random.getrandbits(64) | 1 for _ in range(random.randint(0, 3))}
        operations += [("init", root, first)] * random.choice([1, 1, 1, 2])
        edges = list(first)
        for edge in edges:  # grows meanwhile
            most = 2 if len(edges) < MAX_TREE else 0
            made = {random.getrandbits(64) | 1 for _ in range(random.randint(0, most))}
            edges += made
            operations.append(("ack", root, edge, made))
        if draw(st.booleans()):
            operations.append(("fail", root, draw(st.sampled_from(["error", "lost"]))))
    operations = draw(st.permutations(operations))
    if draw(st.booleans()):  # the usual order of each tree, which completes it in time
        operations = sorted(operations, key=lambda one: one[0] != "init")
    pauses = st.one_of(st.just(0), st.just(1), st.integers(1, int(TIMEOUT_MS)))
    return [(operation, draw(pauses), draw(st.booleans())) for operation in operations]


@settings(max_examples=300, deadline=None)
@given(histories())
def test_does_the_same_as_a_model_that_keeps_whole_trees(history):
    ledger, model, told, now_ms = make(), DocumentModel(), [], 0

    def value(edges):
        return reduce(xor, edges, 0)

    for (kind, root, *rest), pause_ms, ticks in [*history, (("end", 0), 3 * int(TIMEOUT_MS), True)]:
        now_ms += pause_ms
        if ticks:
            told += ledger.tick(now_ms)
            model.tick(now_ms)
        match kind, rest:
            case "init", (made,):
                owner = SourceBatch("one", root)
                told.append(ledger.init(root, value(made), owner, now_ms, now_ms))
                model.init(root, made, now_ms, owner)
            case "ack", (finished, made):
                told.append(ledger.ack(root, value({finished}) ^ value(made), now_ms))
                model.ack(root, finished, made, now_ms)
            case "fail", (reason,):
                told.append(ledger.fail(root, reason, now_ms))
                model.fail(root, reason, now_ms)
        told = [end for end in told if end is not None]
        assert [
            (end.root, end.owner, end.started_ms, end.ended_ms, end.reason) for end in told
        ] == model.told
        assert ledger.roots.keys() == model.trees.keys()
    assert len(ledger.roots) == 0
