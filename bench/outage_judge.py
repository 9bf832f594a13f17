"""What the events of a query say of the outages that it went through; no I/O and no clock."""

from collections.abc import Iterable
from dataclasses import dataclass

from bench.outage_parts import Event, Ranges


@dataclass(frozen=True, slots=True)
class Outage:
    """Something that a query reads through was away.

    Attributes:
        query: the name of the query.
        what: what was killed.
        moment: when, as seen from the query.
        killed_s: on the monotonic clock.
        back_s: when it served again.

    """

    query: str
    what: str
    moment: str
    killed_s: float
    back_s: float

    @property
    def seconds(self) -> float:
        """How long it was away."""
        return self.back_s - self.killed_s


@dataclass(frozen=True, slots=True)
class Judged:
    """What an outage did to its query.

    Attributes:
        outage: which one.
        planned: records of each batch that began after the kill and before the next one, in order.
        wait_s: from when the query could plan a batch again (the part was back, and the batch that
            was under way then had ended) until one began; None where the query failed first or
            none began.
        error: with which the query failed; None where it did not.

    """

    outage: Outage
    planned: list[int]
    wait_s: float | None
    error: str | None


def judge(outage: Outage, until_s: float, events: Iterable[Event]) -> Judged:
    """Judge an outage by what the query told before `until_s`, the next kill or the end."""
    told = [event for event in events if event.at_s < until_s]
    after = [event for event in told if event.at_s >= outage.killed_s]
    failed = next((event for event in after if event.kind == "over" and event.error), None)
    ready_s = outage.back_s
    if _is_under_way(told, outage.back_s):
        ended_s = _first(after, "ended", outage.back_s)
        ready_s = outage.back_s if ended_s is None else ended_s
    begun_s = _first(after, "begun", ready_s)
    if failed is not None and (begun_s is None or failed.at_s < begun_s):
        begun_s = None
    return Judged(
        outage,
        [size for event, size in planned_sizes(told) if event.at_s >= outage.killed_s],
        None if begun_s is None else begun_s - ready_s,
        None if failed is None else failed.error,
    )


def planned_sizes(events: Iterable[Event]) -> list[tuple[Event, int]]:
    """Return the batches that began, and how many records each was planned to have.

    A batch that is processed again is as large as before. The first one begins at offset 0.
    """
    sizes: list[tuple[Event, int]] = []
    ends = {-1: 0}  # of each batch, over all partitions
    for event in events:
        if event.kind == "begun":
            ends[event.batch] = sum(event.ends.values())
            sizes.append((event, ends[event.batch] - ends[event.batch - 1]))
    return sizes


def read_ranges(events: Iterable[Event]) -> dict[int, Ranges]:
    """Return what each batch read; one that was processed again takes the place of the first."""
    return {event.batch: event.ranges for event in events if event.kind == "ended"}


def count_records(batches: dict[int, Ranges]) -> int:
    """Return how many records the batches read."""
    return sum(count for ranges in batches.values() for _, _, count in ranges.values())


def faults(batches: dict[int, Ranges]) -> list[str]:
    """Return what is wrong with the offsets that the batches of a query read, in their order.

    Each partition must be read from 0 on, without a gap and without an offset that comes twice.
    """
    found: list[str] = []
    reached: dict[int, int] = {}
    for number, ranges in sorted(batches.items()):
        for partition, (first, last, count) in sorted(ranges.items()):
            where = f"batch {number}, partition {partition}"
            wanted = reached.get(partition, 0)
            if first > wanted:
                found.append(f"{where}: {first - wanted} records before {first} are lost")
            elif first < wanted:
                found.append(f"{where}: begins at {first}, which was read before")
            if count != last + 1 - first:
                found.append(f"{where}: {count} records from {first} to {last}")
            reached[partition] = last + 1
    return found


def _is_under_way(events: Iterable[Event], at_s: float) -> bool:
    """Say whether the query was in the midst of a batch."""
    before = [event.kind for event in events if event.at_s < at_s and event.kind != "reported"]
    return bool(before) and before[-1] == "begun"


def _first(events: Iterable[Event], kind: str, from_s: float) -> float | None:
    times = (event.at_s for event in events if event.kind == kind and event.at_s >= from_s)
    return next(times, None)
