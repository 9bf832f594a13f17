"""What a `query_driver` has read, and whether each record came once."""

import json
from collections.abc import Mapping
from threading import Condition, Thread

from bench.processes import Child

Ranges = Mapping[int, tuple[int, int, int]]
"""By partition: the first offset, the last one, and how many there were."""


class QueryReads:
    """Takes the batches that a driver prints until it ends."""

    def __init__(self, driver: Child) -> None:
        self._driver = driver
        self._batches: dict[int, Ranges] = {}
        self._changed = Condition()
        self._is_over = False
        Thread(target=self._take_all, daemon=True).start()

    def wait(self, records: int, timeout_s: float) -> bool:
        """Wait for so many records, or the driver's end; return False when in vain."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._is_over or count_records(self._batches) >= records, timeout_s
            )

    def batches(self) -> dict[int, Ranges]:
        """Return what each batch read; one that was read again takes the place of the first."""
        with self._changed:
            return dict(self._batches)

    def _take_all(self) -> None:
        stdout = self._driver.process.stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith(b"{"):
                told = json.loads(line)
                ranges = {int(key): tuple(value) for key, value in told["ranges"].items()}
                with self._changed:
                    self._batches[told["batch"]] = ranges
                    self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


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
