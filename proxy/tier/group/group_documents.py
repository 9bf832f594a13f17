"""What members tell one another through their group, and the bytes that Kafka carries of it.

A member joins with a `Subscription`; the leader gives the same `Assignment` to all.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeAlias

from pydantic import PlainSerializer, PlainValidator

from proxy.relay.steering import MemberAddresses
from proxy.state import JsonDataclass
from proxy.state.unpacking import unpack_at_most
from proxy.tier.slot_balance import SlotLoad
from proxy.tier.slot_map import SLOTS, SlotMap

USER_DATA_SCHEMA = 2
"""Of the documents. Kafka carries them for members of several versions during an upgrade."""

MAX_DOCUMENT_BYTES, MAX_SUBSCRIPTION_BYTES = 4 * 2**20, 2**19
"""Unpacked. A map of 1,000 members takes some 300 KB, and what one says of itself some 10, with the
ports of 4,000 brokers 60 more for each listener. Whoever may join must not fill our memory, nor
have the leader read for long."""

_LEVEL = 9
"""The brokers keep what a group has in one record, so size counts more than the milliseconds."""

LOAD_STEPS = 10_000
"""In which a member's capacity is counted, where the load of a slot is told."""

NO_GENERATION = -1
"""Of the group, before a member had its first assignment."""


def _steps(loads: Mapping[int, SlotLoad]) -> list[int | None]:
    slots = range(max(loads, default=-1) + 1)
    return [round(loads[slot].share * LOAD_STEPS) if slot in loads else None for slot in slots]


def _of_steps(steps: list[int | None]) -> dict[int, SlotLoad]:
    known = ((slot, each) for slot, each in enumerate(steps) if each is not None)
    return {slot: SlotLoad(0.0, each / LOAD_STEPS) for slot, each in known}


Shares: TypeAlias = Annotated[
    Mapping[int, SlotLoad], PlainSerializer(_steps), PlainValidator(_of_steps)
]
"""Loads of slots, written as shares of a member's capacity alone."""


class UserDataError(ValueError):
    """These bytes are none of ours, or of a form that this version does not know."""


def pack(document: Mapping[str, Any]) -> bytes:
    """Return a document with its form, as compressed JSON."""
    text = json.dumps({"form": USER_DATA_SCHEMA, **document}, separators=(",", ":"))
    return zlib.compress(text.encode(), _LEVEL)


def unpack(data: bytes, most_bytes: int = MAX_DOCUMENT_BYTES) -> dict[str, Any]:
    """Return what was packed; raises UserDataError."""
    try:
        document = json.loads(unpack_at_most(data, most_bytes))
    except (ValueError, RecursionError) as error:
        raise UserDataError(f"not written by a proxy: {error}") from error
    if not isinstance(document, dict):
        raise UserDataError("not written by a proxy: no document")
    if document.get("form") != USER_DATA_SCHEMA:
        found = f"of form {document.get('form')!r}, and this version reads form {USER_DATA_SCHEMA}"
        raise UserDataError(f"{found}: run versions that go together")
    return document


class UserData(JsonDataclass):
    """A dataclass that Kafka carries."""

    __slots__ = ()

    most_bytes: ClassVar[int] = MAX_DOCUMENT_BYTES

    def encode(self) -> bytes:
        """Return the bytes that `decode` reads."""
        return pack(self.document())

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read what was encoded; raises UserDataError."""
        document = unpack(data, cls.most_bytes)
        try:
            return cls.of(document)
        except (TypeError, ValueError) as error:
            raise UserDataError(f"not as a proxy writes it: {error}") from error


@dataclass(frozen=True, slots=True)
class Subscription(UserData):
    """What a member says of itself; `SlotStates` adds what it owns as it joins."""

    most_bytes: ClassVar[int] = MAX_SUBSCRIPTION_BYTES

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
    state_topic: str = ""
    """Where it keeps what it owns; earlier versions do not say."""
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
    releasing: frozenset[int] = frozenset()
    """Those of `owned` that it is about to release."""
    generation: int = NO_GENERATION
    """Of the group, when the member got its last assignment."""

    @property
    def name(self) -> str:
        """The member's name."""
        return self.addresses.name

    def __post_init__(self) -> None:
        """Raise ValueError for a slot that there is not."""
        slots = range(self.slots)  # of another member's word: not to be made a set of
        if not all(slot in slots for slot in (*self.owned, *self.loads, *self.releasing)):
            raise ValueError(f"a slot is not among 0 to {self.slots - 1}")


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
class Assignment(UserData):
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
    loads: Shares = field(default_factory=dict)
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
