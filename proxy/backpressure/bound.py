"""Which bound is in force for a query, and how it goes back when reports stop."""

from dataclasses import dataclass

RETURN_FACTOR = 1.5
"""By how much the bound rises with each step back."""

RETURN_STEP_MS = 2000.0
"""Time between two steps back."""

RETURN_STEPS = 10
"""After so many steps the rule's own bound is in force, however far it is."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Bytes per second in force, and why."""

    bytes_per_s: float | None
    """None: the rule's own bound."""
    reason: str


@dataclass(frozen=True, slots=True)
class BoundReturn:
    """The way from an adapted bound back to the rule's own."""

    start: float
    """Bytes per second at the beginning."""
    why: str
    """For people."""
    since_ms: float
    """When the first step is taken."""

    def bound(self, static: float, now_ms: float) -> Bound:
        """Return the bound of this moment on the way to `static`; steps missed are caught up."""
        step = int((now_ms - self.since_ms) // RETURN_STEP_MS) + 1
        bytes_per_s = self.start * RETURN_FACTOR ** min(step, RETURN_STEPS)
        if step > RETURN_STEPS or bytes_per_s >= static:
            return Bound(None, f"{self.why}: the rule's own bound")
        return Bound(bytes_per_s, f"{self.why}: step {step} back to the rule's own bound")
