"""What members tell one another through their group, and the bytes that Kafka carries of it.

A member joins with a `Subscription`; the leader gives the same `Assignment` to all. A `Holding`
follows what the member owns, from assignment to assignment.
"""

import json
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self, TypeVar

from proxy.tier.slot_balance import SlotLoad
from proxy.tier.slot_map import MEMBER_LIST, SLOTS, MemberAddresses, SlotMap

USER_DATA_SCHEMA = 1
"""Of the documents. Kafka carries them for members of several versions during an upgrade."""

MAX_DOCUMENT_BYTES = 16 * 2**20
"""Unpacked. A map of 1,000 members takes some 300 KB; whoever may join must not fill our memory."""

_LEVEL = 9
"""The brokers keep what a group has in one record, so size counts more than the milliseconds."""

NO_GENERATION = -1
"""Of the group, before a member had its first assignment."""

LOAD_STEPS = 10_000
"""In which a member's capacity is counted, where the load of a slot is told."""

_PLAIN: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("process", "admin_url", "cluster_id", "rules_digest"), str),
    **dict.fromkeys(("slots", "generation", "map_generation"), int),
    **dict.fromkeys(("is_leaving", "is_settling"), bool),
}
"""What of a `Subscription` is written as it is, and how it is read."""

T = TypeVar("T")


class FormError(ValueError):
    """These bytes are none of ours, or of a form that this version does not know."""


def pack(document: dict[str, Any]) -> bytes:
    """Return a document with its form, as compressed JSON."""
    text = json.dumps({"form": USER_DATA_SCHEMA, **document}, separators=(",", ":"))
    return zlib.compress(text.encode(), _LEVEL)


def read_packed(data: bytes, make: Callable[[dict[str, Any]], T]) -> T:
    """Return what `make` makes of what was packed; raises FormError."""
    document = unpack(data)
    try:
        return make(document)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise FormError(f"not as a proxy writes it: {error!r}") from error


def unpack(data: bytes) -> dict[str, Any]:
    """Return what was packed; raises FormError."""
    try:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(data, MAX_DOCUMENT_BYTES)
        document = json.loads(text) if unpacking.eof else None
    except (zlib.error, ValueError, RecursionError) as error:
        raise FormError(f"not written by a proxy: {error}") from error
    if not isinstance(document, dict):
        raise FormError("not written by a proxy, cut off, or too long")
    if document.get("form") != USER_DATA_SCHEMA:
        found = f"of form {document.get('form')!r}, and this version reads form {USER_DATA_SCHEMA}"
        raise FormError(f"{found}: run versions that go together")
    return document


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
                "members": [asdict(self.addresses)],
                "clock_s": round(self.clock_s, 3),
                "loads": [
                    [slot, round(load.bytes_per_s), round(load.cpu_share, 4)]
                    for slot, load in sorted(self.loads.items())
                ],
                "owned": {self.name: sorted(self.owned)},
                "letting_go": sorted(self.letting_go),
                "reached": sorted(self.reached),
                "unreached": sorted(self.unreached),
                **{name: getattr(self, name) for name in _PLAIN},
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read what was encoded; raises FormError."""
        return read_packed(data, cls._of)

    @classmethod
    def _of(cls, document: Mapping[str, Any]) -> Self:
        # Members of an earlier version do not say these three.
        document = {"reached": (), "unreached": (), "is_settling": False, **document}
        (addresses,) = MEMBER_LIST.validate_python(document["members"])
        rows = document["loads"]
        plain: dict[str, Any] = {name: kind(document[name]) for name, kind in _PLAIN.items()}
        read = cls(
            addresses=addresses,
            clock_s=float(document["clock_s"]),
            loads={int(slot): SlotLoad(float(rate), float(share)) for slot, rate, share in rows},
            owned=frozenset(int(slot) for each in document["owned"].values() for slot in each),
            letting_go=frozenset(map(int, document["letting_go"])),
            reached=frozenset(map(str, document["reached"])),
            unreached=frozenset(map(str, document["unreached"])),
            **plain,
        )
        slots = read.slots
        if not all(0 <= slot < slots for slot in {*read.owned, *read.loads, *read.letting_go}):
            raise ValueError(f"a slot is not among 0 to {slots - 1}")
        return read


class AnnouncedMember(NamedTuple):
    """A member as it announced itself; where clients reach it is in the map."""

    admin_url: str
    process: str
    """Differs between two processes of one name."""
    rules_digest: str
    clock_s: int
    """Its clock as it joined, in whole seconds since the epoch."""


class RefusedMember(NamedTuple):
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
                "machines": dict(self.members),
                "refused": dict(self.refused),
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


@dataclass(slots=True)
class Holding:
    """The slots of one member, also those that it is about to release. Sans-I/O."""

    process: str
    owned: set[int] = field(default_factory=set)
    letting_go: set[int] = field(default_factory=set)
    """Some of `owned`."""
    assignment: Assignment | None = None
    """The newest one."""

    def subscription(self, announced: Subscription) -> Subscription:
        """Return what to join with: what the member says of itself, and what it owns."""
        newest = self.assignment
        # Of slots that were not measured here yet, what was known: who leads may be new.
        loads = {**({} if newest is None else newest.loads), **announced.loads}
        own = {slot: load for slot, load in loads.items() if slot in self.owned}
        return replace(
            announced,
            loads=own,
            process=self.process,
            owned=frozenset(self.owned),
            letting_go=frozenset(self.letting_go),
            generation=NO_GENERATION if newest is None else newest.generation,
            map_generation=0 if newest is None else newest.slot_map.generation,
        )

    def take(
        self, assignment: Assignment, name: str, *, is_refused: bool = False
    ) -> tuple[frozenset[int], bool]:
        """Take over an assignment to the member, which had joined by this name.

        Return the slots that are to be released now: joining without them lets them be given away.
        Also whether to join again at once, as the others know too little of this member.
        """
        before = self.assignment
        was_stale = before is None or before.generation != assignment.generation - 1
        known = assignment.members.get(name)
        # This process replaced another of the same name, and nobody was told yet.
        is_new = known is not None and known.process != self.process and not is_refused
        given = assignment.slot_map.slots_of(name)
        revoked = frozenset(self.owned - given - self.letting_go)
        self.letting_go |= revoked
        self.owned = set(given | self.letting_go)
        self.assignment = assignment
        is_waited_for = self.process in assignment.unheard or any(
            owner == name and slot not in self.owned for slot, owner in assignment.releasing.items()
        )
        return revoked, (was_stale and is_waited_for) or is_new

    def released(self, slots: Collection[int]) -> None:
        """Drop slots that were released; the next subscription is without them."""
        gone = self.letting_go & set(slots)
        self.owned -= gone
        self.letting_go -= gone

    def lost(self) -> None:
        """Own nothing any more. What the tier was like stays known, to begin the next round."""
        self.owned.clear()
        self.letting_go.clear()
