"""Share the slots among the workers of one machine. Sans-I/O."""

from collections.abc import Collection, Sequence

from proxy.members.slots import SLOTS


def share_slots(names: Sequence[str], out: Collection[str] = ()) -> list[str]:
    """Return the owner of each slot: all workers have as many; those of `out` have none.

    The others keep what they have, and share what is left. When all are out, none is.
    """
    serving = [name for name in names if name not in out] or names
    owners = []
    for slot in range(SLOTS):
        turn, place = divmod(slot, len(names))
        own = names[place]
        owners.append(own if own in serving else serving[turn % len(serving)])
    return owners
