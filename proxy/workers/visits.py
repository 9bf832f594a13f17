"""Add up what visitors have had here, for the members that own them. Sans-I/O."""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.relay.steering import Visit

EXCHANGE_INTERVAL_S = 0.1
"""Between two messages: so long a visitor may have what it has had elsewhere."""

MAX_VISITS = 10_000
"""In one message. More would take the owner too long at once; the rest waits for the next one."""

MAX_KEPT = 100_000
"""Clients and kinds of one owner that is not told; what more of them have is not charged there."""

_Key = tuple[ClientIdentity, QuotaKind]


class VisitLog:
    """What visitors have had since their owners were told last, by owner."""

    def __init__(self) -> None:
        self._by_owner: defaultdict[str, dict[_Key, Visit]] = defaultdict(dict)

    def add(self, owner: str, visit: Visit) -> None:
        """Add to what a client has had of one kind."""
        visits, key = self._by_owner[owner], (visit.identity, visit.kind)
        before = visits.get(key)
        if before is None and len(visits) >= MAX_KEPT:
            return
        if before is not None:
            amount = before.amount + visit.amount
            visit = Visit(visit.identity, visit.address, visit.kind, amount)
        visits[key] = visit

    def take(self, busy: Container[str] = ()) -> Iterator[tuple[str, Sequence[Visit]]]:
        """Yield each owner and what it is to be told, at most MAX_VISITS each; drop that here.

        Nothing for those that are `busy`.
        """
        for owner, visits in tuple(self._by_owner.items()):
            if owner in busy:
                continue
            keys = tuple(visits)[:MAX_VISITS]
            yield owner, [visits.pop(key) for key in keys]
            if not visits:
                del self._by_owner[owner]

    def forget(self, owners: Iterable[str]) -> None:
        """Drop what is to be told to members that are gone."""
        for owner in owners:
            self._by_owner.pop(owner, None)


def visit_row(visit: Visit) -> list[Any]:
    """Return a visit as JSON has it; `read_visit` reads that."""
    identity = visit.identity
    names = [identity.listener, identity.user, identity.client_id]
    return [*names, visit.address, visit.kind.value, visit.amount]


def read_visit(row: Sequence[Any]) -> Visit:
    """Read a `visit_row`. Raises ValueError for anything else."""
    match row:
        case [
            str(listener),
            str() | None as user,
            str() | None as client_id,
            str(address),
            str(kind),
            float() | int() as amount,
        ]:
            identity = ClientIdentity(listener, user, client_id)
            return Visit(identity, address, QuotaKind(kind), float(amount))
    raise ValueError(f"{row!r} is no visit")


def owed_rows(visits: Sequence[Visit], owed_ms: Iterable[float]) -> list[list[Any]]:
    """Return what the owner's sensors owe after some visits, as JSON has it; see `read_owed`."""
    return [
        [*visit_row(visit)[:-1], owed]
        for visit, owed in zip(visits, owed_ms, strict=True)
        if owed > 0
    ]


def read_owed(rows: Iterable[Sequence[Any]]) -> Mapping[_Key, float]:
    """Return for how many ms each visitor's sensor owes. Raises ValueError for bad rows."""
    visits = map(read_visit, rows)
    return {(visit.identity, visit.kind): visit.amount for visit in visits}
