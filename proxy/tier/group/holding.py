"""Follow what this machine owns, from assignment to assignment. Sans-I/O."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from .assignment import Assignment
from .subscription import NO_GENERATION, Announcement, Subscription


@dataclass(frozen=True, slots=True)
class Change:
    """What an assignment asks of this machine."""

    revoked: frozenset[int] = frozenset()
    """To be released now; joining without them lets them be given away."""
    must_rejoin: bool = False
    """Whether to join again at once, as the others know too little of this machine."""


@dataclass(slots=True)
class Holding:
    """The slots of one machine, also those that it is about to release."""

    process: str
    owned: dict[int, str] = field(default_factory=dict)
    letting_go: set[int] = field(default_factory=set)
    assignment: Assignment | None = None
    """The newest one."""

    def subscription(self, announcement: Announcement) -> Subscription:
        """Return what to join with; slots of members that are no more are no longer owned."""
        names = {member.name for member in announcement.members}
        self._drop({slot for slot, name in self.owned.items() if name not in names})
        newest = self.assignment
        # Of slots that were not measured here yet, what was known: who leads may be new.
        loads = {**({} if newest is None else newest.loads), **announcement.loads}
        own = {slot: load for slot, load in loads.items() if slot in self.owned}
        return Subscription(
            announcement=replace(announcement, loads=own),
            process=self.process,
            owned=dict(self.owned),
            letting_go=frozenset(self.letting_go),
            generation=NO_GENERATION if newest is None else newest.generation,
            map_generation=0 if newest is None else newest.slot_map.generation,
        )

    def take(
        self, assignment: Assignment, announcement: Announcement, *, is_refused: bool = False
    ) -> Change:
        """Take over an assignment to the machine that had joined with this announcement."""
        was_stale = (
            self.assignment is None or self.assignment.generation != assignment.generation - 1
        )
        known = assignment.machines.get(announcement.machine)
        # This process replaced another of the same name, and nobody was told yet.
        is_new = known is not None and known.process != self.process and not is_refused
        names = {member.name for member in announcement.members}
        given = {
            slot: owner
            for slot, owner in enumerate(assignment.slot_map.owners)
            if owner in names and slot not in self.letting_go
        }
        revoked = {
            slot for slot, owner in self.owned.items() if given.get(slot) != owner
        } - self.letting_go
        self.letting_go |= revoked
        kept = {slot: self.owned[slot] for slot in self.letting_go}
        self.owned = given | kept
        self.assignment = assignment
        is_waited_for = self.process in assignment.unheard or any(
            name in names and slot not in self.owned for slot, name in assignment.releasing.items()
        )
        return Change(frozenset(revoked), (was_stale and is_waited_for) or is_new)

    def released(self, slots: Collection[int]) -> None:
        """Drop slots that were released; the next subscription is without them."""
        self._drop(set(slots) & self.letting_go)

    def lost(self) -> None:
        """Own nothing any more. What the tier was like stays known, to begin the next round."""
        self.owned.clear()
        self.letting_go.clear()

    def _drop(self, slots: set[int]) -> None:
        self.letting_go -= slots
        for slot in slots:
            self.owned.pop(slot, None)


class SessionClock:
    """Says by our own clock how long the brokers keep our membership at least."""

    def __init__(self, session_timeout_s: float) -> None:
        self._session_timeout_s = session_timeout_s
        self._sent_s: float | None = None

    def heard(self, sent_s: float) -> None:
        """Begin the session anew, as of a request that was sent then and is answered."""
        if self._sent_s is None or sent_s > self._sent_s:
            self._sent_s = sent_s

    def stop(self) -> None:
        """End the session."""
        self._sent_s = None

    @property
    def ends_s(self) -> float | None:
        """When the session may be over; None: there is none."""
        return None if self._sent_s is None else self._sent_s + self._session_timeout_s
