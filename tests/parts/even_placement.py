"""As many slots at each member as at another, whatever their load: a placement for rounds."""

from collections import Counter
from collections.abc import Mapping, Sequence

from proxy.tier.slot_balance import Owners, SlotLoad


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
