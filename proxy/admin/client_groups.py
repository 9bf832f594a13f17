"""Counts clients, of which one may have several quotas and several one, and names them."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from proxy.admin.history import share
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.meter import QuotaRow

_KINDS = list(QuotaKind)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that belong together, at least one: of one client, or of what several share."""

    rows: Sequence[QuotaRow]

    @property
    def urgency(self) -> tuple[bool, float]:
        """Throttled ones are above the others, then those closer to their bound."""
        return any(row.throttled for row in self.rows), max(map(share, self.rows))

    @property
    def client(self) -> ClientIdentity | None:
        """The only client; None if several share the quotas, or all have left."""
        counts = [row.client_count for row in self.rows]
        return self.rows[counts.index(1)].clients[0] if max(counts) == 1 else None

    @property
    def has_left(self) -> bool:
        """Whether none of its clients is connected any more."""
        return not any(row.client_count for row in self.rows)

    def in_order(self) -> list[QuotaRow]:
        """Return the rows in an order that stays while figures change."""
        return sorted(self.rows, key=lambda row: (_KINDS.index(row.kind), row.entity))


def names_of(groups: Iterable[RowGroup]) -> Iterator[tuple[str, RowGroup]]:
    """Yield each group with a name that no other has: its entity, if it is one."""
    taken: set[str] = set()
    for group in groups:
        client, name = group.client, group.rows[0].entity
        if client and (name in taken or any(row.entity != name for row in group.rows)):
            name = f"client={json.dumps([client.listener, client.user, client.client_id])}"
        elif name in taken:
            name += ",shared"
        taken.add(name)
        yield name, group


@dataclass(slots=True)
class ClientCounts:
    """How many clients are measured: connected ones, and who has left and is not forgotten.

    Those that have left are known by their entity alone: several that shared one count once.
    """

    bounded: int = 0
    """All of them."""
    throttled: int = 0
    held: int = 0
    """Of which a response waits."""
    left: int = 0
    shown: int = 0
    """Those that what was chosen is about."""

    def add_left(self, rows: Sequence[QuotaRow]) -> None:
        """Count a group of rows whose clients have left."""
        self.bounded += 1
        self.left += 1
        self.throttled += any(row.throttled for row in rows)
        self.held += any(row.hold_until_ms is not None for row in rows)

    def add_connected(
        self, quotas: QuotaManager, shown: Sequence[RowGroup], now_ms: float
    ) -> Iterator[None]:
        """Count the connected clients, one in each step, and what is shown of all."""
        self.shown += sum(group.has_left for group in shown)
        sensors = {(row.kind, row.entity) for group in shown for row in group.rows}
        for client in quotas.clients():
            meters = quotas.sensors_of(client)
            self.bounded += bool(meters)
            self.throttled += any(meter.is_throttled for meter in meters)
            self.held += any(meter.hold_until_ms(now_ms) is not None for meter in meters)
            self.shown += any((meter.kind, meter.entity) in sensors for meter in meters)
            yield
