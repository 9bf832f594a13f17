"""How much of a pipeline's source is in flight, and whether that is too much for more."""


class MaxPending:
    """Counts the source batches that are not finished, and their bytes, against two limits.

    A batch counts from the report of the first stage until its root has ended, however it ended;
    what is planned and not reported is said to `full`. There is no hysteresis: a batch ends as a
    whole, so one that leaves makes room for about one that comes.

    Args:
        max_batches: so many make it full; None: no limit.
        max_bytes: so many make it full; None: no limit.

    Raises ValueError when a limit is below 1.

    """

    __slots__ = ("batches", "max_batches", "max_bytes", "size_bytes")

    def __init__(self, max_batches: int | None = None, max_bytes: int | None = None) -> None:
        self.batches = 0
        """Source batches in flight."""
        self.size_bytes = 0
        """What they have read."""
        self.limit(max_batches, max_bytes)

    def limit(self, max_batches: int | None, max_bytes: int | None) -> None:
        """Set other limits; what is in flight stays. Raises ValueError as at the start."""
        for name, limit in (("max_batches", max_batches), ("max_bytes", max_bytes)):
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be 1 or more, not {limit}")
        self.max_batches = max_batches
        self.max_bytes = max_bytes

    def add(self, size_bytes: int) -> None:
        """Take note of a batch that began. Raises ValueError when the size is negative."""
        if size_bytes < 0:
            raise ValueError(f"a batch of {size_bytes} bytes cannot be")
        self.batches += 1
        self.size_bytes += size_bytes

    def remove(self, size_bytes: int) -> None:
        """Take note of a batch of that size that ended. Raises ValueError when none is left."""
        if not self.batches or size_bytes > self.size_bytes:
            raise ValueError("more ended than began")
        self.batches -= 1
        self.size_bytes -= size_bytes

    def full(self, planned: int = 0, planned_bytes: float = 0.0) -> bool:
        """Say whether so much is in flight that the source is to wait.

        Args:
            planned: batches of first stages that are planned and not known as roots yet.
            planned_bytes: what they read.

        """
        return (self.max_batches is not None and self.batches + planned >= self.max_batches) or (
            self.max_bytes is not None and self.size_bytes + planned_bytes >= self.max_bytes
        )
