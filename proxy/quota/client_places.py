"""Which connected clients have no sensor of their own: no rule bounds them, or all were taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metrics import Instruments

from .entities import ClientIdentity, QuotaKind

if TYPE_CHECKING:
    from .client_quotas import ClientQuotas
    from .meter import Meter


class ClientPlaces:
    """Of the clients of one manager, as of their last request."""

    def __init__(self, instruments: Instruments) -> None:
        # Both in the order in which they came; a set would have none.
        self.unbounded: dict[ClientIdentity, None] = {}
        """Those that no rule bounds."""
        self._overflow_clients: dict[QuotaKind, dict[ClientIdentity, None]] = {
            kind: {} for kind in QuotaKind
        }
        instruments.unbounded_clients.set_function(self.unbounded.__len__)
        for kind, sharing in self._overflow_clients.items():
            instruments.overflow_clients.labels(str(kind)).set_function(sharing.__len__)

    def note(self, quotas: ClientQuotas) -> None:
        """Record whether a rule bounds a connected client."""
        if quotas.matches:
            self.unbounded.pop(quotas.identity, None)
        else:
            self.unbounded[quotas.identity] = None
        for kind, sharing in self._overflow_clients.items():
            if kind not in quotas.matches:
                sharing.pop(quotas.identity, None)

    def note_place(self, quotas: ClientQuotas, meter: Meter) -> None:
        """Record which sensor a connected client uses, for a kind of quota."""
        meter.used_by = quotas.identity
        sharing = self._overflow_clients[meter.kind]
        if not meter.is_overflow:
            sharing.pop(quotas.identity, None)
        elif quotas.users:
            sharing[quotas.identity] = None

    def forget(self, quotas: ClientQuotas) -> None:
        """Drop a client that nobody has any more."""
        self.unbounded.pop(quotas.identity, None)
        for sharing in self._overflow_clients.values():
            sharing.pop(quotas.identity, None)
