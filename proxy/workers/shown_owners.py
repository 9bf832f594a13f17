"""Decide which member clients are sent to while the owner of their slot is away. Sans-I/O."""

from collections.abc import Collection

from proxy.members.member_names import machine_of
from proxy.members.slot_balance import Owners, stand_in_of


def shown_owners(
    owners: Owners, before: Owners, members: Collection[str], silent: Collection[str]
) -> list[str | None]:
    """Return whom clients of each slot are sent to; None for all when nobody serves.

    That is the owner, or in a handover the one `before`. For who is on a `silent` machine, or is
    gone, a member stands in, the same by the reckoning of every machine that knows the same.
    """
    serving = sorted(name for name in members if machine_of(name) not in silent)
    shown: list[str | None] = []
    for slot, (owner, earlier) in enumerate(zip(owners, before, strict=True)):
        name = owner if owner is not None else earlier
        if name not in serving:
            name = stand_in_of(slot, serving) if serving else None
        shown.append(name)
    return shown
