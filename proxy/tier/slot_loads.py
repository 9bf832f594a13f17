"""Measure what the clients of each slot take of a member, and say when that is news.

Sans-I/O: times are arguments, in seconds of one monotonic clock.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from heapq import nlargest

from proxy.quota.entities import ClientIdentity
from proxy.tier.slot_balance import NO_LOAD, SlotLoad

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


@dataclass(frozen=True, slots=True)
class ClientTraffic:
    """What each client moves now, per second. Who is not there moves nothing."""

    bytes_per_s: Mapping[ClientIdentity, float]
    exchanges_per_s: Mapping[ClientIdentity, float]

    def weight(self, client: ClientIdentity) -> float:
        """Return what the CPU time is shared out by."""
        exchanges = self.exchanges_per_s.get(client, 0.0)
        return self.bytes_per_s.get(client, 0.0) + exchanges * EXCHANGE_BYTES


class LoadMeter:
    """The loads of one member's slots, as averages over some AVERAGE_S."""

    def __init__(self) -> None:
        self.loads: dict[int, SlotLoad] = {}
        """By slot; of others there is nothing to tell."""
        self.clients: dict[int, list[str]] = {}
        """Names of the biggest clients of slots that take much, the biggest one first."""
        self._slots: dict[ClientIdentity, int] = {}
        self._slot_of: object = None
        self._began_s = self._at_s = math.nan
        self._cpu_s = 0.0

    @property
    def measured_s(self) -> float:
        """For how long this has measured; 0 anew when clients get other slots."""
        return self._at_s - self._began_s if self._at_s > self._began_s else 0.0

    def measuring(
        self,
        traffic: ClientTraffic,
        slot_of: Callable[[ClientIdentity], int],
        now_s: float,
        cpu_s: float,
    ) -> Iterator[None]:
        """Add what clients move to the averages, in small steps; the first call only begins.

        `cpu_s` is the CPU time of the process so far. `slot_of` is another one where clients may
        have got other slots.
        """
        passed_s, used_s = now_s - self._at_s, cpu_s - self._cpu_s
        self._at_s, self._cpu_s = now_s, cpu_s
        if slot_of != self._slot_of:
            self._slots.clear()
            self._slot_of, self._began_s = slot_of, now_s
        sizes: dict[int, float] = defaultdict(float)
        weights: dict[int, float] = defaultdict(float)
        slots: dict[ClientIdentity, int] = {}
        for number, (client, size) in enumerate(traffic.bytes_per_s.items()):
            if not number % WALKED_AT_ONCE:
                yield
            slot = self._slots.get(client)
            slots[client] = slot = slot_of(client) if slot is None else slot
            sizes[slot] += size
            weights[slot] += traffic.weight(client)
        self._slots = slots  # of those alone that are there
        if not passed_s > 0:
            return
        total = sum(weights.values())
        cpu = {
            slot: used_s / passed_s * weight / total for slot, weight in weights.items() if total
        }
        self.loads = _averaged(self.loads, sizes, cpu, passed_s)
        yield from self._name_clients(traffic)

    def _name_clients(self, traffic: ClientTraffic) -> Iterator[None]:
        large = {slot for slot, load in self.loads.items() if load.share >= NAMED_SHARE}
        found: dict[int, list[ClientIdentity]] = {slot: [] for slot in large}
        for number, (client, slot) in enumerate(self._slots.items() if large else ()):
            if not number % WALKED_AT_ONCE:
                yield
            if slot in large:
                found[slot].append(client)
        self.clients = {
            slot: [*map(_title, nlargest(MAX_NAMED_OF_SLOT, clients, key=traffic.weight))]
            for slot, clients in found.items()
        }


class AnnouncedLoads:
    """The loads that a member joins with; they stay as they are until there is news."""

    def __init__(self) -> None:
        self.loads: Mapping[int, SlotLoad] = {}
        """Of slots that this member has had for long enough, also where it is none."""
        self._since_s: dict[int, float] = {}
        """When each slot came."""

    def take(
        self,
        measured: Mapping[int, SlotLoad],
        known: Mapping[int, SlotLoad],
        now_s: float,
        measured_s: float,
    ) -> bool:
        """Take what was measured of our own slots, which are all there; return whether it is news.

        `known` is what the others know of all slots, `measured_s` for how long this member has
        measured.
        """
        self._since_s = {slot: self._since_s.get(slot, now_s) for slot in measured}
        if measured_s < LEAST_MEASURED_S:
            return False
        loads = {
            slot: load
            for slot, load in measured.items()
            if now_s - self._since_s[slot] >= LEAST_MEASURED_S
        }
        # What nobody knows counts as the average, so a slot that is idle is news, too.
        if loads.keys() <= known.keys() and not _are_news(known, loads):
            return False
        self.loads = loads
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
