"""What clients owe, told from one member to another. Sans-I/O."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from .entities import ClientIdentity, QuotaKind
from .meter import sensor_name


@dataclass(frozen=True, slots=True)
class Debt:
    """What one sensor owes."""

    identity: ClientIdentity
    """A client that uses the sensor; all others of it have the same quota key."""
    entity: str
    kind: QuotaKind
    owed_ms: float
    """In how long all that was charged has flowed at the bound; above 0."""
    held_ms: float = 0.0
    """For how long what is charged next waits; a large debt is worked off while some flows."""

    @property
    def name(self) -> str:
        """The sensor's."""
        return sensor_name(self.kind, self.entity)

    def after(self, passed_ms: float) -> "Debt":
        """Return what is left of it after so long, which may be nothing, or less."""
        owed_ms, held_ms = self.owed_ms - passed_ms, max(self.held_ms - passed_ms, 0.0)
        return replace(self, owed_ms=owed_ms, held_ms=held_ms)

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it; `of` reads that."""
        client = self.identity
        return {
            "client": [client.listener, client.user, client.client_id],
            "entity": self.entity,
            "kind": str(self.kind),
            "owed_ms": self.owed_ms,
            "held_ms": self.held_ms,
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Read a `document`. Raises KeyError, TypeError, ValueError for anything else."""
        listener, user, client_id = document["client"]
        identity = ClientIdentity(str(listener), user, client_id)
        kind, owed_ms = QuotaKind(document["kind"]), float(document["owed_ms"])
        held_ms = float(document["held_ms"])
        return cls(identity, str(document["entity"]), kind, owed_ms, held_ms)


class PendingDebt(NamedTuple):
    """What a sensor owes that is not there yet."""

    until_ms: float
    held_until_ms: float = -math.inf
    """Until when what is charged first waits."""
    of: Debt | None = None
    """What it was taken over from, if known."""
