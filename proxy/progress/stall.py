"""Notices that nothing moves although there is lag."""


class Stall:
    """The alarm of one partition; times are monotonic milliseconds."""

    __slots__ = ("since_ms", "stuck")

    def __init__(self) -> None:
        self.since_ms: float | None = None
        """Since when there is lag and nothing moves; None without lag."""
        self.stuck = False
        """Whether the alarm is on."""

    def check(self, now_ms: float, stuck_after_ms: float) -> bool:
        """Given that there is lag, return whether the alarm goes on now."""
        if self.stuck or self.since_ms is None or now_ms - self.since_ms < stuck_after_ms:
            return False
        self.stuck = True
        return True

    def end(self, since_ms: float | None) -> bool:
        """Begin to wait anew, from then or not at all; return whether the alarm was on."""
        self.since_ms = since_ms
        was_stuck, self.stuck = self.stuck, False
        return was_stuck
