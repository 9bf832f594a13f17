"""Have a worker measure the loads of its slots, and say which rules it has in force."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from proxy.member import MemberProcess
from proxy.members.quota_keys import QuotaKeys
from proxy.members.slots import slot_of
from proxy.quota.entities import ClientIdentity
from proxy.workers.key_rules import digest_in_force
from proxy.workers.slot_loads import ClientTraffic, LoadMeter

LOAD_INTERVAL_S = 1.0
"""Between two looks whether connections were measured, or rules have changed."""


class LoadReports:
    """What a worker tells of its loads; `run` it. `keys` gives those in use now.

    `tier` is the name of the machine's tier, "" where it is alone. `tell` gets the parameters of
    the notice `loads`.
    """

    def __init__(
        self,
        member: MemberProcess,
        tier: str,
        keys: Callable[[], QuotaKeys],
        tell: Callable[..., Any],
    ) -> None:
        self._member = member
        self._tier = tier
        self._keys = keys
        self._tell = tell
        self._meter = LoadMeter()
        self._slot_of: tuple[QuotaKeys, Callable[[ClientIdentity], int]] | None = None

    async def run(self) -> None:
        """Measure and tell, until cancelled."""
        connections, quotas = self._member.relay.list, self._member.quotas
        seen, shown = connections.client_rates, -1
        while True:
            if quotas.generation != shown:
                shown = quotas.generation
                await self._show_digest()
            if connections.client_rates is not seen:
                seen = connections.client_rates
                await self._measure(ClientTraffic(seen, connections.client_exchanges))
            await asyncio.sleep(LOAD_INTERVAL_S)

    async def _measure(self, traffic: ClientTraffic) -> None:
        meter = self._meter
        now_s, cpu_s = time.monotonic(), time.process_time()
        await self._member.slices.collect(meter.measuring(traffic, self._finder(), now_s, cpu_s))
        self._tell(measured_s=meter.measured_s, rows=meter.rows())

    def _finder(self) -> Callable[[ClientIdentity], int]:
        """Return what finds a client's slot, the same one for the same keys."""
        keys = self._keys()
        if self._slot_of is None or self._slot_of[0] is not keys:
            self._slot_of = keys, lambda client: slot_of(keys.key_of(client))
        return self._slot_of[1]

    async def _show_digest(self) -> None:
        quotas = self._member.quotas
        make = partial(digest_in_force, quotas.table, enforce=quotas.settings.enforce)
        digest = await asyncio.to_thread(make)
        gauge = self._member.services.instruments.rules_digest
        gauge.clear()
        gauge.labels(self._tier, digest).set(1)
