"""Keeps the records of the common slot as they are in the topic while another machine has it."""

import asyncio
from collections.abc import Callable

from structlog import get_logger

from proxy.cluster.upstream import RefusedError, UpstreamError
from proxy.state.store import StateError

from .slot_holds import SlotHolds
from .slot_records import SlotRecords
from .state_reader import StateReader
from .state_topic import FencedError, StateTopic

PAUSE_S = 0.2
"""Between looks at whether another machine has the slot now."""

RETRY_S = 1.0
"""After what could not be read."""

ASK_LIMIT_S = 10.0

_log = get_logger(__name__)

OnChange = Callable[[frozenset[str]], None]
"""Gets the keys of the records that changed."""


class CommonFollower:
    """Reads the common slot on, from `position`, wherever that was left."""

    def __init__(
        self, topic: StateTopic, slot: int, holds: SlotHolds, records: SlotRecords
    ) -> None:
        self._topic = topic
        self._slot = slot
        self._holds = holds
        self._records = records
        self._on_change: OnChange = _nothing
        self.position = 0
        """Offset behind what the records hold: read here, read whole, or written by us."""

    async def run(self, on_change: OnChange) -> None:
        """Read on until cancelled."""
        self._on_change = on_change
        failing = False
        while True:
            if self._slot in self._holds.taken:
                await asyncio.sleep(PAUSE_S)
                continue
            try:
                await self._read_on()
                if failing:
                    _log.info("the common slot is followed again")
                failing = False
            except (UpstreamError, RefusedError, FencedError, StateError) as error:
                if not failing:
                    _log.warning("the common slot is not followed", problem=str(error))
                failing = True
                await asyncio.sleep(RETRY_S)

    def was_read(self, position: int, changed: set[str]) -> None:
        """Follow from behind what was read whole; report what that changed."""
        self.position = position
        self._tell(changed)

    async def _read_on(self) -> None:
        began = self.position
        reader = StateReader(self._topic, {self._slot: began})
        async with self._topic.client.within(ASK_LIMIT_S):
            read = await reader.wait()
        if self.position == began and self._slot not in self._holds.taken:
            changed = self._records.change(read)
            self.position = reader.positions[self._slot]
            self._tell(changed)

    def _tell(self, changed: set[str]) -> None:
        if not changed:
            return
        try:
            self._on_change(frozenset(changed))
        except Exception:  # its fault must not end the reading
            _log.exception("a change of the common slot was not taken up")


def _nothing(_changed: frozenset[str]) -> None:
    """Do nothing."""
