"""Exchanges with other members what visitors had, and what they owe for it."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from structlog import get_logger

from metrics.clock import clock_ms
from proxy.quota.debts import SharedQuotas
from proxy.relay.steering import Visit
from proxy.workers.control_channel import CallFailedError, ControlChannel
from proxy.workers.slot_steering import SlotSteering
from proxy.workers.visits import VisitLog, owed_rows, read_owed, read_visit, visit_row

CHARGED_AT_ONCE = 200
"""Visits between two turns of others: some milliseconds."""

VISITS_LIMIT_S = 5.0
"""For an owner's answer; what it was told later than that it may have charged."""

VISITS_KEPT_S = 5.0
"""How long an owner that cannot be told of visits is told again."""

_log = get_logger(__name__)


class VisitExchanges:
    """Those of one worker, over its `channel`; `visits` is what `steering` has seen of visitors."""

    def __init__(
        self,
        visits: VisitLog,
        channel: ControlChannel,
        shared: SharedQuotas,
        steering: SlotSteering,
    ) -> None:
        self._visits, self._channel, self._shared, self._steering = (
            visits,
            channel,
            shared,
            steering,
        )
        self._loop = asyncio.get_running_loop()
        self._failing_since_s: dict[str, float] = {}
        """Since when an owner is not told of visits."""
        self._telling: dict[str, asyncio.Task[None]] = {}
        """By the owners that are being told of visits: one at a time each."""

    async def charge(self, visits: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Charge what visitors had at other members; return what they owe."""
        found = [read_visit(row) for row in visits]
        owed = []
        for number, visit in enumerate(found):
            if not number % CHARGED_AT_ONCE:
                await asyncio.sleep(0)
            _, owed_ms = self._shared.charge_visit(
                visit.identity, visit.address, visit.kind, visit.amount, clock_ms()
            )
            owed.append(owed_ms)
        return owed_rows(found, owed)

    def tell(self) -> None:
        """Begin to report to each owner what its clients had here since the last time."""
        for owner, visits in self._visits.take(busy=self._telling):
            task = self._telling[owner] = asyncio.create_task(self._tell_visits(owner, visits))
            task.add_done_callback(partial(self._told, owner))

    def _told(self, owner: str, task: asyncio.Task[None]) -> None:
        del self._telling[owner]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("unexpected error about visits", owner=owner, exc_info=error)

    async def _tell_visits(self, owner: str, visits: Sequence[Visit]) -> None:
        rows = [visit_row(visit) for visit in visits]
        try:
            answer = await self._channel.call("visits", VISITS_LIMIT_S, owner=owner, visits=rows)
        except CallFailedError as error:
            self._tell_again(owner, visits, str(error))
            return
        except TimeoutError:  # it may have charged them: then twice
            self._tell_again(owner, visits, "no answer in time")
            return
        self._failing_since_s.pop(owner, None)
        for (client, kind), owed_ms in read_owed(answer).items():
            self._shared.owe(client, kind, owed_ms, clock_ms())

    def _tell_again(self, owner: str, visits: Sequence[Visit], problem: str) -> None:
        """Keep for a while what an owner could not be told, for it or who is the owner then."""
        now_s = self._loop.time()
        if owner not in self._failing_since_s:
            _log.warning("an owner was not told of visits", owner=owner, error=problem)
        if now_s - self._failing_since_s.setdefault(owner, now_s) > VISITS_KEPT_S:
            return
        for visit in visits:
            self._steering.visited(visit)
