"""Measure what the clients of each slot take of a member, and say when that is news.

All but `SlotLoadMonitor` is sans-I/O: times are arguments, in seconds of one monotonic clock.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

from structlog import get_logger

from proxy.quota.entities import ClientIdentity
from proxy.relay.connection_list import ConnectionList
from proxy.slices import TimeSlicer
from proxy.state import Document
from proxy.tier.ownership import SlotOwnership
from proxy.tier.slot_balance import NO_LOAD, SlotLoad, overloaded_slots

AVERAGE_S = 20.0
"""Time constant of the averages: what was so long ago counts 1/e of what is now."""

EXCHANGE_BYTES = 40_000
"""A request with its response takes as much CPU time as so many bytes that pass."""

LEAST_BYTES_PER_S = 1.0
"""Averages below are forgotten."""

NAMED_SHARE, MAX_NAMED_OF_SLOT = 0.3, 3
"""Of a slot that takes so much of its member, so many clients are named."""

WALKED_AT_ONCE = 100
"""Clients in one step of a walk; some 50 microseconds."""

LEAST_MEASURED_S = 60.0
"""What was measured for less is too low, as it is an average."""

NEWS_SHARE = 0.15
"""Of all that a member carries: when so much has changed, slot by slot, the others are told."""

LEAST_NEWS = 0.05
"""Of one member's capacity; what is less is no news."""

LOAD_INTERVAL_S = 1.0
"""Between two looks whether connections were measured."""

WARN_AGAIN_S = 300.0
"""Of a slot that fills a member alone."""

_log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class LoadMeter:
    """The loads of one member's slots, as averages over some AVERAGE_S."""

    loads: dict[int, SlotLoad] = field(default_factory=dict)
    """By slot; of others there is nothing to tell."""
    announced: Mapping[int, SlotLoad] = field(default_factory=dict)
    """What the others are told, until there is news: the loads of slots that this member has had
    for long enough, also where it is none."""
    clients: dict[int, list[str]] = field(default_factory=dict)
    """Names of the biggest clients of slots that take much, the biggest one first."""
    _since_s: dict[int, float] = field(default_factory=dict)
    """Since when each slot of this member is measured, by the keys in force."""
    _slot_of: object = None
    _at_s: float = math.nan
    _cpu_s: float = 0.0

    def measuring(
        self,
        bytes_per_s: Mapping[ClientIdentity, float],
        exchanges_per_s: Mapping[ClientIdentity, float],
        slot_of: Callable[[ClientIdentity], int],
        now_s: float,
        cpu_s: float,
    ) -> Iterator[None]:
        """Add what clients move to the averages, in small steps; the first call only begins.

        Who is not in `bytes_per_s` moves nothing; CPU time is shared out by that and by exchanges.
        `cpu_s` is the CPU time of the process so far. `slot_of` is another one where clients may
        have got other slots.
        """

        def weight(client: ClientIdentity) -> float:
            exchanges = exchanges_per_s.get(client, 0.0)
            return bytes_per_s.get(client, 0.0) + exchanges * EXCHANGE_BYTES

        passed_s, used_s = now_s - self._at_s, cpu_s - self._cpu_s
        self._at_s, self._cpu_s = now_s, cpu_s
        if slot_of != self._slot_of:
            self._slot_of = slot_of
            self._since_s.clear()
        sizes: dict[int, float] = defaultdict(float)
        weights: dict[int, float] = defaultdict(float)
        clients: defaultdict[int, list[ClientIdentity]] = defaultdict(list)
        for number, (client, size) in enumerate(bytes_per_s.items()):
            if not number % WALKED_AT_ONCE:
                yield
            slot = slot_of(client)
            clients[slot].append(client)
            sizes[slot] += size
            weights[slot] += weight(client)
        if not passed_s > 0:
            return
        total = sum(weights.values())
        cpu = {slot: used_s / passed_s * part / total for slot, part in weights.items() if total}
        self.loads = _averaged(self.loads, sizes, cpu, passed_s)
        self.clients = {
            slot: [*map(_title, nlargest(MAX_NAMED_OF_SLOT, clients[slot], key=weight))]
            for slot, load in self.loads.items()
            if load.share >= NAMED_SHARE
        }

    def announce(self, owned: Collection[int], known: Mapping[int, SlotLoad]) -> bool:
        """Announce what was measured of our own slots; return whether it is news.

        `known` is what the others know of all slots.
        """
        self._since_s = {slot: self._since_s.get(slot, self._at_s) for slot in owned}
        loads = {
            slot: self.loads.get(slot, NO_LOAD)
            for slot, since_s in self._since_s.items()
            if self._at_s - since_s >= LEAST_MEASURED_S
        }
        # What nobody knows counts as the average, so a slot that is idle is news, too.
        if loads.keys() <= known.keys() and not _are_news(known, loads):
            return False
        self.announced = loads
        return True


