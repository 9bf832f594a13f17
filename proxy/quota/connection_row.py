"""One client connection as operators see it: whose it is, how much it moves, what it waits for."""

from dataclasses import dataclass
from typing import Literal

from .entities import QuotaKind
from .rules import Rule

Where = Literal[
    "delay_queue",
    "muted",
    "gate",
    "connection_rate",
    "one_at_a_time",
    "login",
    "in_flight",
    "client_not_reading",
    "broker_not_reading",
]
"""What keeps a connection waiting; docs/api.md explains each."""


@dataclass(frozen=True, slots=True)
class ConnectionHold:
    """Why a connection does not go on now."""

    where: Where
    kind: QuotaKind | None = None
    """The quota that holds it; None when none does."""
    entity: str | None = None
    """Whose traffic that quota adds up."""
    rule: Rule | None = None
    """The rule behind it; None too when it has gone since."""
    until_ms: float | None = None
    """On the monotonic clock; None when that is not known."""


@dataclass(frozen=True, slots=True)
class ConnectionRow:
    """One open connection."""

    number: int
    """Its own for as long as the process runs; later ones have higher ones."""
    ip: str
    """Of the client."""
    port: int
    listener: str
    user: str | None
    client_id: str | None
    """None too while nothing is known yet."""
    node_id: int | None
    """The broker that the client asked for; None: it came to the bootstrap port."""
    broker: str | None
    """Where the proxy is connected to for it, as `HOST:PORT`; None when it is not."""
    began_ms: float
    """On the monotonic clock."""
    state: str
    received_rate: float | None
    """Bytes per second from the client; None before they were measured."""
    sent_rate: float | None
    """Bytes per second to the client."""
    in_flight: int
    """Requests without an answer."""
    hold: ConnectionHold | None

    @property
    def rate(self) -> float:
        """Both directions together, 0 before they were measured."""
        return (self.received_rate or 0.0) + (self.sent_rate or 0.0)
