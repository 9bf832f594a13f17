"""Finds from the numbers of reports whether some were lost or came twice."""

from dataclasses import dataclass, field

from .offset_ranges import OffsetRanges

MAX_SENDERS = 1000
"""How many listeners are remembered; the one that reported longest ago is forgotten first."""

MAX_REFUSED_RANGES = 16


@dataclass(slots=True)
class Sender:
    """One listener."""

    last: int
    """The highest number that was accepted."""
    lost: int = 0
    """How many numbers below it never came."""
    refused: OffsetRanges = field(default_factory=lambda: OffsetRanges(MAX_REFUSED_RANGES))
    """Higher numbers that came and were refused: not lost."""


class Senders:
    """The listeners that reported, by id. One that is not known may start at any number."""

    def __init__(self) -> None:
        self._senders: dict[str, Sender] = {}

    def is_repeated(self, sender_id: str, number: int) -> bool:
        """Return whether this number, or a higher one, was accepted already."""
        sender = self._senders.get(sender_id)
        return sender is not None and number <= sender.last

    def lost(self, sender_id: str) -> int:
        """Return how many numbers of a sender below its last accepted one never came."""
        sender = self._senders.get(sender_id)
        return sender.lost if sender is not None else 0

    def accept(self, sender_id: str, number: int) -> int:
        """Record a number that is accepted; return how many were lost just before it."""
        sender = self._senders.pop(sender_id, None)
        if sender is None:
            sender = Sender(number - 1)
            if len(self._senders) >= MAX_SENDERS:
                del self._senders[next(iter(self._senders))]
        self._senders[sender_id] = sender
        came = sender.refused.covered(sender.last + 1, number)
        lost = number - 1 - sender.last - came
        sender.refused.remove_below(number + 1)
        sender.last = number
        sender.lost += lost
        return lost

    def refuse(self, sender_id: str, number: int) -> None:
        """Record a number that came but is not accepted."""
        sender = self._senders.get(sender_id)
        if sender is not None and number > sender.last:
            sender.refused.add(number, number + 1)
