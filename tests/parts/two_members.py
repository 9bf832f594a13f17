"""A real map of slots over members whose relays are made in the test, and who follows it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from proxy.quota.entities import ClientIdentity
from proxy.relay.steering import AdvertisedListener, MemberAddresses, Visit
from proxy.tier.slot_map import SLOTS, SlotMap, slot_of


def slot_of_client(identity: ClientIdentity) -> int:
    """The user decides; without one the client id does."""
    return slot_of(identity.user or identity.client_id or "")


@dataclass(eq=False)
class MapSteering:
    """What the member `name` makes of the map."""

    name: str
    map: SlotMap
    generation: int = 1
    on_change: Callable[[], None] = lambda: None
    visits: list[Visit] = field(default_factory=list)

    def owner_of(self, identity: ClientIdentity) -> MemberAddresses | None:
        member = self.map.owner_of(slot_of_client(identity))
        return None if member is None or member.name == self.name else member

    def fallback_of(self, identity: ClientIdentity) -> MemberAddresses | None:
        owner = self.map.owner_of(slot_of_client(identity))
        others = [each for each in self.map.members.values() if each is not owner]
        return others[0] if others else None

    def has_moved(self, identity: ClientIdentity) -> bool:  # noqa: ARG002
        return False

    def visited(self, visit: Visit) -> None:
        self.visits.append(visit)

    def follow(self, new: SlotMap) -> None:
        self.map = new
        self.generation += 1
        self.on_change()

    @classmethod
    def pair(cls, owner: str) -> tuple[Self, Self]:
        """Two members of one map, `a` and `b`, neither with a port; one of them owns all."""
        empty = {name: MemberAddresses(name, {}) for name in ("a", "b")}
        first = SlotMap(empty, [owner] * SLOTS)
        return cls("a", first), cls("b", first)


def moved(old: SlotMap, owner: str, members: tuple[MemberAddresses, ...] = ()) -> SlotMap:
    """The next map: all slots are this member's; `members` are as they are now."""
    named = {**old.members, **{each.name: each for each in members}}
    return SlotMap(named, [owner] * SLOTS)


def member_at(
    name: str, listener: str, bootstrap_port: int, ports: dict[int, int]
) -> MemberAddresses:
    """A member with one listener on the local host."""
    return MemberAddresses(
        name, {listener: AdvertisedListener("127.0.0.1", bootstrap_port, ports=ports)}
    )
