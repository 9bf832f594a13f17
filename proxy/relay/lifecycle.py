"""The states of a connection pair, the moves between them, and why its requests are not read.

Without I/O: `Connection` records here what happens to it, and does what that allows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, Flag, auto


class PairPhase(Enum):
    """Where a pair is in its life."""

    NEW = "new"
    """Its first request has not been read."""
    DIALLING = "dialling"
    """That request waits for the broker's connection."""
    OPEN = "open"
    DRAINING = "draining"
    """No further requests are taken; answers in flight still go out, most of them unheld."""
    LINGERING = "lingering"
    """All answers are out; the client is to close its side."""
    CLOSED = "closed"


OPEN, DRAINING = PairPhase.OPEN, PairPhase.DRAINING
"""By themselves, for the path of every frame: from its class a member takes ten times as long."""

MOVES: Mapping[PairPhase, frozenset[PairPhase]] = {
    PairPhase.NEW: frozenset({PairPhase.DIALLING, PairPhase.CLOSED}),
    PairPhase.DIALLING: frozenset({PairPhase.OPEN, PairPhase.CLOSED}),
    PairPhase.OPEN: frozenset({PairPhase.DRAINING, PairPhase.CLOSED}),
    PairPhase.DRAINING: frozenset({PairPhase.LINGERING, PairPhase.CLOSED}),
    PairPhase.LINGERING: frozenset({PairPhase.CLOSED}),
    PairPhase.CLOSED: frozenset(),
}
"""The states that may follow each state."""


class ReadPauseReason(Flag):
    """Why the requests of an open pair are not read; all its pauses must end first."""

    NONE = 0
    FULL = auto()
    """Too many requests are in flight."""
    MUTED = auto()
    """The client's throttle time runs (KIP-219)."""
    LOGIN = auto()
    """Who the client is shows with the answer to its login."""
    GATED = auto()
    """The client owes a quota too much."""
    SERIAL = auto()
    """The client is over its request_percentage: one request at a time, as a broker takes them."""
    CROWDED = auto()
    """The client opens connections faster than its connection_rate."""
    SENT_ON = auto()
    """The client is to ask its owner, and is about to be let go."""


NO_PAUSE = ReadPauseReason.NONE
UNANSWERED = ReadPauseReason.FULL | ReadPauseReason.SERIAL
"""Pauses that end when requests are answered."""

HELD_BACK = (
    ReadPauseReason.MUTED
    | ReadPauseReason.GATED
    | ReadPauseReason.CROWDED
    | ReadPauseReason.SENT_ON
)
"""Pauses that a client cannot end."""


@dataclass(slots=True, eq=False)
class PairLifecycle:
    """One pair's state, and its pauses while it is open."""

    state: PairPhase = PairPhase.NEW
    pauses: ReadPauseReason = NO_PAUSE

    def move(self, to: PairPhase) -> None:
        """Enter a state, without pauses. Raises ValueError when MOVES does not have the move."""
        if to not in MOVES[self.state]:
            raise ValueError(f"no move from {self.state.value} to {to.value}")
        self.state = to
        self.pauses = ReadPauseReason.NONE

    def pause(self, reason: ReadPauseReason) -> None:
        """Add a pause. Raises ValueError unless the pair is open."""
        if self.state is not PairPhase.OPEN:
            raise ValueError(f"no pause {reason} when {self.state.value}")
        self.pauses |= reason

    def unpause(self, reason: ReadPauseReason) -> bool:
        """End a pause, if there is one; return whether requests are to be read again."""
        self.pauses &= ~reason
        return self.state is PairPhase.OPEN and not self.pauses

    @property
    def is_held_back(self) -> bool:
        """Whether it is the proxy that keeps the client waiting."""
        return self.state is PairPhase.DIALLING or bool(self.pauses & HELD_BACK)
