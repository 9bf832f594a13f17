"""Topic names: what waits for a name is told in order, within bounds, and nothing silently lost."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.progress.topics import TopicNames

A, B, C = (bytes([n]) * 16 for n in (1, 2, 3))


class ReplayedNames:
    """Names, what was replayed, and how often somebody was asked to look up."""

    def __init__(self, **bounds):
        self.names = TopicNames(self._on_wanted, **bounds)
        self.told = []
        self.calls = 0

    def _on_wanted(self):
        self.calls += 1

    def see(self, topic_id, number):
        self.names.when_known(topic_id, partial(self._tell, number))

    def _tell(self, number, name):
        self.told.append((name, number))


def test_a_known_name_is_told_at_once():
    world = ReplayedNames()
    world.names.resolved({A: "orders"})
    world.see(A, 1)
    assert world.told == [("orders", 1)]
    assert world.names.known.get(A) == "orders"
    assert world.names.wanted() == ()
    assert world.calls == 0


def test_what_waits_is_told_in_order_when_the_name_is_known():
    world = ReplayedNames()
    for number, topic_id in enumerate((A, B, A, C, B)):
        world.see(topic_id, number)
    assert world.told == []
    assert set(world.names.wanted()) == {A, B, C}
    assert world.calls == 3, "once for each id"
    world.names.resolved({B: "clicks", A: "orders"})
    assert world.told == [("orders", 0), ("clicks", 1), ("orders", 2), ("clicks", 4)]
    assert world.names.wanted() == (C,)
    assert (len(world.names.queue), world.names.lost) == (1, 0)
    world.see(A, 5)
    assert world.told[-1] == ("orders", 5)


def test_nobody_has_to_listen():
    names = TopicNames()
    names.when_known(A, lambda _: None)
    assert names.wanted() == (A,)


def test_an_id_that_cannot_be_resolved_is_given_up_and_what_waited_is_counted():
    world = ReplayedNames()
    for number, topic_id in enumerate((A, B, A)):
        world.see(topic_id, number)
    world.names.unresolvable([A, C])
    assert (world.names.lost, len(world.names.queue)) == (2, 1)
    assert world.names.wanted() == (B,)
    world.names.resolved({A: "orders", B: "clicks"})
    assert world.told == [("clicks", 1)]


def test_an_id_given_up_is_wanted_again_when_it_is_named_again():
    world = ReplayedNames()
    world.see(A, 1)
    world.names.unresolvable([A])
    world.see(A, 2)
    assert world.names.wanted() == (A,)
    assert world.calls == 2
    world.names.resolved({A: "orders"})
    assert world.told == [("orders", 2)]


def test_giving_up_a_name_that_came_meanwhile_changes_nothing():
    world = ReplayedNames()
    world.see(A, 1)
    world.names.resolved({A: "orders"})
    world.names.unresolvable([A])
    assert world.names.known.get(A) == "orders"
    assert world.names.lost == 0


def test_the_queue_is_bounded_and_what_it_loses_is_counted():
    world = ReplayedNames(max_queued=3)
    for number, topic_id in enumerate((A, B, B, C)):
        world.see(topic_id, number)
    assert (len(world.names.queue), world.names.lost) == (3, 1)
    assert set(world.names.wanted()) == {B, C}, "nothing waits for the first any more"
    world.names.resolved({A: "orders", B: "clicks", C: "users"})
    assert world.told == [("clicks", 1), ("clicks", 2), ("users", 3)]


def test_names_are_bounded_and_asked_for_again():
    world = ReplayedNames(max_names=2)
    world.names.resolved({A: "orders", B: "clicks"})
    world.names.resolved({A: "orders"})
    world.names.resolved({C: "users"})
    assert [world.names.known.get(each) for each in (A, B, C)] == ["orders", None, "users"]
    world.see(B, 1)
    assert world.names.wanted() == (B,)


def test_more_names_at_once_than_are_kept_are_still_told():
    world = ReplayedNames(max_names=1)
    for number, topic_id in enumerate((A, B, C)):
        world.see(topic_id, number)
    world.names.resolved({A: "orders", B: "clicks", C: "users"})
    assert world.told == [("orders", 0), ("clicks", 1), ("users", 2)]


def test_a_replay_may_see_more_of_the_same_topic():
    world = ReplayedNames()
    world.names.when_known(A, lambda _: world.see(A, 2))
    world.names.resolved({A: "orders"})
    assert world.told == [("orders", 2)]


IDS = st.sampled_from([A, B, C])
NAMES = {A: "orders", B: "clicks", C: "users"}
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("see"), IDS),
        st.tuples(st.just("resolved"), st.sets(IDS)),
        st.tuples(st.just("unresolvable"), st.sets(IDS)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(steps=STEPS, max_queued=st.integers(1, 10))
def test_all_that_is_seen_is_told_in_order_waits_or_is_counted(steps, max_queued):
    world = ReplayedNames(max_queued=max_queued)
    seen = {each: [] for each in NAMES.values()}
    for number, (step, what) in enumerate(steps):
        if step == "see":
            world.see(what, number)
            seen[NAMES[what]].append(number)
        elif step == "resolved":
            world.names.resolved({each: NAMES[each] for each in what})
        else:
            world.names.unresolvable(what)
        assert len(world.names.queue) <= max_queued
        assert bool(world.names.wanted()) is bool(len(world.names.queue))
        total = sum(map(len, seen.values()))
        assert total == len(world.told) + len(world.names.queue) + world.names.lost
    for name, numbers in seen.items():
        told = [number for each, number in world.told if each == name]
        assert told == [number for number in numbers if number in set(told)]
    world.names.resolved(NAMES)
    assert (len(world.names.queue), world.names.wanted()) == (0, ())


@pytest.mark.parametrize("count", [10_000])
def test_looking_at_many_ids_stays_cheap_in_memory(count):
    names = TopicNames(max_names=100, max_queued=100)
    for number in range(count):
        names.when_known(number.to_bytes(16, "big"), lambda _: None)
    assert (len(names.queue), len(names.wanted()), names.lost) == (100, 100, count - 100)
    names.resolved({number.to_bytes(16, "big"): "t" for number in range(count)})
    assert sum(names.known.get(n.to_bytes(16, "big")) is not None for n in range(count)) == 100
