"""Tell owners what their clients had here, and charge ours with what they had elsewhere."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from structlog import get_logger

from metrics.clock import clock_ms
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.relay.steering import Visit
from proxy.tier.peer_client import VISITS_PATH, PeerError
from proxy.tier.peers import Peers, PeerTasks
from proxy.tier.slot_map import SlotSteering

CHARGED_AT_ONCE = 200
"""Visits between two turns of others: some milliseconds."""

VISITS_KEPT_S = 5.0
"""How long an owner that cannot be told of visits is told again."""

EXCHANGE_INTERVAL_S = 0.1
"""Between two messages: so long a visitor may have what it has had elsewhere."""

MAX_VISITS = 10_000
"""In one message. More would take the owner too long at once; the rest waits for the next one."""

MAX_KEPT = 100_000
"""Clients and kinds of one owner that is not told; what more of them have is not charged there."""

_Amount = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
_VISIT_ROW = TypeAdapter(tuple[str, str | None, str | None, str, QuotaKind, _Amount])

_Key = tuple[ClientIdentity, QuotaKind]

_log = get_logger(__name__)


def encode_visit(visit: Visit) -> list[Any]:
    """Return a visit as JSON has it; `read_visit` reads that."""
    return [*visit.identity, visit.address, visit.kind.value, visit.amount]


def read_visit(row: Sequence[Any]) -> Visit:
    """Read a `encode_visit`. Raises ValueError for anything else."""
    try:
        listener, user, client_id, address, kind, amount = _VISIT_ROW.validate_python(row)
    except ValidationError:
        raise ValueError(f"{row!r:.200} is no visit") from None
    return Visit(ClientIdentity(listener, user, client_id), address, kind, amount)


class VisitReporting:
    """Those of this member, of visitors that `steering` sees."""

    def __init__(self, quotas: QuotaManager, steering: SlotSteering, peers: Peers) -> None:
        self._quotas, self._steering, self._peers = quotas, steering, peers
        steering.on_visit = self.add
        self._visits: defaultdict[str, dict[_Key, Visit]] = defaultdict(dict)
        """What visitors have had since their owners were told last, by owner."""
        self._failing_since_s: dict[str, float] = {}
        """Since when an owner is not told of visits."""
        self._sending = PeerTasks("visits")

    def add(self, owner: str, visit: Visit) -> None:
        """Add to what a client of an owner has had of one kind."""
        visits, key = self._visits[owner], (visit.identity, visit.kind)
        if (before := visits.get(key)) is not None:
            visit = replace(visit, amount=before.amount + visit.amount)
        elif len(visits) >= MAX_KEPT:
            return
        visits[key] = visit

    def take(self, owner: str) -> Sequence[Visit]:
        """Remove and return what an owner is to be told, at most MAX_VISITS."""
        visits = self._visits[owner]
        taken = [visits.pop(key) for key in tuple(islice(visits, MAX_VISITS))]
        if not visits:
            del self._visits[owner]
        return taken

    async def run(self) -> None:
        """Send to owners, every EXCHANGE_INTERVAL_S, what their clients had; until cancelled."""
        try:
            while True:
                for owner in self._visits.keys() - self._sending.running.keys():
                    self._sending.start(owner, self._send(owner))
                await asyncio.sleep(EXCHANGE_INTERVAL_S)
        finally:
            await self._sending.end()

    async def charge(self, rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Charge what visitors had at other members; return for how many ms each owes.

        As rows of visits, of those that owe. Raises ValueError for rows that are no visits.
        """
        owed: list[list[Any]] = []
        for number, visit in enumerate([read_visit(row) for row in rows]):
            if not number % CHARGED_AT_ONCE:
                await asyncio.sleep(0)
            owed_ms = self._quotas.charge_visit(
                visit.identity, visit.address, visit.kind, visit.amount, clock_ms()
            )
            if owed_ms > 0:
                owed.append(encode_visit(replace(visit, amount=owed_ms)))
        return owed

    async def _send(self, owner: str) -> None:
        visits = self.take(owner)
        try:
            message = {"visits": [encode_visit(visit) for visit in visits]}
            answer = await self._peers.rows(owner, VISITS_PATH, message, "owed")
            rows = [read_visit(row) for row in answer]
        except (PeerError, ValueError) as error:  # it may have charged them: then twice
            self._send_again(owner, visits, str(error))
            return
        self._failing_since_s.pop(owner, None)
        for owed in rows:
            self._quotas.owe(owed.identity, owed.kind, owed.amount, clock_ms())

    def _send_again(self, owner: str, visits: Sequence[Visit], problem: str) -> None:
        """Keep for a while what an owner could not be told, for it or who is the owner then."""
        now_s = asyncio.get_running_loop().time()
        if owner not in self._failing_since_s:
            _log.warning("an owner was not told of visits", owner=owner, error=problem)
        if now_s - self._failing_since_s.setdefault(owner, now_s) > VISITS_KEPT_S:
            return
        for visit in visits:
            self._steering.visited(visit)
