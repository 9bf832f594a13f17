"""The state of each slot at one member, and the moves between them, by what the group decides.

Without I/O. In a round a member says which slots it has, gets an `Assignment`, and releases what
it has and is not given any more: only when that is done another member may get it.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from enum import Enum
from uuid import uuid4

from .group_documents import NO_GENERATION, Assignment, Subscription

PROCESS_CHARS = 8
"""Enough to tell two processes of one member; every member gets those of all."""


class SlotState(Enum):
    """What a slot is to this member."""

    ELSEWHERE = "elsewhere"
    """Another member's, or nobody's."""
    GIVEN = "given"
    """By the group; its records are not read yet."""
    SERVED = "served"
    RELEASING = "releasing"
    """To be another member's, which gets it once it is released here."""


ELSEWHERE, GIVEN, SERVED, RELEASING = SlotState

SLOT_MOVES: Mapping[SlotState, frozenset[SlotState]] = {
    ELSEWHERE: frozenset({GIVEN}),
    GIVEN: frozenset({SERVED, RELEASING, ELSEWHERE}),
    SERVED: frozenset({RELEASING, ELSEWHERE}),
    RELEASING: frozenset({ELSEWHERE}),
}
"""The states that may follow each state; ELSEWHERE follows all when the place in the group is lost.
A slot that is being released is given anew only in a later round than the one that hears of it."""


class SlotStates:
    """The states of all slots at one process of a member, and the newest assignment."""

    def __init__(self, process: str | None = None) -> None:
        self._process = process or uuid4().hex[:PROCESS_CHARS]
        self._states: dict[int, SlotState] = {}
        """Of all slots that are not ELSEWHERE."""
        self.assignment: Assignment | None = None
        """The newest one; it stays known when the place is lost, to begin the next round with."""

    def of(self, *states: SlotState) -> frozenset[int]:
        """Return the slots that are in one of some states."""
        return frozenset(slot for slot, state in self._states.items() if state in states)

    @property
    def owned(self) -> frozenset[int]:
        """The slots that no other member may have."""
        return frozenset(self._states)

    def subscription(self, announced: Subscription) -> Subscription:
        """Return what to join with: what the member says of itself, and what it owns."""
        newest = self.assignment
        # Of slots that were not measured here yet, what was known: who leads may be new.
        loads = {**({} if newest is None else newest.loads), **announced.loads}
        return replace(
            announced,
            loads={slot: load for slot, load in loads.items() if slot in self._states},
            process=self._process,
            owned=self.owned,
            releasing=self.of(RELEASING),
            generation=NO_GENERATION if newest is None else newest.generation,
        )

    def assign(
        self, assignment: Assignment, name: str, *, is_refused: bool = False
    ) -> tuple[frozenset[int], bool]:
        """Follow an assignment to the member, which had joined by this name.

        Return the slots that are to be released now: joining without them lets them be given away.
        Also whether to join again at once, as the others know too little of this member.
        """
        before = self.assignment
        was_stale = before is None or before.generation != assignment.generation - 1
        known = assignment.members.get(name)
        # This process replaced another of the same name, and nobody was told yet.
        is_new = known is not None and known.process != self._process and not is_refused
        given = assignment.slot_map.slots_of(name)
        revoked = self.of(GIVEN, SERVED) - given
        self._move(revoked, RELEASING)
        self._move(given - self.owned, GIVEN)
        self.assignment = assignment
        is_waited_for = self._process in assignment.unheard or any(
            owner == name and slot not in self._states
            for slot, owner in assignment.releasing.items()
        )
        return revoked, (was_stale and is_waited_for) or is_new

    def serve(self, slots: Collection[int]) -> None:
        """Follow that the records of slots were read, as far as they are still given."""
        self._move(self.of(GIVEN) & set(slots), SERVED)

    def released(self, slots: Collection[int]) -> None:
        """Follow that slots were released; the next subscription is without them."""
        self._move(self.of(RELEASING) & set(slots), ELSEWHERE)

    def revoke_all(self) -> frozenset[int]:
        """Have all slots released, whatever the group decides; return them."""
        self._move(self.of(GIVEN, SERVED), RELEASING)
        return self.owned

    def lost(self) -> None:
        """Own nothing any more."""
        self._states.clear()

    def _move(self, slots: Collection[int], to: SlotState) -> None:
        for slot in slots:
            before = self._states.pop(slot, ELSEWHERE)
            assert to in SLOT_MOVES[before], f"no move from {before.value} to {to.value}"
            if to is not ELSEWHERE:
                self._states[slot] = to
