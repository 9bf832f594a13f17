"""What the events of a query say of what it has read; no I/O and no clock."""

from collections.abc import Iterable

from bench.outage_parts import Event, Ranges


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
