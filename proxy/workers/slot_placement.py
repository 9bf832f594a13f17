"""Who of a machine's workers owns which slots: evenly many, until their loads say otherwise.

What was moved for its load is kept in memory: a worker that dies has its slots again when it comes
back, and a machine that starts anew begins evenly.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from structlog import get_logger

from metrics import MemberInstruments
from proxy.members.slot_balance import SlotLoad, overloaded_slots, placed_slots
from proxy.members.slots import SLOTS
from proxy.membership.announced_loads import LEAST_MEASURED_S, are_news, complete
from proxy.workers.slot_loads import MachineLoads
from proxy.workers.slot_shares import share_slots

BALANCE_INTERVAL_S = 30.0
"""Between two looks at the loads."""

WARN_AGAIN_S = 300.0
"""Of a slot that fills a worker alone."""

_log = get_logger(__name__)


class SlotHolder(Protocol):
    """What is to be known of a worker, whether it is there or not."""

    @property
    def name(self) -> str:
        """The worker's name in the slot map."""

    @property
    def serves(self) -> bool:
        """Whether there is a worker, and ready."""


class SlotPlacement:
    """Decides which of a machine's workers owns which slots.

    `looping` names workers that die again and again: they own none.
    """

    def __init__(
        self,
        places: Sequence[SlotHolder],
        looping: Callable[[], Collection[str]],
        metrics: MemberInstruments,
    ) -> None:
        self.loads = MachineLoads()
        self._places = places
        self._names = [each.name for each in places]
        self._looping = looping
        self._metrics = metrics
        self._moved: dict[int, str] = {}
        """The owners of slots that were moved for their load."""
        self._weighed: Mapping[int, SlotLoad] = {}
        """The loads that nothing was to be moved for."""
        self._overloaded_s: dict[int, float] = {}
        """When slots were overloaded last."""
        self._handed_over = self.owners()
        for name in self._names:
            metrics.slots_owned.labels(name).set_function(partial(self._count, name))
        metrics.slots_overloaded.set_function(lambda: len(self.overloaded()))

    def owners(self) -> list[str]:
        """Return the owner of each slot, as it is to be now."""
        looping = self._looping()
        serving = set(self._names) - set(looping) or set(self._names)
        even = share_slots(self._names, looping)
        for slot, name in self._moved.items():
            if name in serving:
                even[slot] = name
        return even

    def handed_over(self, owners: Sequence[str | None]) -> None:
        """Record that all workers follow these owners."""
        before, self._handed_over = self._handed_over, [each or "" for each in owners]
        moves = sum(was != now for was, now in zip(before, self._handed_over, strict=True))
        self._metrics.slot_moves_total.inc(moves)

    def take_loads(self, member: str, measured_s: float, rows: Sequence[Sequence[Any]]) -> None:
        """Keep what a worker has measured."""
        self.loads.told(member, rows, measured_s)

    def balance(self) -> bool:
        """Move slots away from workers that have much more to do; return whether any moves."""
        loads = complete(self._known_loads(), range(SLOTS))
        serving, before = self._serving(), self.owners()
        # A worker that is away for a moment has its slots again when it is back.
        if not set(before) <= set(serving) or self.loads.measured_s(serving) < LEAST_MEASURED_S:
            return False
        if not are_news(self._weighed, loads):
            return False
        moved = False
        for slot, target in enumerate(placed_slots(before, serving, loads)):
            if target != before[slot]:
                moved, self._moved[slot] = True, target
                about = {"slot": slot, "source": before[slot], "target": target}
                _log.info("a slot moves to a worker with less to do", **about)
        if not moved:
            self._weighed = loads
        return moved

    def warn(self, now_s: float) -> None:
        """Log which slots have begun to fill a worker alone."""
        for slot, load in self.overloaded().items():
            before_s, self._overloaded_s[slot] = self._overloaded_s.get(slot), now_s
            if before_s is None or now_s - before_s > WARN_AGAIN_S:
                _log.warning(
                    "a slot fills a worker alone, so that more workers do not help its clients",
                    slot=slot,
                    worker=self._handed_over[slot],
                    cpu_share=round(load.cpu_share, 2),
                    bytes_per_s=round(load.bytes_per_s),
                    clients=self.loads.clients(slot),
                    fix="see KafkaQuotaProxySlotOverloaded in docs/operations.md",
                )

    async def watch(self, share: Callable[[], None]) -> None:
        """Balance the loads, until cancelled; `share` has the workers follow what has changed."""
        while True:
            await asyncio.sleep(BALANCE_INTERVAL_S)
            self.warn(time.monotonic())
            if self.balance():
                share()

    def overloaded(self) -> dict[int, SlotLoad]:
        """Return the slots that fill a worker alone, with their loads."""
        loads = self._known_loads()
        return {slot: loads[slot] for slot in overloaded_slots(loads, self._serving())}

    def documents(self) -> Mapping[str, dict[str, Any]]:
        """Return what the status shows of each worker's slots, by its name."""
        return slot_documents(self._names, self._handed_over, self.loads, self.overloaded())

    def _count(self, name: str) -> int:
        return self._handed_over.count(name)

    def _serving(self) -> list[str]:
        looping = self._looping()
        return [each.name for each in self._places if each.serves and each.name not in looping]

    def _known_loads(self) -> dict[int, SlotLoad]:
        """Return the loads of slots, without what workers had told that have ended."""
        for each in self._places:
            if not each.serves:
                self.loads.forget(each.name)
        return self.loads.of_slots()


def slot_documents(
    names: Sequence[str],
    owners: Sequence[str | None],
    loads: MachineLoads,
    overloaded: Mapping[int, SlotLoad],
) -> Mapping[str, dict[str, Any]]:
    """Return what the status shows of the slots of each of these workers, by its name."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        carried = loads.of_member(name)
        found[name] = {
            "owned": owners.count(name),
            "bytes_per_s": round(carried.bytes_per_s),
            "cpu_share": round(carried.cpu_share, 3),
            "overloaded": [
                {
                    "slot": slot,
                    "bytes_per_s": round(load.bytes_per_s),
                    "cpu_share": round(load.cpu_share, 3),
                    "clients": loads.clients(slot),
                }
                for slot, load in overloaded.items()
                if owners[slot] == name
            ],
        }
    return found
