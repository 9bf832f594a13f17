"""Decide where the slots of a tier should be, and when its leader is to look again. Sans-I/O."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from proxy.members.slot_balance import SlotLoad, find_moves, placed_slots
from proxy.workers.shown_owners import stand_in_of

LEAST_SLOTS_SHARE = 0.7
"""A member with less than this of the average number of slots is given more; beyond that what slots
carry counts, not how many there are."""

NEWS_SHARE = 0.15
"""Of one member's capacity: when a machine carries so much more or less than the others know, they
are told."""


class TierPlacement:
    """Places slots for the leader of a tier; see `proxy.membership.placement.Placement`."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._moved_s: dict[int, float] = {}
        """When slots were moved for their load."""

    def __call__(
        self, owners: Sequence[str | None], members: Sequence[str], loads: Mapping[int, SlotLoad], /
    ) -> Sequence[str | None]:
        """Return the wanted owner of each slot: all have enough, then loads are evened out.

        Slots of a member that is gone stay with their stand-ins, so that its clients move once.
        """
        known, heirs = set(members), sorted(members)
        wanted = [
            owner if owner in known else stand_in_of(slot, heirs)
            for slot, owner in enumerate(owners)
        ]
        counts = Counter(wanted)
        if min(counts[name] for name in members) < LEAST_SLOTS_SHARE * len(owners) / len(members):
            return placed_slots(wanted, members)
        now_s = self._clock_s()
        for move in find_moves(wanted, loads, members, now_s, self._moved_s):
            wanted[move.slot], self._moved_s[move.slot] = move.target, now_s
        return wanted


def are_news(told: Mapping[int, SlotLoad], now: Mapping[int, SlotLoad]) -> bool:
    """Return whether a machine carries much more or less than it told, in some slots."""
    slots = told.keys() | now.keys()
    return sum(abs(_share(told, slot) - _share(now, slot)) for slot in slots) >= NEWS_SHARE


def _share(loads: Mapping[int, SlotLoad], slot: int) -> float:
    load = loads.get(slot)
    return 0.0 if load is None else load.share
