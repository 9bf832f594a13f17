"""What the clients of a worker owe, as it has told last: one that crashes must not forgive it."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from metrics.clock import MS_PER_SECOND
from proxy.quota.debts import Debt

TOLD_INTERVAL_S = 1.0
"""Between two tellings."""


class ToldDebts:
    """Those of one worker. `now_s` is a monotonic clock."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._debts: Sequence[Debt] = ()
        self._at_s = 0.0

    def tell(self, owed: Sequence[Mapping[str, Any]]) -> None:
        """Keep what is owed now, as `Debt.document` has it."""
        self.keep([Debt.of(each) for each in owed])

    def keep(self, debts: Sequence[Debt]) -> None:
        """Keep what is owed now."""
        self._debts, self._at_s = debts, self._now_s()

    def left(self) -> list[Debt]:
        """Return what is still owed of it."""
        passed_ms = (self._now_s() - self._at_s) * MS_PER_SECOND
        return [debt.after(passed_ms) for debt in self._debts if debt.owed_ms > passed_ms]
