"""A clock that only the test moves."""

START_MS = 1_000_000.0
EPOCH_S = 1_700_000_000.0


class VirtualTime:
    """The time that a world's parts are given."""

    now_ms = START_MS
    epoch_s = EPOCH_S
    """What wall clocks showed when `now_ms` was 0."""

    @property
    def now_s(self) -> float:
        return self.epoch_s + self.now_ms / 1000

    def pass_ms(self, ms: float) -> None:
        self.now_ms += ms
