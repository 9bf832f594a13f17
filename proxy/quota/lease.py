"""What a sensor lends: bytes that may pass for a short time without being charged one by one."""

from array import array

LEASE_MS = 50.0
"""Lent for so long at most; they are charged when they are taken back."""

NS_PER_MS, NS_PER_SECOND = 1_000_000, 1_000_000_000


class Lease:
    """The bytes that are left, those that were taken, and until when."""

    __slots__ = ("cells",)

    def __init__(self) -> None:
        self.cells = array("q", (0, 0, 0))
        """Left, taken, and until when in ns of the monotonic clock; who takes writes the first two.
        """

    def lend(self, amount: float, until_ms: float) -> None:
        """Lend so much."""
        self.cells[0], self.cells[2] = int(amount), int(until_ms * NS_PER_MS)

    def is_over(self, now_ms: float) -> bool:
        """Return whether its time has come."""
        return self.cells[2] <= now_ms * NS_PER_MS

    def has_half(self, now_ms: float) -> bool:
        """Return whether it goes on, and more of it is left than was taken."""
        return self.cells[0] > self.cells[1] and not self.is_over(now_ms)

    def end(self) -> None:
        """Lend nothing any more; what was taken is to be taken back."""
        self.cells[0] = self.cells[2] = 0

    def take_back(self) -> int:
        """End it; return how much was taken since the last time."""
        self.end()
        taken, self.cells[1] = self.cells[1], 0
        return taken
