"""Where clients reach members, what is asked about those of other members, and told of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

from proxy.cluster.upstream import Address
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.relay.listener import NODE_ID, SNI_PORT, Listener


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
    """One member, and where clients reach it."""

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


class Steering(Protocol):
    """Says which member owns a client. One for all connections of a process."""

    generation: int
    """Changes with each change of what `owner_of`, `fallback_of` and their owners say."""
    on_change: Callable[[], None]
    """Called after each such change; set by who follows it."""

    def owner_of(self, identity: ClientIdentity) -> MemberAddresses | None:
        """Return the owner when it is another member; None: this one."""

    def fallback_of(self, identity: ClientIdentity) -> MemberAddresses | None:
        """Return a member to go to when the owner dies; None when there is no other one."""

    def has_moved(self, identity: ClientIdentity) -> bool:
        """Return whether a client got another owner just now: what it knows may be of the last."""

    def visited(self, visit: "Visit") -> None:
        """Record what a client had here that another member owns; the owner is told."""


@dataclass(frozen=True, slots=True)
class Visit:
    """Traffic of a client at a member that does not own it."""

    identity: ClientIdentity
    address: str
    """From where the client came."""
    kind: QuotaKind
    amount: float
    """Bytes, or busy milliseconds of `request_percentage`."""
