"""Frees memory that is of no use any more without holding the event loop for long.

That is garbage, which Python's collector finds, and what the C library keeps of freed memory.
"""

import ctypes
import gc
from collections.abc import Mapping
from typing import Any

MIDDLE_COLLECTION_AFTER, FULL_COLLECTION_AFTER = 5, 1
"""Collections of younger objects between two of Python's garbage collector: a full one looks at
some 8,000 objects then, which takes some 2 ms. With 10,000 clients, rules and partitions it would
look at a million, if those that were there before were not left out."""

FROZEN_GROWTH = 1_000_000
"""Objects frozen since all were looked at, some 150 MB, after which all are again, for 0.3 s or so:
what became garbage in a cycle after it was frozen stays until then."""

OLDEST_GENERATION = 2  # a collection of it is a full one

KEPT_BYTES = 16 << 20
"""So much may be freed before the system gets it back, which takes 0.3 ms for each MiB. Memory that
is taken again soon is cheaper if it stays."""

FREED_INTERVAL_S = 0.1
"""Between two looks at how much was freed: some thousand connections close in that time. A look
takes 0.2 ms."""


def spare_full_collections() -> None:
    """Collect garbage now; from now on leave out what a full collection has found in use.

    So no full collection takes long. What it has found is freed as ever when nothing refers to it
    any more, but a reference cycle of such objects only by `collect_frozen`: what comes and goes
    often has to be free of cycles, as tests/relay/test_freed.py shows of connections.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # of nothing: Python puts full ones off until a quarter of its last one is new
    gc.callbacks.append(_freeze_survivors)
    young, _, _ = gc.get_threshold()
    gc.set_threshold(young, MIDDLE_COLLECTION_AFTER, FULL_COLLECTION_AFTER)


def collect_frozen(frozen_before: int, growth: int = FROZEN_GROWTH) -> int:
    """Collect all garbage if `growth` objects were frozen since there were `frozen_before`.

    Return how many there were when all were looked at last.
    """
    frozen = gc.get_freeze_count()
    if frozen - frozen_before < growth:
        return min(frozen, frozen_before)
    gc.unfreeze()
    gc.collect()
    return gc.get_freeze_count()


def _freeze_survivors(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop" and info["generation"] == OLDEST_GENERATION:
        gc.freeze()


class MemoryTrimmer:
    """Gives freed memory back to the system before it is so much that this takes long.

    By itself glibc gives back only what lies behind all that is in use: after a peak of connections
    next to nothing. A C library that is not glibc 2.33 or newer is left alone.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        if hasattr(library, "mallinfo2"):
            library.mallinfo2.restype = _Mallinfo2
        self._given_back_bytes = self._free_bytes()
        """So much at most of what is free now was given back, and not used since."""

    def give_back(self) -> None:
        """Give back what was freed, if it is much; call it every FREED_INTERVAL_S."""
        free_bytes = self._free_bytes()
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
