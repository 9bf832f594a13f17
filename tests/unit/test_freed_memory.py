"""What was freed is given back to the system when it is much, and only once."""

import ctypes
import sys
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace

import pytest

from proxy.garbage import FREED_AFTER_S, KEPT_BYTES, MemoryTrimmer

LITTLE_BYTES = KEPT_BYTES // 4


def busy() -> Callable[[], float]:
    """CPU time of a process that is busy between each two looks."""
    return map((2 * FREED_AFTER_S).__mul__, count()).__next__


class Heap:
    """What a C library has of memory that is not in use, and how much of it was given back."""

    def __init__(self) -> None:
        self.free_bytes = LITTLE_BYTES
        self.top_bytes = 0
        """What leaves the heap, as it lies behind all that is in use."""
        self.trims = 0
        self.mallinfo2 = lambda: SimpleNamespace(fordblks=self.free_bytes)

    def malloc_trim(self, _pad: ctypes.c_size_t) -> None:
        self.trims += 1
        self.free_bytes -= self.top_bytes
        self.top_bytes = 0


class Glibc:
    """The heap of this process; knows how often it was given back."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.mallinfo2 = library.mallinfo2
        self._trim = library.malloc_trim
        self.trims = 0

    def malloc_trim(self, pad: ctypes.c_size_t) -> int:
        self.trims += 1
        return self._trim(pad)

    @property
    def free_bytes(self) -> int:
        return self.mallinfo2().fordblks


@pytest.fixture
def heap():
    return Heap()


@pytest.fixture
def memory(heap):
    return MemoryTrimmer(heap, busy())


def trims_after(heap, memory, changes):
    """How often it was given back, by the end of each change of what is free."""
    found = []
    for change_bytes in changes:
        heap.free_bytes += change_bytes
        memory.give_back()
        found.append(heap.trims)
    return found


@pytest.mark.parametrize(
    ("changes", "trims"),
    [
        ([0, LITTLE_BYTES, LITTLE_BYTES, 0], [0, 0, 0, 0]),
        ([KEPT_BYTES, 0, 0], [1, 1, 1]),
        ([LITTLE_BYTES] * 8, [0, 0, 0, 1, 1, 1, 1, 2]),
        ([KEPT_BYTES, -KEPT_BYTES, KEPT_BYTES], [1, 1, 2]),  # it was in use again
        ([KEPT_BYTES, -LITTLE_BYTES, LITTLE_BYTES], [1, 1, 1]),
    ],
    ids=["little", "much", "little by little", "again", "a part again"],
)
def test_it_is_given_back_when_it_is_much(heap, memory, changes, trims):
    assert trims_after(heap, memory, changes) == trims


def test_what_has_left_the_heap_counts_no_more(heap, memory):
    heap.top_bytes = KEPT_BYTES
    assert trims_after(heap, memory, [KEPT_BYTES, LITTLE_BYTES, KEPT_BYTES]) == [1, 1, 2]


def test_another_c_library_is_left_alone():
    MemoryTrimmer(object(), busy()).give_back()


def test_who_rests_does_not_look(heap):
    cpu_s = 1.0
    memory = MemoryTrimmer(heap, lambda: cpu_s)
    cpu_s += FREED_AFTER_S / 2
    assert trims_after(heap, memory, [KEPT_BYTES]) == [0]
    cpu_s += FREED_AFTER_S
    assert trims_after(heap, memory, [0]) == [1]


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_glibc_says_what_is_free_and_gives_it_back():
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("musl, or glibc before 2.33")
    heap = Glibc(library)
    memory = MemoryTrimmer(heap, busy())
    blocks = [bytearray(LITTLE_BYTES // 256) for _ in range(256 * 16)]
    memory.give_back()  # what others had freed before is in use now
    before_bytes, before = heap.free_bytes, heap.trims
    del blocks[::2]
    assert heap.free_bytes - before_bytes >= KEPT_BYTES
    memory.give_back()
    memory.give_back()
    assert heap.trims == before + 1
