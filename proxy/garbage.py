"""Sets up Python's garbage collector so that no collection holds the event loop for long."""

import gc
from collections.abc import Mapping

MIDDLE_COLLECTION_AFTER, FULL_COLLECTION_AFTER = 5, 1
"""Collections of younger objects between two of Python's garbage collector: a full one looks at
some 8,000 objects then, which takes some 2 ms. With 10,000 clients, rules and partitions it would
look at a million, if those that were there before were not left out."""

FROZEN_GROWTH = 1_000_000
"""Objects frozen since all were looked at, some 150 MB, after which all are again, for 0.3 s or so:
what became garbage in a cycle after it was frozen stays until then."""

OLDEST_GENERATION = 2  # a collection of it is a full one


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
