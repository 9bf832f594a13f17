"""Say which slot a quota key has, which member owns each slot, and where clients reach it.

By that one member steers its clients.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self

from kafka.partitioner.default import murmur2

from metrics.clock import clock_ms
from metrics.member_names import machine_of
from proxy.cluster.upstream import Address
from proxy.quota.entities import ClientIdentity
from proxy.relay.listener import NODE_ID, SNI_PORT, Listener
from proxy.relay.steering import Visit

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
class AdvertisedListener:
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

    @classmethod
    def of(cls, listener: Listener) -> Self:
        """Return where clients reach this member through a listener."""
        settings, open_ports = listener.settings, listener.open_ports
        by_broker = {each: port for each, port in open_ports.items() if each is not None}
        of_all, first, last = by_broker.pop(SNI_PORT, None), None, None
        if settings.sni is not None:
            first = of_all
        elif by_broker and not settings.takes_free_ports:
            first, last = min(by_broker.values()), max(by_broker.values())
        return cls(
            host=settings.advertised_host,
            bootstrap_port=listener.bootstrap_port,
            first=first,
            last=last,
            sni=settings.sni,
            ports=by_broker if settings.takes_free_ports else {},
        )

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
    listeners: Mapping[str, AdvertisedListener]
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
