"""What a member tells the others when it joins: who it is, what it owns, what that costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from proxy.tier.slot_balance import SlotLoad
from proxy.tier.slot_map import MemberAddresses
from proxy.tier.slots import SLOTS

from .user_data import pack, read_packed

NO_GENERATION = -1
"""Of the group, before a member had its first assignment."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a member says of itself; `Holding` adds what it owns as it joins."""

    addresses: MemberAddresses
    """With its name, which no other member of the tier has."""
    admin_url: str
    cluster_id: str
    """Of the cluster that its clients reach through it."""
    rules_digest: str
    """Of the configuration's rules; it may differ while a change is rolled out."""
    clock_s: float
    """Seconds since the epoch."""
    slots: int = SLOTS
    loads: Mapping[int, SlotLoad] = field(default_factory=dict)
    """By slot, of those that it owns."""
    is_leaving: bool = False
    """Whether it is to own nothing any more, and serves until others have what it owns."""
    reached: frozenset[str] = frozenset()
    """The other members that it has reached where clients would; of those without slots alone."""
    unreached: frozenset[str] = frozenset()
    """The other members that it has tried to reach there, in vain."""
    is_settling: bool = False
    """Whether it has crashed again and again: it owns something only where all are so."""
    process: str = ""
    """Differs between two processes of one name."""
    owned: frozenset[int] = frozenset()
    """The slots that the member has, and has not yet released."""
    letting_go: frozenset[int] = frozenset()
    """Those of `owned` that it is about to release."""
    generation: int = NO_GENERATION
    """Of the group, when the member got its last assignment."""
    map_generation: int = 0
    """Of the newest map that it knows."""

    @property
    def name(self) -> str:
        """The member's name."""
        return self.addresses.name

    def encode(self) -> bytes:
        """Return the bytes that `decode` reads.

        Versions that had several members of one machine here read them, too.
        """
        return pack(
            {
                "machine": self.name,
                "process": self.process,
                "members": [self.addresses.document()],
                "admin_url": self.admin_url,
                "cluster_id": self.cluster_id,
                "rules_digest": self.rules_digest,
                "clock_s": round(self.clock_s, 3),
                "slots": self.slots,
                "loads": [
                    [slot, round(load.bytes_per_s), round(load.cpu_share, 4)]
                    for slot, load in sorted(self.loads.items())
                ],
                "owned": {self.name: sorted(self.owned)},
                "letting_go": sorted(self.letting_go),
                "is_leaving": self.is_leaving,
                "reached": sorted(self.reached),
                "unreached": sorted(self.unreached),
                "is_settling": self.is_settling,
                "generation": self.generation,
                "map_generation": self.map_generation,
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read what was encoded; raises FormError."""
        return read_packed(data, cls._of)

    @classmethod
    def _of(cls, document: Mapping[str, Any]) -> Self:
        slots = int(document["slots"])
        (addresses,) = document["members"]
        read = cls(
            addresses=MemberAddresses.of(addresses),
            admin_url=str(document["admin_url"]),
            cluster_id=str(document["cluster_id"]),
            rules_digest=str(document["rules_digest"]),
            clock_s=float(document["clock_s"]),
            slots=slots,
            loads={
                int(slot): SlotLoad(float(rate), float(share))
                for slot, rate, share in document["loads"]
            },
            is_leaving=bool(document["is_leaving"]),
            reached=frozenset(map(str, document.get("reached", ()))),
            unreached=frozenset(map(str, document.get("unreached", ()))),
            is_settling=bool(document.get("is_settling", False)),
            process=str(document["process"]),
            owned=frozenset(int(slot) for each in document["owned"].values() for slot in each),
            letting_go=frozenset(map(int, document["letting_go"])),
            generation=int(document["generation"]),
            map_generation=int(document["map_generation"]),
        )
        if not all(0 <= slot < slots for slot in {*read.owned, *read.loads, *read.letting_go}):
            raise ValueError(f"a slot is not among 0 to {slots - 1}")
        return read
