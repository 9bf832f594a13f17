"""The pace at which the demos look at the proxy: once a second, however long a look takes."""

import time
from collections.abc import Callable

INTERVAL_S = 1.0
"""Between two looks: what is shown and drawn is by the second."""


class Pace:
    """Waits between looks.

    Args:
        clock_s: a monotonic time, in seconds.
        sleep: waits for so many seconds, 0 or more.

    """

    def __init__(
        self,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock_s = clock_s
        self._sleep = sleep
        self._due_s = clock_s()

    def wait(self) -> None:
        """Return when the next look is due: at once after one that took too long."""
        now_s = self._clock_s()
        self._due_s = max(self._due_s + INTERVAL_S, now_s)
        self._sleep(self._due_s - now_s)
