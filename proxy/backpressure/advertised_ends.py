"""The log ends that drivers were given, and the connections that they looked them up on."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.progress.report import BatchRange
from proxy.wire.topic_partition import TopicPartition

PartitionOffsets = Mapping[TopicPartition, int]

MISSED_ANSWERS = 3
"""A partition that a driver did not look up in so many answers is read no more."""


@dataclass(slots=True, eq=False)
class LookupConnection:
    """What is known of one connection of the client."""

    opened_ms: float
    """Monotonic; so are all times here."""
    is_executor: bool = False
    """Whether it fetches."""
    is_known: bool = False
    """Whether it is the driver's whatever signs of life there are."""
    first_id: int | None = None
    """The correlation id of its first look-up, 0 if that was of log starts; None before it."""
    waits_since_ms: float | None = None
    """Since when an answer has waited for a report; None: none waits."""
    wait_failed: bool = False
    """Whether one waited in vain, and no report came since."""
    answers_ms: deque[float] = field(
        default_factory=lambda: deque([-math.inf] * MISSED_ANSWERS, MISSED_ANSWERS)
    )
    """When the last look-ups of log ends were answered; long ago where there were fewer."""


@dataclass(slots=True)
class AdvertisedEnd:
    """One partition, as a driver knows it; a connection of None is one of an earlier process."""

    log_end: int
    """The real one when it was last looked up."""
    offset: int
    """What was advertised instead, or the same."""
    answered_ms: float
    answered_on: LookupConnection | None = None
    """Of the last answer: when, and on which connection."""
    raised_ms: float = -math.inf
    raised_on: LookupConnection | None = None
    """The same of the last that advertised more than the one before."""
    idle_offset: int = 0
    """All below had been read when the query was idle."""
    planned: tuple[tuple[int, int], ...] = ()
    """The latest offsets that were advertised, each with the real end then."""
    previous: int | None = None
    """What was advertised until it was raised last."""
    new: int = 0
    """By how much the log had grown at the last look-up since the one before."""


def left_out(
    advertised: Mapping[TopicPartition, AdvertisedEnd], ranges: Mapping[TopicPartition, BatchRange]
) -> int | None:
    """Return how many offsets were beyond a batch when it was planned; None: not known."""
    known = [
        log_end - offset
        for key, read in ranges.items()
        if key in advertised
        for offset, log_end in advertised[key].planned
        if offset == read.end
    ]
    return sum(known) if known else None
