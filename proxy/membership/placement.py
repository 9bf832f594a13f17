"""Decide where slots should go: as many to each member as to another, moving as few as can be."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from proxy.members.slot_balance import SlotLoad

Owners: TypeAlias = Sequence[str | None]
"""The member of each slot."""


class Placement(Protocol):
    """Decides which member should own each slot; the assignor sees to it that it gets there."""

    def __call__(
        self, owners: Owners, members: Sequence[str], loads: Mapping[int, SlotLoad], /
    ) -> Owners:
        """Return the wanted member of each slot.

        `owners` may name members that are not there; `members`, at least one, are in order and
        without doubles. It may move some slots only: it is asked again when these have moved.
        """


def even(owners: Owners, members: Sequence[str], loads: Mapping[int, SlotLoad], /) -> Owners:
    """Place as many slots at each member, whatever their load, and move as few as can be."""
    del loads
    had = Counter(owners)
    share, more = divmod(len(owners), len(members))
    # Who has most keeps one more than the others.
    ranked = sorted(members, key=lambda name: (-had[name], name))
    room = {name: share + (place < more) for place, name in enumerate(ranked)}
    wanted: list[str | None] = []
    for owner in owners:
        keeps = owner is not None and room.get(owner, 0) > 0
        wanted.append(owner if keeps else None)
        if owner is not None and keeps:
            room[owner] -= 1
    left = iter([name for name in members for _ in range(room[name])])
    return [name if name is not None else next(left) for name in wanted]
