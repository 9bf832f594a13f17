"""Say by the slot map which member owns a client, and where clients reach it."""

from collections.abc import Callable

from metrics.clock import clock_ms
from metrics.member_names import machine_of
from proxy.cluster.upstream import Address
from proxy.quota.entities import ClientIdentity
from proxy.relay.listener import SNI_PORT, Listener
from proxy.relay.steering import Visit
from proxy.tier.slot_map import SLOTS, ListenerPorts, MemberAddresses, SlotMap

JUST_MOVED_MS = 3000.0
"""Clients look for their coordinator again in a second or two."""

ANY_FREE_PORTS = (0, 0)
"""The `broker_ports` of a listener that takes any free ones."""

SlotOf = Callable[[ClientIdentity], int]
"""Gives the slot of a client."""


class SlotSteering:
    """What one member, `name`, knows of the others; see `proxy.relay.steering.Steering`.

    Until the first `use` nobody owns anybody.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._slot_of: SlotOf = lambda _: 0
        self.on_learned: Callable[[int, str, int], None] = lambda *_: None
        """Called once for each address of a broker."""
        self.on_visit: Callable[[str, Visit], None] = lambda *_: None
        """Called for each visit, with the owner's name."""
        self._known: dict[int, Address] = {}
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

    def learned(self, node_id: int, host: str, port: int) -> None:
        """Announce a broker's real address: all members need that, and a port for it."""
        if self._known.get(node_id) != (host, port):
            self._known[node_id] = host, port
            self.on_learned(node_id, host, port)

    def visited(self, visit: Visit) -> None:
        """Record what a client had here that another member owns; the owner is told."""
        owner = self.owner_of(visit.identity)
        if owner is not None:
            self.on_visit(owner.name, visit)


def ports_of(listener: Listener) -> ListenerPorts:
    """Return where clients reach this member through a listener."""
    settings, open_ports = listener.settings, listener.open_ports
    by_broker = {each: port for each, port in open_ports.items() if each is not None}
    of_all, first, last = by_broker.pop(SNI_PORT, None), None, None
    if settings.sni is not None:
        first = of_all
    elif settings.broker_ports not in (None, ANY_FREE_PORTS):
        first, last = settings.broker_ports
    return ListenerPorts(
        host=settings.advertised_host,
        bootstrap_port=listener.bootstrap_port,
        first=first,
        last=last,
        sni=settings.sni,
        ports=by_broker if settings.broker_ports == ANY_FREE_PORTS else {},
    )
