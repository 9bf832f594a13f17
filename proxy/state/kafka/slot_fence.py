"""Which slots may be written, and the fence they are written with; without I/O."""

from collections.abc import Collection
from dataclasses import dataclass
from threading import Lock

from proxy.state.store import StateError

LOST_FIX = (
    "nothing: it writes again when the group has given it slots; see its log if that takes long"
)
Refusal = tuple[str, str]
"""Why nothing may be written, and how to mend that."""

NOT_IN_GROUP = "this machine is not in the group of its tier now, and writes nothing", LOST_FIX


@dataclass(frozen=True, slots=True)
class GroupFence:
    """Who writes, as the group's coordinator knows it since the member joined last."""

    group_id: str
    generation: int
    member_id: str
    instance_id: str | None = None


class SlotHolds:
    """The slots that may be written, and the fence; for several threads."""

    def __init__(self) -> None:
        self.taken: frozenset[int] = frozenset()
        """The slots that may be written."""
        self.fence: GroupFence | None = None
        """With which is written now; None where no group decides, or this member is not in it."""
        self._refusal: Refusal | None = NOT_IN_GROUP
        self._losses = 0
        self._lock = Lock()

    def renew(self, fence: GroupFence) -> int:
        """Write with this fence from now on; return what `took` wants to know.

        One with an older generation is ignored. A member with another id has lost its slots: it
        was out of the group, and others may have had them.
        """
        with self._lock:
            before = self.fence
            if before is not None and before.member_id != fence.member_id:
                self._lose(NOT_IN_GROUP)
            if self.fence is None or self.fence.generation < fence.generation:
                self.fence, self._refusal = fence, None
            return self._losses

    def took(self, slots: Collection[int], losses: int) -> bool:
        """Allow writes to these slots; return whether nothing was lost since `renew` said so."""
        with self._lock:
            if losses != self._losses:
                return False
            self.taken |= frozenset(slots)
            return True

    def release(self, slots: Collection[int]) -> None:
        """Allow no more writes to these slots."""
        with self._lock:
            self.taken -= frozenset(slots)

    def lose(self, refusal: Refusal = NOT_IN_GROUP) -> None:
        """Allow no writes to any slot until it is taken anew."""
        with self._lock:
            self._lose(refusal)

    def check(self, slots: Collection[int]) -> None:
        """Raise StateError when not all of these slots may be written."""
        if missing := sorted(set(slots) - self.taken):
            raise StateError(*self._refusal or _not_taken(missing[0]))

    def fence_for(self, slots: Collection[int]) -> GroupFence:
        """Return the fence to write these slots with; raises as `check`."""
        with self._lock:
            self.check(slots)
            if self.fence is None:
                raise StateError(*NOT_IN_GROUP)
            return self.fence

    def _lose(self, refusal: Refusal) -> None:
        self.taken, self.fence, self._refusal = frozenset(), None, refusal
        self._losses += 1


def _not_taken(slot: int) -> Refusal:
    return (
        f"this machine has not the slot {slot}, and does not write to it",
        "send it to the machine that has the slot; the map of slots names it",
    )