def _averaged(
    before: Mapping[int, SlotLoad],
    sizes: Mapping[int, float],
    cpu: Mapping[int, float],
    passed_s: float,
) -> dict[int, SlotLoad]:
    kept = math.exp(-passed_s / AVERAGE_S)
    loads = {}
    for slot in {*before, *sizes}:
        was = before.get(slot, NO_LOAD)
        load = SlotLoad(
            was.bytes_per_s * kept + sizes.get(slot, 0.0) * (1 - kept),
            was.cpu_share * kept + cpu.get(slot, 0.0) * (1 - kept),
        )
        if load.bytes_per_s >= LEAST_BYTES_PER_S:
            loads[slot] = load
    return loads


def _are_news(known: Mapping[int, SlotLoad], loads: Mapping[int, SlotLoad]) -> bool:
    """Return whether these slots carry much more or less than is known of them."""
    changed = sum(abs(known.get(slot, NO_LOAD).share - load.share) for slot, load in loads.items())
    carried = sum(load.share for load in loads.values())
    return changed >= max(LEAST_NEWS, NEWS_SHARE * carried)


def _title(client: ClientIdentity) -> str:
    user = "" if client.user is None else f"user={client.user},"
    return f"{user}client-id={client.client_id or ''}"


@dataclass(slots=True, eq=False)
class SlotLoadMonitor:
    """Measures the loads of the slots that this member has, by what its connections move."""

    _ownership: SlotOwnership
    _slices: TimeSlicer
    _connections: ConnectionList
    _request_rebalance: Callable[[], None]
    """Called when the loads are not what the group knows of them."""
    meter: LoadMeter = field(default_factory=LoadMeter)
    _warned_s: dict[int, float] = field(default_factory=dict)
    """When a slot was overloaded last."""

    async def watch(self) -> None:
        """Measure, and have the group look at the loads again when ours have changed."""
        connections, seen = self._connections, None
        while True:
            if connections.client_rates is not seen:  # they were measured anew
                seen = connections.client_rates
                walk = self.meter.measuring(
                    seen,
                    connections.client_exchanges,
                    self._ownership.owns.keys.slot_of,
                    time.monotonic(),
                    time.process_time(),
                )
                await self._slices.collect(walk)
                self._warn(time.monotonic())
                newest = self._ownership.states.assignment
                known = {} if newest is None else newest.loads
                if self.meter.announce(self._ownership.owns.slots, known):
                    self._request_rebalance()
            await asyncio.sleep(LOAD_INTERVAL_S)

    def document(self) -> Document:
        """Return what the status shows of this member's slots."""
        loads, owned = self.meter.loads.values(), self._ownership.owns.slots
        return {
            "owned": len(owned),
            "bytes_per_s": round(sum(load.bytes_per_s for load in loads)),
            "cpu_share": round(sum(load.cpu_share for load in loads), 3),
            "overloaded": [
                self._row(slot, load) for slot, load in self.overloaded().items() if slot in owned
            ],
        }

    def _row(self, slot: int, load: SlotLoad) -> dict[str, Any]:
        return {
            "slot": slot,
            "bytes_per_s": round(load.bytes_per_s),
            "cpu_share": round(load.cpu_share, 3),
            "clients": self.meter.clients.get(slot, []),
        }

    def overloaded(self) -> Mapping[int, SlotLoad]:
        """Return those of our slots that fill a member alone, with their loads."""
        loads, members = self.meter.loads, self._ownership.owns.slot_map.members
        return {slot: loads[slot] for slot in overloaded_slots(loads, members)}

    def _warn(self, now_s: float) -> None:
        """Log which slots have begun to fill this member alone."""
        for slot, load in self.overloaded().items():
            before_s, self._warned_s[slot] = self._warned_s.get(slot), now_s
            if before_s is None or now_s - before_s > WARN_AGAIN_S:
                _log.warning(
                    "a slot fills a member alone, so that more members do not help its clients",
                    member=self._ownership.owns.name,
                    **self._row(slot, load),
                    fix="see KafkaQuotaProxySlotOverloaded in docs/operations.md",
                )
