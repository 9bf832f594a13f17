"""What the clients of a worker owe, as it has told last: one that crashes must not forgive it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from metrics.clock import MS_PER_SECOND
from proxy.workers.shared_keys import debt_row, read_debt

TOLD_INTERVAL_S = 1.0
"""Between two tellings."""

LEAST_TOLD_MS = 500.0
"""Less is not told: who owes that owes as much again, or nothing, by the next time."""


class ToldDebts:
    """Those of one worker. `now_s` is a monotonic clock."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._rows: Sequence[Any] = ()
        self._at_s = 0.0

    def tell(self, rows: Sequence[Any]) -> None:
        """Keep what is owed now, rows as `debt_row` makes them."""
        self._rows, self._at_s = rows, self._now_s()

    def left(self) -> list[Any]:
        """Return what is still owed of it."""
        passed_ms = (self._now_s() - self._at_s) * MS_PER_SECOND
        debts = map(read_debt, self._rows)
        return [
            debt_row(replace(debt, owed_ms=debt.owed_ms - passed_ms))
            for debt in debts
            if debt.owed_ms > passed_ms
        ]
