"""Follow what this member owns, from assignment to assignment. Sans-I/O."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from .group_documents import NO_GENERATION, Assignment, Subscription


@dataclass(slots=True)
class Holding:
    """The slots of one member, also those that it is about to release."""

    process: str
    owned: set[int] = field(default_factory=set)
    letting_go: set[int] = field(default_factory=set)
    """Some of `owned`."""
    assignment: Assignment | None = None
    """The newest one."""

    def subscription(self, announced: Subscription) -> Subscription:
        """Return what to join with: what the member says of itself, and what it owns."""
        newest = self.assignment
        # Of slots that were not measured here yet, what was known: who leads may be new.
        loads = {**({} if newest is None else newest.loads), **announced.loads}
        own = {slot: load for slot, load in loads.items() if slot in self.owned}
        return replace(
            announced,
            loads=own,
            process=self.process,
            owned=frozenset(self.owned),
            letting_go=frozenset(self.letting_go),
            generation=NO_GENERATION if newest is None else newest.generation,
            map_generation=0 if newest is None else newest.slot_map.generation,
        )

    def take(
        self, assignment: Assignment, name: str, *, is_refused: bool = False
    ) -> tuple[frozenset[int], bool]:
        """Take over an assignment to the member, which had joined by this name.

        Return the slots that are to be released now: joining without them lets them be given away.
        Also whether to join again at once, as the others know too little of this member.
        """
        before = self.assignment
        was_stale = before is None or before.generation != assignment.generation - 1
        known = assignment.members.get(name)
        # This process replaced another of the same name, and nobody was told yet.
        is_new = known is not None and known.process != self.process and not is_refused
        given = assignment.slot_map.slots_of(name)
        revoked = frozenset(self.owned - given - self.letting_go)
        self.letting_go |= revoked
        self.owned = set(given | self.letting_go)
        self.assignment = assignment
        is_waited_for = self.process in assignment.unheard or any(
            owner == name and slot not in self.owned for slot, owner in assignment.releasing.items()
        )
        return revoked, (was_stale and is_waited_for) or is_new

    def released(self, slots: Collection[int]) -> None:
        """Drop slots that were released; the next subscription is without them."""
        gone = self.letting_go & set(slots)
        self.owned -= gone
        self.letting_go -= gone

    def lost(self) -> None:
        """Own nothing any more. What the tier was like stays known, to begin the next round."""
        self.owned.clear()
        self.letting_go.clear()
