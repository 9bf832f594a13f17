"""Say which slot a quota key has, and which member owns each slot: so it steers its clients."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from kafka.partitioner.default import murmur2

from metrics.clock import clock_ms
from metrics.member_names import machine_of
from proxy.quota.entities import ClientIdentity
from proxy.relay.steering import MemberAddresses, Visit

SLOTS = 256
"""How many slots a proxy or a tier has; each has one owner. As partitions of a topic they are few,
and enough to share evenly among some dozens of members."""

MAX_KNOWN_SLOTS = 20_000
"""Keys whose slots are remembered: a hash takes microseconds, and walks ask for thousands."""

JUST_MOVED_MS = 3000.0
"""Clients look for their coordinator again in a second or two."""

SlotOf = Callable[[ClientIdentity], int]
"""Gives the slot of a client."""

_INT31 = 0x7FFFFFFF


@lru_cache(MAX_KNOWN_SLOTS)
def slot_of(key: str, slots: int = SLOTS) -> int:
    """Return the slot of a quota key, 0 to `slots` - 1.

    By the hash by which Kafka's default partitioner gives a key its partition.
    """
    return int(murmur2(key.encode("utf-8", "surrogatepass")) & _INT31) % slots


@dataclass(frozen=True, slots=True)
class SlotMap:
    """The owner of each slot, as of one moment."""

    members: Mapping[str, MemberAddresses]
    """By their names; one that owns no slot may be among them."""
    owners: Sequence[str | None]
    """The member's name for each slot; None while nobody owns it."""

    def __post_init__(self) -> None:
        """Raise ValueError for an owner that is no member."""
        if unknown := set(self.owners) - self.members.keys() - {None}:
            raise ValueError(f"slots are owned by {unknown}, who are no members")

    def owner_of(self, slot: int) -> MemberAddresses | None:
        """Return who owns a slot; None while nobody does."""
        name = self.owners[slot]
        return None if name is None else self.members[name]

    def slots_of(self, name: str) -> frozenset[int]:
        """Return the slots that a member owns."""
        return frozenset(slot for slot, owner in enumerate(self.owners) if owner == name)

    def without(self, slots: Collection[int]) -> Self:
        """Return the map with nobody in these slots."""
        owners = [None if slot in slots else each for slot, each in enumerate(self.owners)]
        return replace(self, owners=owners)


class SlotSteering:
    """What one member, `name`, knows of the others; see `proxy.relay.steering.Steering`.

    Until the first `use` nobody owns anybody.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._slot_of: SlotOf = lambda _: 0
        self.on_visit: Callable[[str, Visit], None] = lambda *_: None
        """Called for each visit, with the owner's name."""
        self._moved_ms: dict[int, float] = {}
        """When slots got another owner last."""
        self._map = SlotMap({}, [None] * SLOTS)
        self._serving: list[str] = []
        self.generation = 0
        self.on_change: Callable[[], None] = lambda: None

    def use(self, slot_map: SlotMap, slot_of: SlotOf) -> frozenset[int]:
        """Follow another map, or find slots in another way.

        Return the slots of this member whose clients another one may have had until now.
        """
        slots = slot_map.slots_of(self._name)
        gained = slots - self._map.slots_of(self._name) if slot_of == self._slot_of else slots
        now_ms = clock_ms()
        for slot, (before, owner) in enumerate(zip(self._map.owners, slot_map.owners, strict=True)):
            if before is not None and owner != before:
                self._moved_ms[slot] = now_ms
        self._map, self._slot_of = slot_map, slot_of
        self._serving = sorted({name for name in slot_map.owners if name is not None})
        self.generation += 1
        self.on_change()
        return gained

    def owner_of(self, identity: ClientIdentity) -> MemberAddresses | None:
        """Return the owner when it is another member; None: this one."""
        owner = self._map.owner_of(self._slot_of(identity))
        return None if owner is None or owner.name == self._name else owner

    def fallback_of(self, identity: ClientIdentity) -> MemberAddresses | None:
        """Return a member to go to when the owner dies; None when there is no other one.

        In a tier it is on another machine, when there is one.
        """
        owner = self._map.owners[self._slot_of(identity)] or ""
        others = [name for name in self._serving if name != owner]
        if not others:
            return None
        machine = machine_of(owner)
        name = min(others, key=lambda name: (machine_of(name) == machine, name <= owner, name))
        return self._map.members[name]

    def has_moved(self, identity: ClientIdentity) -> bool:
        """Return whether the slot of a client got another owner in the last JUST_MOVED_MS."""
        moved_ms = self._moved_ms.get(self._slot_of(identity)) if self._moved_ms else None
        return moved_ms is not None and clock_ms() - moved_ms < JUST_MOVED_MS

    def visited(self, visit: Visit) -> None:
        """Record what a client had here that another member owns; the owner is told."""
        owner = self.owner_of(visit.identity)
        if owner is not None:
            self.on_visit(owner.name, visit)
