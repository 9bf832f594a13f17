"""Say which slot a quota key has, which member owns each slot, and where clients reach it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self

from kafka.partitioner.default import murmur2

from proxy.cluster.upstream import Address
from proxy.relay.listener import NODE_ID

SLOTS = 256
"""How many slots a proxy or a tier has; each has one owner. As partitions of a topic they are few,
and enough to share evenly among some dozens of members."""

MAX_KNOWN_SLOTS = 20_000
"""Keys whose slots are remembered: a hash takes microseconds, and walks ask for thousands."""

_INT31 = 0x7FFFFFFF


@lru_cache(MAX_KNOWN_SLOTS)
def slot_of(key: str, slots: int = SLOTS) -> int:
    """Return the slot of a quota key, 0 to `slots` - 1.

    By the hash by which Kafka's default partitioner gives a key its partition.
    """
    return int(murmur2(key.encode("utf-8", "surrogatepass")) & _INT31) % slots


@dataclass(frozen=True, slots=True)
class ListenerPorts:
    """Where clients reach one member through one listener."""

    host: str
    """What clients are told; not used with `sni`."""
    bootstrap_port: int
    first: int | None = None
    """Broker N is at port `first` + N, up to `last`. None: as `ports` says, or with `sni`."""
    last: int | None = None
    sni: str | None = None
    """Server name of a broker with `{node_id}` in it: all brokers are at `first`, the one port."""
    ports: Mapping[int, int] = field(default_factory=dict)
    """The ports of brokers where the system chose them."""

    def address_of(self, node_id: int) -> Address | None:
        """Return what clients are told for a broker; None when it has no port here."""
        if self.sni is not None:
            port = self.first if self.first is not None else self.bootstrap_port
            return self.sni.replace(NODE_ID, str(node_id)), port
        if self.first is not None and self.last is not None:
            port = self.first + node_id
            return (self.host, port) if self.first <= port <= self.last else None
        known = self.ports.get(node_id)
        return None if known is None else (self.host, known)

    @property
    def data_address(self) -> Address:
        """Where a client would send requests for data: for a broker, if there is a port for one."""
        node_id = next(iter(self.ports), 0)
        return self.address_of(node_id) or (self.host, self.bootstrap_port)


@dataclass(frozen=True, slots=True)
class MemberAddresses:
    """One process that relays, and where clients reach it; see `proxy.relay.steering.Owner`."""

    name: str
    """Of the worker by itself, `0`, or with its machine in a tier, `proxy-2/0`."""
    listeners: Mapping[str, ListenerPorts]
    """By the names of the listeners."""

    def address_of(self, listener: str, node_id: int) -> Address | None:
        """Return what clients are told for a broker; None when it has no port there."""
        ports = self.listeners.get(listener)
        return None if ports is None else ports.address_of(node_id)

    def bootstrap_of(self, listener: str) -> Address | None:
        """Return where clients can begin anew; None when it has no such listener."""
        ports = self.listeners.get(listener)
        return None if ports is None else (ports.host, ports.bootstrap_port)


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
