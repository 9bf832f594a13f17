"""Rounds of joins, leaves, crashes and losses in any order: never two owners, in the end one."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_group import SLOTS, Group, Process

from proxy.tier.group.slot_states import RELEASING

NAMES = "abcd"
ENOUGH_ROUNDS = 12
EVENTS = ("crash", "lose", "expire", "retire", "leave", "release", "serve")

names = st.sampled_from(NAMES)
some = st.sets(names, max_size=len(NAMES))
steps = st.one_of(
    st.tuples(st.just("join"), names),
    st.tuples(st.sampled_from(EVENTS), names),
    st.tuples(st.just("round"), some, some, st.integers(0, 3), st.booleans()),
)


def run(group: Group, step: tuple) -> None:
    match step:
        case ("join", name):
            group.join(name)
        case ("round", absent, deaf, leader, is_led):
            group.round(absent, deaf, leader, is_led=is_led or bool(leader))
        case (what, name) if name in group.processes:
            getattr(group, what)(name)


@settings(max_examples=600)
@given(st.lists(steps, max_size=40))
def test_no_slot_has_two_owners_and_in_the_end_each_has_one(all_steps: list[tuple]) -> None:
    group = Group()
    for step in [("join", "a"), *all_steps]:
        run(group, step)
        group.check()
    if not any(stays(process) for process in group.processes.values()):
        group.join("a")
    for name, process in group.processes.items():
        if not process.is_alive:
            group.expire(name)
        elif name not in group.said:  # it hears that it is out, and joins anew
            process.wants_round = True
    # A member that was absent hears in its next heartbeat that it missed a round.
    for process in group.processes.values():
        newest = process.slots.assignment
        if process.is_alive and (newest is None or newest.generation != group.generation):
            process.wants_round = True
    settle(group)
    assert not group.wants_round
    alive = {n: process for n, process in group.processes.items() if process.is_alive}
    assert group.assignment is not None
    assert group.assignment.is_settled
    owners = group.assignment.slot_map.owners
    assert None not in owners
    assert len(owners) == SLOTS
    for name, process in alive.items():
        assert process.slots.owned == {s for s, owner in enumerate(owners) if owner == name}
        assert not process.slots.of(RELEASING)
        assert process.slots.assignment == group.assignment
    counts = Counter(owners)
    staying = [name for name, process in alive.items() if stays(process)]
    assert set(counts) <= set(staying)
    assert max(counts.values()) - min(counts.get(name, 0) for name in staying) <= 1


def stays(process: Process) -> bool:
    return process.is_alive and not process.said.is_leaving


def test_who_leaves_serves_until_others_have_what_it_owns() -> None:
    group = Group()
    for name in "ab":
        group.join(name)
    settle(group)
    had = set(group.processes["a"].slots.owned)
    group.retire("a")
    group.round(set(), set(), 0)
    assert group.processes["a"].slots.of(RELEASING) == had
    assert group.assignment is not None
    owners, members = group.assignment.slot_map.owners, group.assignment.slot_map.members
    assert {owners[slot] for slot in had} == {None}
    assert "a" in members, "clients are still sent to it"
    settle(group)
    assert set(group.assignment.slot_map.owners) == {"b"}


def test_a_leader_that_missed_a_round_claims_nothing_by_what_it_remembers() -> None:
    group = Group()
    group.join("a")
    group.round(set(), set(), 0)
    assert len(group.processes["a"].slots.owned) == SLOTS
    group.join("b")
    group.expire("a")
    group.round({"a"}, set(), 0)
    group.round({"b"}, set(), 0)  # led by a, while b still serves all
    group.check()
    assert not group.processes["a"].slots.owned
    settle(group)
    assert len(group.processes["a"].slots.owned) == SLOTS // 2


def settle(group: Group) -> None:
    for number in range(ENOUGH_ROUNDS):
        for name in group.processes:
            group.release(name)
        if group.wants_round:
            group.round(set(), set(), number)
            group.check()
