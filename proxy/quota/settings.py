"""What the manager is told: the rules, and how their clients are measured."""

from dataclasses import dataclass

from metrics import MetricConfig

from .entities import QuotaKind
from .rules import Rule

LONGEST_AHEAD_MS = 1000.0
"""A longer window does not make holds longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaSettings:
    """The rules and how they are measured. Raises ValueError for a value out of range."""

    rules: tuple[Rule, ...] = ()
    window_ms: float = 1000.0
    """Length of one sample; at least 1."""
    samples: int = 11
    """How many windows a rate looks back on; at least 2."""
    burst_ms: float = 500.0
    """How much of its bound a client may save up and take at once later; 0 or more."""
    max_delay_ms: float = 20_000.0
    """The longest single hold; above 0. Clients give up after 30 s."""
    max_client_entities: int = 10_000
    """For how many clients each kind of quota keeps a sensor of their own; at least 1."""

    def __post_init__(self) -> None:
        if self.samples < 2:  # noqa: PLR2004 - one sample has no window to look back on
            raise ValueError(f"samples must be at least 2, not {self.samples}")
        if not self.burst_ms >= 0:
            raise ValueError(f"burst_ms must be at least 0, not {self.burst_ms}")
        if not self.max_delay_ms > 0:
            raise ValueError(f"max_delay_ms must be above 0, not {self.max_delay_ms}")
        if self.max_client_entities < 1:
            raise ValueError(f"max_client_entities must be above 0, not {self.max_client_entities}")
        MetricConfig(samples=self.samples, window_ms=self.window_ms)

    @property
    def ahead_ms(self) -> float:
        """How much of a bound may be owed when a request is sent on whose response can be held."""
        return min(self.window_ms, LONGEST_AHEAD_MS)

    def longest_hold_ms(self, kind: QuotaKind) -> float:
        """Return the longest single hold for a quota: of time in requests one window, as Kafka."""
        if kind is QuotaKind.REQUEST_PERCENTAGE:
            return min(self.window_ms, self.max_delay_ms)
        return self.max_delay_ms

    @property
    def max_sensors(self) -> int:
        """How many sensors these settings can need; the bound to give to the registry."""
        # A rule has at most two that do not count as a client's: its own, and its overflow.
        return len(QuotaKind) * (self.max_client_entities + 2 * len(self.rules))
