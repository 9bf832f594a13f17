"""Place the slots at members: evenly by load, with as few handovers as that takes.

A pure function of who has which slot and what each carries: it remembers nothing, so that any
member can lead the next round. Each handover makes clients connect anew, so what has an owner
stays with it until a member has far more, or far less, than its part.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

Owners: TypeAlias = Sequence[str | None]
"""The name of the member for each slot; None while nobody owns it."""

MOVES_PER_ROUND = 1 / 3
"""Of all slots, the share that may move in one call: whatever is to move has moved in three."""

MEMBER_BYTES_PER_S = 500e6
"""Roughly what one member relays with a whole core; a slot's share of a member follows from it."""

MOST_LOAD, LEAST_LOAD = 1.15, 0.7
"""In times of a fair part. While all members are between them, nothing moves."""

SETTLED_IMBALANCE = 0.05
"""How far from its part a member may be that slots were moved from or to."""

IDLE_LOAD = 0.1
"""Share of one member's capacity. With less for each, how many slots it has counts as well."""

CLIENTS_LOAD = 0.02
"""How many slots a member has counts so much at least, of all that it carries."""

LEAST_MOVED = 0.1
"""In times of the average slot of the same member. Moving one with less load helps nobody."""

WEIGHT_DIGITS = 9
"""To which loads are compared, so that the order in which they were added up does not matter."""

OVERLOAD = 0.7
"""Share of one member's capacity; a slot with more fills a member alone."""


class SlotLoad(NamedTuple):
    """What the clients of one slot take of its owner, as an average over some tens of seconds."""

    bytes_per_s: float
    cpu_share: float
    """Of one core, 0 to 1."""

    @property
    def share(self) -> float:
        """Of one member's capacity; may be above 1."""
        return max(self.cpu_share, self.bytes_per_s / MEMBER_BYTES_PER_S)


NO_LOAD = SlotLoad(0.0, 0.0)

Placement: TypeAlias = Callable[[Owners, Sequence[str], Mapping[int, SlotLoad]], Owners]
"""Returns the wanted member of each slot, as `place_slots`."""


class _Shares:
    """Who has which slots, and how much each of them and all of them weigh."""

    def __init__(self, owners: Sequence[str], members: Sequence[str], weights: list[float]) -> None:
        self.weights = weights
        self.fair = _fair(weights, len(members))
        """What each has when all have as much, but those that one slot fills."""
        self.slots: dict[str, set[int]] = {name: set() for name in members}
        self.total = dict.fromkeys(self.slots, 0.0)
        for slot, owner in enumerate(owners):
            self.slots[owner].add(slot)
            self.total[owner] += weights[slot]

    def has_too_much(self, name: str, most: float) -> bool:
        """Return whether a member has more than `most` times its part, or its largest slot."""
        limit = most * self.fair
        if self.total[name] <= limit:
            return False
        return self.total[name] > most * max(self.weights[slot] for slot in self.slots[name])

    def move(self, poor: Collection[str], rich: Collection[str]) -> tuple[int, str] | None:
        """Move the slot that evens out most to one of the poor, or else from one of the rich.

        Return it with who has it now; None: they have their parts, or no slot is small enough.
        """
        enough = (1 - SETTLED_IMBALANCE) * self.fair
        in_need = [name for name in poor if self.total[name] < enough]
        target = min(in_need or self.total, key=self._rank)
        sources = [name for name in self.slots if self.total[name] > self.fair]
        # Each gives a part of what is missing, lest the largest slots of a few fill the gap.
        most = (self.fair - self.total[target]) / max(1, len(sources)) if in_need else self.fair
        for source in sorted(sources, key=self._rank, reverse=True):
            if in_need or (source in rich and self.has_too_much(source, 1 + SETTLED_IMBALANCE)):
                slot = self._best_slot(source, target, most)
                if slot is not None:
                    self._give(slot, source, target)
                    return slot, target
        return None

    def _rank(self, name: str) -> tuple[float, int, str]:
        """Return the place of a member among all, the one that has the least first."""
        return round(self.total[name], WEIGHT_DIGITS), len(self.slots[name]), name

    def _give(self, slot: int, source: str, target: str) -> None:
        self.slots[source].remove(slot)
        self.total[source] -= self.weights[slot]
        self.slots[target].add(slot)
        self.total[target] += self.weights[slot]

    def _best_slot(self, source: str, target: str, most: float) -> int | None:
        """Return the slot nearest to what the source is to give, `most` at most, if any.

        Its move leaves both with less than the source had. Of equal ones it is the lightest.
        """
        gap = self.total[source] - self.total[target]
        wanted = min(gap / 2, self.total[source] - self.fair, most)
        least = LEAST_MOVED * self.total[source] / len(self.slots[source])
        weights = self.weights
        fitting = (
            (round(abs(weights[slot] - wanted), WEIGHT_DIGITS), weights[slot], slot)
            for slot in self.slots[source]
            if least < weights[slot] < gap - least
        )
        best = min(fitting, default=None)
        return None if best is None else best[-1]


def place_slots(
    owners: Owners, members: Collection[str], loads: Mapping[int, SlotLoad]
) -> list[str]:
    """Return the wanted owner of each slot, one of the `members`, of which there is at least one.

    Slots of a member that is gone stay with their stand-ins, so that its clients move once. Of the
    others at most `MOVES_PER_ROUND` move: call again until nothing changes. A slot that is not in
    `loads` counts as the average one.
    """
    names = sorted(members)
    known = set(names)
    placed = [
        owner if owner in known else stand_in_of(slot, names) for slot, owner in enumerate(owners)
    ]
    shares = _Shares(placed, names, _weights(len(placed), loads, len(names)))
    poor = [name for name in names if shares.total[name] < LEAST_LOAD * shares.fair]
    rich = {name for name in names if shares.has_too_much(name, MOST_LOAD)}
    moves = max(1, int(len(placed) * MOVES_PER_ROUND)) if poor or rich else 0
    while moves and (moved := shares.move(poor, rich)) is not None:
        slot, placed[slot] = moved
        moves -= 1
    return placed


def stand_in_of(slot: int, serving: Sequence[str]) -> str:
    """Return who of those that are `serving`, in order, has a slot whose owner is gone."""
    return serving[slot % len(serving)]


def overloaded_slots(loads: Mapping[int, SlotLoad], members: Collection[str]) -> list[int]:
    """Return the slots that fill a member alone: no other share of slots can help these."""
    fair = sum(load.share for load in loads.values()) / max(1, len(members))
    return sorted(slot for slot, load in loads.items() if load.share > max(OVERLOAD, fair))


def _weights(slots: int, loads: Mapping[int, SlotLoad], members: int) -> list[float]:
    """Return what each slot weighs: its load, and a little for being a slot."""
    average = sum(load.share for load in loads.values()) / max(1, len(loads))
    base = max(CLIENTS_LOAD * average, IDLE_LOAD * members / max(1, slots) - average)
    return [base + (loads[slot].share if slot in loads else average) for slot in range(slots)]


def _fair(weights: Collection[float], members: int) -> float:
    """Return the part of each member, but of those that a single slot gives more than that."""
    rest = sum(weights)
    for weight in sorted(weights, reverse=True):
        if weight * members <= rest or members == 1:
            break
        rest, members = rest - weight, members - 1
    return rest / members
