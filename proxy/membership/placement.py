"""What decides where slots should go."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from proxy.members.slot_balance import Owners, SlotLoad


class Placement(Protocol):
    """Decides which member should own each slot; the assignor sees to it that it gets there."""

    def __call__(
        self, owners: Owners, members: Sequence[str], loads: Mapping[int, SlotLoad], /
    ) -> Owners:
        """Return the wanted member of each slot.

        `owners` may name members that are not there; `members`, at least one, are in order and
        without doubles. It may move some slots only: it is asked again when these have moved.
        """
