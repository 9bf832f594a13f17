"""Which connected clients have no sensor of their own: no rule bounds them, or all were taken."""

from collections.abc import Collection

from metrics import Instruments

from .entities import ClientIdentity, QuotaKind
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

    def note(self, client: ClientIdentity, bounded: Collection[QuotaKind]) -> None:
        """Record which kinds of a connected client's traffic a rule bounds."""
        if bounded:
            self.unbounded.pop(client, None)
        else:
            self.unbounded[client] = None
        for kind, sharing in self._overflow_clients.items():
            if kind not in bounded:
                sharing.pop(client, None)

    def note_place(self, client: ClientIdentity, meter: Meter, *, is_connected: bool) -> None:
        """Record which sensor a client uses, for a kind of quota."""
        meter.used_by = client
        sharing = self._overflow_clients[meter.kind]
        if not meter.is_overflow:
            sharing.pop(client, None)
        elif is_connected:
            sharing[client] = None

    def forget(self, client: ClientIdentity) -> None:
        """Drop a client that nobody has any more."""
        self.unbounded.pop(client, None)
        for sharing in self._overflow_clients.values():
            sharing.pop(client, None)
