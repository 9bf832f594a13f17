"""The slots that a process reads and writes: their records in memory, and its right to write them.

Without I/O.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from threading import Lock, RLock

from proxy.state.store import Record, StateError

from .messages import Content, Place, size_of

LOST_FIX = (
    "nothing: it writes again when the group has given it slots; see its log if that takes long"
)
WriteRefusal = tuple[str, str]
"""Why nothing may be written, and how to mend that."""

NOT_IN_GROUP = "this machine is not in the group of its tier now, and writes nothing", LOST_FIX


@dataclass(frozen=True, slots=True)
class GroupFence:
    """Who writes, as the group's coordinator knows it since the member joined last."""

    group_id: str
    generation: int
    member_id: str
    instance_id: str | None = None


class SlotTable:
    """Records by slot and key, which slots may be written, and the fence; for several threads.

    One thread changes records. The slot of a record follows from the rules, which may change. What
    then stands in another slot than its own is misplaced: it is not found, as what is written or
    deleted in its own slot counts, and that may be on another machine. No method waits.
    """

    def __init__(self, slot_of_record: Callable[[str], int]) -> None:
        self._slot_of = slot_of_record
        self._records: dict[Place, Record] = {}
        self._lock = Lock()
        """Of several records: what is written together is seen together."""
        self._right = RLock()
        """Of the right to write, which is asked for on event loops."""
        self.size_bytes = 0
        """Of all keys and values."""
        self.taken: frozenset[int] = frozenset()
        """The slots that may be written."""
        self.fence: GroupFence | None = None
        """With which is written now; None where no group decides, or this member is not in it."""
        self._refusal: WriteRefusal | None = NOT_IN_GROUP
        self._losses = 0

    def place(self, key: str) -> Place:
        """Return where the record of that key belongs."""
        return self._slot_of(key), key

    def at(self, place: Place) -> Record | None:
        """Return the record that stands there, or None: there is none, or the slot is not read."""
        return self._records.get(place)

    def items(self, prefix: str) -> list[Record]:
        """Return the records of all slots whose key begins with `prefix`, sorted by key."""
        found = ((place, each) for place, each in self._all() if place[1].startswith(prefix))
        own = (record for place, record in found if place == self.place(record.key))
        return sorted(own, key=lambda record: record.key)

    def misplaced(self) -> dict[Place, Record]:
        """Return the records in taken slots that belong to another by now, by where they stand.

        No other method finds them: write them at the machine that has their slot, then
        `SlotStore.drop_misplaced` here.
        """
        stand = {place: record for place, record in self._all() if place[0] in self.taken}
        return {at: record for at, record in stand.items() if at != self.place(record.key)}

    def change(self, changes: Mapping[Place, Content]) -> set[str]:
        """Write records, or delete those that are None; return the keys that differ now."""
        changed: set[str] = set()
        with self._lock:
            for place, content in changes.items():
                before = self._records.get(place)
                if isinstance(content, Record):
                    self._records[place] = content
                else:
                    self._records.pop(place, None)
                if self._records.get(place) != before:
                    changed.add(place[1])
                    self.size_bytes += size_of(content) - size_of(before)
        return changed

    def replace(self, slots: Collection[int], records: Mapping[Place, Content]) -> set[str]:
        """Replace all that is in these slots; return the keys that differ now."""
        gone = [place for place in self._records if place[0] in slots]
        return self.change({**dict.fromkeys(gone), **records})

    def renew(self, fence: GroupFence) -> int:
        """Write with this fence from now on; return what `took` wants to know.

        One with an older generation is ignored. A member with another id has lost its slots: it
        was out of the group, and others may have had them.
        """
        with self._right:
            before = self.fence
            if before is not None and before.member_id != fence.member_id:
                self.lose()
            if self.fence is None or self.fence.generation < fence.generation:
                self.fence, self._refusal = fence, None
            return self._losses

    def took(self, slots: Collection[int], losses: int) -> bool:
        """Allow writes to these slots; return whether nothing was lost since `renew` said so."""
        with self._right:
            if losses != self._losses:
                return False
            self.taken |= frozenset(slots)
            return True

    def release(self, slots: Collection[int]) -> None:
        """Allow no more writes to these slots."""
        with self._right:
            self.taken -= frozenset(slots)

    def lose(self, refusal: WriteRefusal = NOT_IN_GROUP) -> None:
        """Allow no writes to any slot until it is taken anew; what was read stays readable.

        For a machine that is out of its group: others may have its slots.
        """
        with self._right:
            self.taken, self.fence, self._refusal = frozenset(), None, refusal
            self._losses += 1

    def check(self, slots: Collection[int]) -> GroupFence | None:
        """Return the fence to write these slots with; raise StateError when they may not be."""
        with self._right:
            if missing := sorted(set(slots) - self.taken):
                refusal = (
                    f"this machine has not the slot {missing[0]}, and does not write to it",
                    "send it to the machine that has the slot; the map of slots names it",
                )
                raise StateError(*self._refusal or refusal)
            return self.fence

    def _all(self) -> list[tuple[Place, Record]]:
        with self._lock:
            return list(self._records.items())
