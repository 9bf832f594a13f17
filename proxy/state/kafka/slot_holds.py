"""Which slots a machine has, and the fence it writes them with; without I/O."""

from collections.abc import Collection
from threading import Lock

from proxy.state.store import StateError

from .slot_fence import GroupFence

LOST_FIX = (
    "nothing: it writes again when the group has given it slots; see its log if that takes long"
)
NOT_TAKEN_FIX = "send it to the machine that has the slot; the map of slots names it"


class SlotHolds:
    """The slots that may be written, and the fence; for several threads."""

    def __init__(self) -> None:
        self._taken: frozenset[int] = frozenset()
        self._fence: GroupFence | None = None
        self._losses = 0
        self._lock = Lock()

    @property
    def taken(self) -> frozenset[int]:
        """The slots that may be written."""
        return self._taken

    @property
    def fence(self) -> GroupFence | None:
        """With which is written now."""
        return self._fence

    def renew(self, fence: GroupFence) -> int:
        """Write with this fence from now on; return what `took` wants to know.

        One with an older generation is ignored. A member with another id has lost its slots: it
        was out of the group, and others may have had them.
        """
        with self._lock:
            before = self._fence
            if before is not None and not _same_member(before, fence):
                self._lose()
            if before is None or not _same_member(before, fence) or _newer(before, fence):
                self._fence = fence
            return self._losses

    def took(self, slots: Collection[int], losses: int) -> bool:
        """Allow writes to these slots; return whether nothing was lost since `renew` said so."""
        with self._lock:
            if losses != self._losses:
                return False
            self._taken |= frozenset(slots)
            return True

    def release(self, slots: Collection[int]) -> None:
        """Allow no more writes to these slots."""
        with self._lock:
            self._taken -= frozenset(slots)

    def lose(self) -> None:
        """Allow no writes to any slot until it is taken anew."""
        with self._lock:
            self._lose()

    def fence_for(self, slots: Collection[int]) -> GroupFence:
        """Return the fence to write these slots with. Raises StateError: not all may be written."""
        with self._lock:
            if self._fence is None:
                raise StateError(
                    "this machine is not in the group of its tier now, and writes nothing", LOST_FIX
                )
            if missing := sorted(set(slots) - self._taken):
                raise StateError(
                    f"this machine has not the slot {missing[0]}, and does not write to it",
                    NOT_TAKEN_FIX,
                )
            return self._fence

    def _lose(self) -> None:
        self._taken, self._fence = frozenset(), None
        self._losses += 1


def _same_member(one: GroupFence, other: GroupFence) -> bool:
    return (one.group_id, one.member_id) == (other.group_id, other.member_id)


def _newer(before: GroupFence, fence: GroupFence) -> bool:
    return fence.generation > before.generation
