"""Share the slots out among members: evenly, and with as few handovers as that takes.

Each handover makes clients connect anew, so that what has an owner moves slowly: a member that
joined gets its share over some rounds, and measured load is evened out a few slots at a time.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Owners = Sequence[str | None]
"""The name of the member for each slot; None while nobody owns it."""

MOVES_PER_ROUND = 1 / 8
"""Of all slots, the share that members who have too few are given in one round of `placed_slots`: a
second member has its half after four rounds."""

MEMBER_BYTES_PER_S = 500e6
"""Roughly what one member relays with a whole core; a slot's share of a member follows from it."""

MAX_IMBALANCE = 0.25
"""Load is evened out from a member on that has so much more than the average."""

SETTLED_IMBALANCE = 0.1
"""And until it has this much more at most, lest the next change begins it again."""

MIN_LOAD = 0.3
"""Share of one member's capacity. Below it no member is in need, however uneven the loads are."""

MOVES_PER_CALL = 1 / 64
"""Of all slots, the share that `find_moves` gives away at once; one at least."""

LEAST_MOVED = 0.1
"""In times of the average slot of the same member. Moving one with less load helps nobody."""

REST_S = 300.0
"""A slot that moved stays for so long, and what its clients then do is measured first."""

WEIGHT_DIGITS = 9
"""To which loads are compared, so that the order in which they were added up does not matter."""

OVERLOAD = 0.7
"""Share of one member's capacity; a slot with more fills a member alone."""


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """What the clients of one slot take of its owner, as an average over some tens of seconds."""

    bytes_per_s: float
    cpu_share: float
    """Of one core, 0 to 1."""

    @property
    def share(self) -> float:
        """Of one member's capacity; may be above 1."""
        return max(self.cpu_share, self.bytes_per_s / MEMBER_BYTES_PER_S)


@dataclass(frozen=True, slots=True)
class SlotMove:
    """A slot that is to change its owner."""

    slot: int
    source: str
    target: str


class _Shares:
    """Who has which slots, and how much each of them and all of them weigh."""

    def __init__(
        self, owners: Owners, members: Collection[str], weights: Mapping[int, float]
    ) -> None:
        self.weights = weights
        self.slots: dict[str, set[int]] = {name: set() for name in sorted(members)}
        self.total = dict.fromkeys(self.slots, 0.0)
        for slot, owner in enumerate(owners):
            if owner in self.slots:
                self.give(slot, owner)

    def give(self, slot: int, target: str, source: str | None = None) -> None:
        if source is not None:
            self.slots[source].remove(slot)
            self.total[source] -= self.weights[slot]
        self.slots[target].add(slot)
        self.total[target] += self.weights[slot]

    def rank(self, name: str) -> tuple[float, int, str]:
        """Return the place of a member among all, the one that has the least first."""
        return round(self.total[name], WEIGHT_DIGITS), len(self.slots[name]), name

    def least(self) -> str:
        return min(self.slots, key=self.rank)

    def heaviest_first(self) -> list[str]:
        return sorted(self.slots, key=lambda name: (-self.total[name], name))

    def best_slot(
        self, source: str, target: str, least: float = 0.0, resting: Collection[int] = ()
    ) -> int | None:
        """Return the slot whose move lowers the larger of two members' weights most, if any.

        It weighs more than `least` and is not `resting`; of equal ones the lightest.
        """
        gap = self.total[source] - self.total[target]
        weights = self.weights
        fitting = (
            (round(abs(weights[slot] - gap / 2), WEIGHT_DIGITS), weights[slot], slot)
            for slot in self.slots[source]
            if least < weights[slot] < gap - 10**-WEIGHT_DIGITS and slot not in resting
        )
        best = min(fitting, default=None)
        return None if best is None else best[-1]


def placed_slots(previous: Owners, members: Collection[str]) -> list[str | None]:
    """Return the owners for one round: no slot is without one of the `members`, at least one.

    Slots without an owner, or of one that left, go to those who have the fewest, at once. Members
    with too few get some of the others', at most `MOVES_PER_ROUND`: call again until nothing
    changes.
    """
    owners = list(previous)
    shares = _Shares(owners, members, dict.fromkeys(range(len(owners)), 1.0))
    for slot, owner in enumerate(previous):
        if owner not in shares.slots:
            owners[slot] = target = shares.least()
            shares.give(slot, target)
    enough = len(owners) / len(shares.slots)
    for _ in range(max(1, int(len(owners) * MOVES_PER_ROUND))):
        target = shares.least()
        if shares.total[target] >= enough:
            break
        move = _feed(shares, target)
        if move is None:
            break
        owners[move.slot] = target
    return owners


def _feed(shares: _Shares, target: str) -> SlotMove | None:
    """Give a member one slot of the heaviest that has one to give."""
    for source in shares.heaviest_first():
        slot = shares.best_slot(source, target) if len(shares.slots[source]) > 1 else None
        if slot is not None:
            shares.give(slot, target, source)
            return SlotMove(slot, source, target)
    return None


def find_moves(
    owners: Owners,
    loads: Mapping[int, SlotLoad],
    members: Collection[str],
    now_s: float,
    moved_s: Mapping[int, float],
) -> list[SlotMove]:
    """Return which slots to hand over so that no member has much more than the others.

    Few at a time; `moved_s`: when slots moved last, on the clock of `now_s`; they rest for
    `REST_S`. Each move leaves both members with less than the one had. None where the loads are
    small or even.
    """
    weights = {slot: loads[slot].share if slot in loads else 0.0 for slot in range(len(owners))}
    shares = _Shares(owners, members, weights)
    if not shares.slots:
        return []
    mean = sum(shares.total.values()) / len(shares.slots)
    resting = {slot for slot, at_s in moved_s.items() if now_s - at_s < REST_S}
    moves: list[SlotMove] = []
    most = max(1, int(len(owners) * MOVES_PER_CALL))
    for source in shares.heaviest_first():
        # Whom this lowers is not looked at again; a member that one slot fills stays as it is.
        if shares.total[source] <= max(MIN_LOAD, mean * (1 + MAX_IMBALANCE)):
            break
        least = LEAST_MOVED * shares.total[source] / len(shares.slots[source])
        while len(moves) < most and shares.total[source] > mean * (1 + SETTLED_IMBALANCE):
            target = shares.least()
            slot = shares.best_slot(source, target, least, resting)
            if slot is None:
                break
            shares.give(slot, target, source)
            resting.add(slot)
            moves.append(SlotMove(slot, source, target))
    return moves


def overloaded_slots(loads: Mapping[int, SlotLoad], members: Collection[str]) -> list[int]:
    """Return the slots that fill a member alone: no other share of slots can help these."""
    fair = sum(load.share for load in loads.values()) / max(1, len(members))
    return sorted(slot for slot, load in loads.items() if load.share > max(OVERLOAD, fair))
