"""Each slot has one state at a member, and only the moves of the table."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tier_machines import announcement, member

from proxy.tier.group.group_documents import Assignment
from proxy.tier.group.slot_states import (
    GIVEN,
    RELEASING,
    SERVED,
    SLOT_MOVES,
    SlotState,
    SlotStates,
)
from proxy.tier.slot_map import SlotMap

MEMBERS = {name: member(name) for name in "ab"}


def assigned(generation: int, *owners: str | None) -> Assignment:
    return Assignment(generation, SlotMap(MEMBERS, owners))


def states_of(slots: SlotStates) -> Sequence[frozenset[int]]:
    return [slots.of(GIVEN), slots.of(SERVED), slots.of(RELEASING)]


def test_a_slot_is_served_when_it_was_read_and_is_still_given() -> None:
    slots = SlotStates()
    slots.assign(assigned(1, "a", "a", "b"), "a")
    assert states_of(slots) == [{0, 1}, set(), set()]
    assert slots.assign(assigned(2, "a", None, "b"), "a")[0] == {1}
    slots.serve({0, 1, 2})
    assert states_of(slots) == [set(), {0}, {1}]
    assert slots.owned == {0, 1}
    slots.released({0, 1})
    assert states_of(slots) == [set(), {0}, set()]


def test_what_was_just_released_is_not_taken_again_by_the_map_from_before() -> None:
    slots = SlotStates()
    slots.assign(assigned(1, "a"), "a")
    slots.serve({0})
    slots.assign(assigned(2, None), "a")
    slots.assign(assigned(3, "a"), "a")  # by a leader that has not heard of the release
    assert states_of(slots) == [set(), set(), {0}]
    slots.released({0})
    assert (slots.owned, slots.subscription(announcement("a")).owned) == (set(), set())
    slots.assign(assigned(4, "a"), "a")
    assert slots.of(GIVEN) == {0}


def test_a_subscription_says_what_is_had_and_what_is_being_released() -> None:
    slots = SlotStates("p")
    slots.assign(assigned(7, "a", "a"), "a")
    slots.assign(assigned(8, "a", "b"), "a")
    said = slots.subscription(announcement("a"))
    assert (said.owned, said.releasing, said.process) == ({0, 1}, {1}, "p")
    assert said.generation == 8
    slots.lost()
    assert slots.subscription(announcement("a")) == replace(
        said, owned=frozenset(), releasing=frozenset()
    )


def test_who_stops_releases_all_in_any_state() -> None:
    slots = SlotStates()
    slots.assign(assigned(1, "a", "a", "a"), "a")
    slots.serve({1})
    slots.assign(assigned(2, "a", "a", None), "a")
    assert slots.revoke_all() == {0, 1, 2}
    assert states_of(slots) == [set(), set(), {0, 1, 2}]


@pytest.mark.parametrize("state", SlotState)
def test_from_each_state_a_slot_may_be_lost_or_be_the_members_later(state: SlotState) -> None:
    assert SlotState.ELSEWHERE in SLOT_MOVES[state] or state is SlotState.ELSEWHERE
    assert state in {to for tos in SLOT_MOVES.values() for to in tos}
