"""What the relay asks about clients that another member owns, and what it tells of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from proxy.cluster.upstream import Address
from proxy.quota.entities import ClientIdentity, QuotaKind


class Owner(Protocol):
    """The member that owns a client, when it is another one."""

    @property
    def name(self) -> str:
        """The member's name."""

    def address_of(self, listener: str, node_id: int) -> Address | None:
        """Return what clients are told for a broker; None when it has no port there."""

    def bootstrap_of(self, listener: str) -> Address | None:
        """Return where clients can begin anew; None when it has no such listener."""


class Steering(Protocol):
    """Says which member owns a client. One for all connections of a process."""

    generation: int
    """Changes with each change of what `owner_of`, `fallback_of` and their owners say."""
    on_change: Callable[[], None]
    """Called after each such change; set by who follows it."""

    def owner_of(self, identity: ClientIdentity) -> Owner | None:
        """Return the owner when it is another member; None: this one."""

    def fallback_of(self, identity: ClientIdentity) -> Owner | None:
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
