"""No full collection of garbage looks at much, however much there is."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from proxy.garbage import OLDEST_GENERATION, FrozenGarbage, spare_full_collections

MANY = 200_000
MOST_LOOKED_AT = 30_000


@pytest.fixture
def sizes() -> Iterator[list[int]]:
    """How many objects each full collection looks at from now on."""
    found: list[int] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == OLDEST_GENERATION:
            found.append(len(gc.get_objects()))

    thresholds, callbacks = gc.get_threshold(), gc.callbacks.copy()
    spare_full_collections()
    gc.callbacks.append(count)
    yield found
    gc.callbacks[:] = callbacks
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as it was before: what was collected of tests is left out


class Ring:
    """Refers to itself."""

    def __init__(self) -> None:
        self.ring = self


def test_full_collections_stay_small(sizes: list[int]) -> None:
    kept = [[number] for number in range(MANY)]
    assert len(sizes) > 1
    assert max(sizes) < MOST_LOOKED_AT
    assert len(gc.get_objects()) < MOST_LOOKED_AT < len(kept)


def test_garbage_of_cycles_is_still_collected(sizes: list[int]) -> None:
    ring = weakref.ref(Ring())
    kept = [[number] for number in range(MANY)]
    assert ring() is None
    assert kept
    assert sizes


def test_a_frozen_cycle_goes_when_much_was_frozen(sizes: list[int]) -> None:
    ring = Ring()
    gone = weakref.ref(ring)
    gc.collect()
    frozen = FrozenGarbage()
    del ring
    gc.collect()
    kept = [Ring() for _ in range(MANY)]
    gc.collect()
    before = gc.get_freeze_count()
    frozen.collect(growth=4 * MANY)
    assert gone() is not None
    # Half: other frozen objects, of tests before, may have been freed meanwhile.
    frozen.collect(growth=MANY // 2)
    assert gone() is None
    assert len(kept) <= gc.get_freeze_count() < before
    ring = Ring()
    gone = weakref.ref(ring)
    gc.collect()
    del ring
    frozen.collect(growth=MANY // 2)  # counted from then on
    assert gone() is not None
    assert kept


def test_what_is_left_out_is_counted_when_there_can_be_much(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, counts = FrozenGarbage(), list[int]()
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(count()) or counts[-1])
    start = count()
    frozen.collect(growth=MANY)
    assert not counts
    kept = [[number] for number in range(MANY)]
    frozen.collect(growth=MANY)
    assert kept
    assert counts
    assert max(sizes) * len(sizes) >= count() - start
