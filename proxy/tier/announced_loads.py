"""What a machine announces of the loads of its slots. Sans-I/O; the clock is an argument."""

from collections.abc import Collection, Mapping

from proxy.tier.slot_balance import NO_LOAD, SlotLoad

LEAST_MEASURED_S = 60.0
"""What was measured for less is too low, as it is an average."""

NEWS_SHARE = 0.15
"""Of all that a machine carries: when so much has changed, slot by slot, the others are told."""

LEAST_NEWS = 0.05
"""Of one member's capacity; what is less is no news."""


class AnnouncedLoads:
    """The loads that a machine joins with; they stay as they are until there is news."""

    def __init__(self) -> None:
        self.loads: Mapping[int, SlotLoad] = {}
        """Of slots that this machine has had for long enough, also where it is none."""
        self._since_s: dict[int, float] = {}
        """When each slot came."""

    def take(
        self,
        measured: Mapping[int, SlotLoad],
        known: Mapping[int, SlotLoad],
        now_s: float,
        measured_s: float,
    ) -> bool:
        """Take what was measured of our own slots, which are all there; return whether it is news.

        `known` is what the others know of all slots, `measured_s` for how long this member has
        measured.
        """
        self._since_s = {slot: self._since_s.get(slot, now_s) for slot in measured}
        if measured_s < LEAST_MEASURED_S:
            return False
        loads = {
            slot: load
            for slot, load in measured.items()
            if now_s - self._since_s[slot] >= LEAST_MEASURED_S
        }
        # What nobody knows counts as the average, so a slot that is idle is news, too.
        if loads.keys() <= known.keys() and not are_news(known, loads):
            return False
        self.loads = loads
        return True


def complete(loads: Mapping[int, SlotLoad], slots: Collection[int]) -> dict[int, SlotLoad]:
    """Return the load of each of these slots, also where it is none."""
    return {slot: loads.get(slot, NO_LOAD) for slot in slots}


def are_news(known: Mapping[int, SlotLoad], loads: Mapping[int, SlotLoad]) -> bool:
    """Return whether these slots carry much more or less than is known of them."""
    changed = sum(abs(known.get(slot, NO_LOAD).share - load.share) for slot, load in loads.items())
    carried = sum(load.share for load in loads.values())
    return changed >= max(LEAST_NEWS, NEWS_SHARE * carried)
