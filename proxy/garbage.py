"""Frees memory that is of no use any more without holding the event loop for long.

That is garbage, which Python's collector finds, and what the C library keeps of freed memory.
"""

import ctypes
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import process_time
from typing import Any

MIDDLE_COLLECTION_AFTER, FULL_COLLECTION_AFTER = 5, 1
"""Collections of younger objects between two of Python's garbage collector: a full one looks at
some 8,000 objects then, which takes some 2 ms. With 10,000 clients, rules and partitions it would
look at a million, if those that were there before were not left out."""

FROZEN_GROWTH = 1_000_000
"""Objects frozen since all were looked at, some 150 MB, after which all are again, for 0.3 s or so:
what became garbage in a cycle after it was frozen stays until then. To count them takes 0.1 ms for
each thousand, so they are counted no sooner than there can be so many."""

OLDEST_GENERATION = 2  # a collection of it is a full one

KEPT_BYTES = 16 << 20
"""So much may be freed before the system gets it back, which takes 0.3 ms for each MiB. Memory that
is taken again soon is cheaper if it stays."""

FREED_INTERVAL_S, FREED_AFTER_S = 0.1, 0.05
"""Between two looks at how much was freed, and of the process's CPU time: some hundred connections
close in the latter. A look takes 0.2 ms: at rest, a third of all that there was to do."""


def spare_full_collections() -> None:
    """Collect garbage now; from now on leave out what a full collection has found in use.

    So no full collection takes long. What it has found is freed as ever when nothing refers to it
    any more, but a reference cycle of such objects only by `FrozenGarbage`: what comes and goes
    often has to be free of cycles, as tests/relay/test_freed.py shows of connections.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # of nothing: Python puts full ones off until a quarter of its last one is new
    gc.callbacks.append(_freeze_survivors)
    young, _, _ = gc.get_threshold()
    gc.set_threshold(young, MIDDLE_COLLECTION_AFTER, FULL_COLLECTION_AFTER)


def _freeze_survivors(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop" and info["generation"] == OLDEST_GENERATION:
        gc.freeze()


def _full_collections() -> int:
    return int(gc.get_stats()[OLDEST_GENERATION]["collections"])


@dataclass(slots=True)
class FrozenGarbage:
    """What became garbage after full collections have left it out."""

    _count: int = field(default_factory=gc.get_freeze_count)
    """Objects left out, when all were looked at last."""
    _collections: int = field(default_factory=_full_collections)
    """How many full collections there had been when they were counted last."""

    def collect(self, growth: int = FROZEN_GROWTH) -> None:
        """Collect all garbage if `growth` objects are left out since all were looked at."""
        collections, (young, _, _) = _full_collections(), gc.get_threshold()
        most_each_time = young * (MIDDLE_COLLECTION_AFTER + 2) * (FULL_COLLECTION_AFTER + 2)
        if (collections - self._collections) * most_each_time < growth:
            return
        self._collections, count = collections, gc.get_freeze_count()
        if count - self._count < growth:
            self._count = min(count, self._count)
            return
        gc.unfreeze()
        gc.collect()
        self._count = gc.get_freeze_count()


class MemoryTrimmer:
    """Gives freed memory back to the system before it is so much that this takes long.

    By itself glibc gives back only what lies behind all that is in use: after a peak of connections
    next to nothing. A C library that is not glibc 2.33 or newer is left alone.
    """

    def __init__(self, library: Any, cpu_s: Callable[[], float] = process_time) -> None:
        """Begin; `cpu_s` is the process's CPU time, in seconds."""
        self._library, self._cpu_s = library, cpu_s
        self._looked_s = cpu_s()
        if hasattr(library, "mallinfo2"):
            library.mallinfo2.restype = _Mallinfo2
        self._given_back_bytes = self._free_bytes()
        """So much at most of what is free now was given back, and not used since."""

    def give_back(self) -> None:
        """Give back what was freed, if it is much; call it every FREED_INTERVAL_S."""
        cpu_s = self._cpu_s()
        if cpu_s - self._looked_s < FREED_AFTER_S:
            return
        self._looked_s, free_bytes = cpu_s, self._free_bytes()
        self._given_back_bytes = min(self._given_back_bytes, free_bytes)
        if free_bytes - self._given_back_bytes >= KEPT_BYTES:
            self._library.malloc_trim(ctypes.c_size_t(0))
            self._given_back_bytes = self._free_bytes()

    def _free_bytes(self) -> int:
        """Return how much memory it has that is not in use, given back or not."""
        has_count = hasattr(self._library, "mallinfo2")
        return int(self._library.mallinfo2().fordblks) if has_count else 0


class _Mallinfo2(ctypes.Structure):
    """What glibc counts; `fordblks` are its free bytes."""

    _fields_ = [
        ("others", ctypes.c_size_t * 8),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]
