"""What this member's slots carry: what the others are told, and the status shows."""

import asyncio
import time
from collections.abc import Callable, Mapping

from structlog import get_logger

from proxy.relay.connection_list import ConnectionList
from proxy.slices import Slices
from proxy.state import Document
from proxy.tier.ownership import SlotOwnership
from proxy.tier.slot_balance import NO_LOAD, SlotLoad, overloaded_slots
from proxy.tier.slot_loads import AnnouncedLoads, ClientTraffic, LoadMeter

LOAD_INTERVAL_S = 1.0
"""Between two looks whether connections were measured."""

WARN_AGAIN_S = 300.0
"""Of a slot that fills a member alone."""

_log = get_logger(__name__)


class TierLoads:
    """Measures the loads of the slots that `ownership` has, by what `connections` move.

    `known` gives what the group knows of the loads, None while it is not followed. When our loads
    are others `request_rebalance` is called.
    """

    def __init__(
        self,
        name: str,
        ownership: SlotOwnership,
        slices: Slices,
        connections: ConnectionList,
        *,
        known: Callable[[], Mapping[int, SlotLoad] | None],
        request_rebalance: Callable[[], None],
    ) -> None:
        self._name, self._ownership, self._slices = name, ownership, slices
        self._connections = connections
        self._known, self._request_rebalance = known, request_rebalance
        self._meter = LoadMeter()
        self.announced = AnnouncedLoads()
        """What the others are told of the loads of this member's slots."""
        self._warned_s: dict[int, float] = {}
        """When a slot was overloaded last."""

    async def watch(self) -> None:
        """Measure, and have the group look at the loads again when ours have changed."""
        connections, seen = self._connections, None
        while True:
            if connections.client_rates is not seen:  # they were measured anew
                seen = connections.client_rates
                traffic = ClientTraffic(seen, connections.client_exchanges)
                now_s, cpu_s = time.monotonic(), time.process_time()
                slot_of = self._ownership.owns.keys.slot_of
                await self._slices.collect(self._meter.measuring(traffic, slot_of, now_s, cpu_s))
                self._warn(time.monotonic())
                loads = self._meter.loads
                measured = {slot: loads.get(slot, NO_LOAD) for slot in self._ownership.owns.slots}
                told = self._known()
                is_news = self.announced.take(
                    measured, told or {}, time.monotonic(), self._meter.measured_s
                )
                if is_news and told is not None:
                    self._request_rebalance()
            await asyncio.sleep(LOAD_INTERVAL_S)

    def document(self) -> Document:
        """Return what the status shows of this member's slots."""
        loads, owned = self._meter.loads, self._ownership.owns.slots
        rates = sum(load.bytes_per_s for load in loads.values())
        return {
            "owned": len(owned),
            "bytes_per_s": round(rates),
            "cpu_share": round(sum(load.cpu_share for load in loads.values()), 3),
            "overloaded": [
                {
                    "slot": slot,
                    "bytes_per_s": round(load.bytes_per_s),
                    "cpu_share": round(load.cpu_share, 3),
                    "clients": self._meter.clients.get(slot, []),
                }
                for slot, load in self.overloaded().items()
                if slot in owned
            ],
        }

    def overloaded(self) -> Mapping[int, SlotLoad]:
        """Return those of our slots that fill a member alone, with their loads."""
        loads, newest = self._meter.loads, self._ownership.newest
        members = [self._name] if newest is None else list(newest.members)
        return {slot: loads[slot] for slot in overloaded_slots(loads, members)}

    def _warn(self, now_s: float) -> None:
        """Log which slots have begun to fill this member alone."""
        for slot in self.overloaded():
            before_s, self._warned_s[slot] = self._warned_s.get(slot), now_s
            if before_s is None or now_s - before_s > WARN_AGAIN_S:
                load = self._meter.loads.get(slot, NO_LOAD)
                _log.warning(
                    "a slot fills a member alone, so that more members do not help its clients",
                    slot=slot,
                    member=self._name,
                    cpu_share=round(load.cpu_share, 2),
                    bytes_per_s=round(load.bytes_per_s),
                    clients=self._meter.clients.get(slot, []),
                    fix="see KafkaQuotaProxySlotOverloaded in docs/operations.md",
                )
