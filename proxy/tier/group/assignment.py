"""What every member gets from the leader: the whole map, who is in the tier, who is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from proxy.tier.slot_balance import SlotLoad
from proxy.tier.slot_map import SlotMap

from .user_data import pack, read_packed

LOAD_STEPS = 10_000
"""In which a member's capacity is counted, where the load of a slot is told."""


@dataclass(frozen=True, slots=True)
class AnnouncedMember:
    """A member as it announced itself; where clients reach it is in the map."""

    admin_url: str
    process: str
    """Differs between two processes of one name."""
    rules_digest: str
    clock_s: int
    """Its clock as it joined, in whole seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class RefusedMember:
    """A member that is in the group and must not be in the tier."""

    name: str
    reason: str
    """What is wrong and how to mend it."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The outcome of one round; all members get the same."""

    generation: int
    """Of the group."""
    slot_map: SlotMap
    releasing: Mapping[int, str] = field(default_factory=dict)
    """The member that has each slot which is to move; in the map nobody owns it."""
    members: Mapping[str, AnnouncedMember] = field(default_factory=dict)
    """By their names."""
    refused: Mapping[str, RefusedMember] = field(default_factory=dict)
    """By their member ids in the group."""
    unheard: frozenset[str] = frozenset()
    """Processes of members that may own more than is known; until they are heard, or gone, no
    slot without an owner is given to anybody."""
    targets: Mapping[int, str] = field(default_factory=dict)
    """The member that is to have each slot which nobody owns in the map."""
    loads: Mapping[int, SlotLoad] = field(default_factory=dict)
    """What is known of each slot's load."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to do in another round."""
        return not self.releasing and not self.unheard

    @property
    def rules_digests(self) -> dict[str, list[str]]:
        """The members by the digest of their rules; more than one while a change is rolled out."""
        members: dict[str, list[str]] = {}
        for name, each in sorted(self.members.items()):
            members.setdefault(each.rules_digest, []).append(name)
        return members

    @property
    def clocks_apart_s(self) -> int:
        """How far the clocks are apart; some seconds are only the time that joining takes."""
        clocks = [each.clock_s for each in self.members.values()]
        return max(clocks) - min(clocks) if clocks else 0

    def encode(self) -> bytes:
        """Return the bytes that `decode` reads."""
        return pack(
            {
                "generation": self.generation,
                "map": self.slot_map.document(),
                "releasing": sorted(self.releasing.items()),
                "targets": sorted(self.targets.items()),
                "loads": [
                    round(self.loads[slot].share * LOAD_STEPS) if slot in self.loads else None
                    for slot in range(len(self.slot_map.owners))
                ],
                "machines": {
                    name: [each.admin_url, each.process, each.rules_digest, each.clock_s]
                    for name, each in self.members.items()
                },
                "refused": {key: [each.name, each.reason] for key, each in self.refused.items()},
                "unheard": sorted(self.unheard),
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read what was encoded; raises FormError."""
        return read_packed(data, cls._of)

    @classmethod
    def _of(cls, document: Mapping[str, Any]) -> Self:
        return cls(
            generation=int(document["generation"]),
            slot_map=SlotMap.of(document["map"]),
            releasing={int(slot): str(name) for slot, name in document["releasing"]},
            # Members of an earlier version do not say these two.
            targets={int(slot): str(name) for slot, name in document.get("targets", ())},
            loads={
                slot: SlotLoad(0.0, steps / LOAD_STEPS)
                for slot, steps in enumerate(document.get("loads", ()))
                if steps is not None
            },
            members={name: AnnouncedMember(*each) for name, each in document["machines"].items()},
            refused={key: RefusedMember(*each) for key, each in document["refused"].items()},
            unheard=frozenset(map(str, document["unheard"])),
        )
