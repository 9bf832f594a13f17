"""Writes from the event loop: in order, and each caller told."""

import asyncio
import threading
from collections.abc import Iterable

import pytest

from proxy.state import MemoryStore, ProbedStore, Record, StateError


class Gated(MemoryStore):
    """A store whose writes wait until they are let through, and can be made to fail."""

    def __init__(self):
        super().__init__()
        self.begun = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.batches: list[int] = []
        self.error: Exception | None = None

    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> int:
        records, delete = list(records), list(delete)
        self.begun.release()
        assert self.gate.acquire(timeout=30)
        self.batches.append(len(records) + len(delete))
        if self.error is not None:
            raise self.error
        return super().put_many(records, delete=delete)

    def close(self):
        if self._records is not None:
            self.left = self.values()
        super().close()

    def values(self):
        return {item.key: item.value for item in self.items("")}


async def one_on_its_way(store, state):
    """Begin a write and wait until it is in the thread."""
    task = asyncio.create_task(state.write([Record.of("a/first", 0)]))
    await asyncio.to_thread(store.begun.acquire)
    return task


async def test_a_write_returns_when_it_is_done():
    store = MemoryStore()
    store.put("a/gone", 1)
    await store.write([Record.of("a/b", 1)], delete=["a/gone"])
    assert [item.key for item in store.items("")] == ["a/b"]


async def test_what_is_asked_for_meanwhile_is_written_in_order():
    store = Gated()
    first = await one_on_its_way(store, store)
    async with asyncio.TaskGroup() as group:
        for number in range(100):
            group.create_task(store.write([Record.of("a/x", number)]))
        group.create_task(store.write([Record.of("a/y", 1)], delete=["a/x"]))
        group.create_task(store.write([Record.of("a/z", 1)], delete=["a/y"]))
        group.create_task(store.write([Record.of("a/y", 2)], delete=["a/y"]))
        store.gate.release(104)
    await first
    assert store.batches == [1] * 101 + [2] * 3
    assert store.values() == {"a/first": 0, "a/y": 2, "a/z": 1}


async def test_a_failure_is_told_to_those_who_waited_and_the_next_write_goes_on():
    store = Gated()
    store.error = StateError("the disk is full", "make room")
    first = await one_on_its_way(store, store)
    store.gate.release()
    with pytest.raises(StateError, match="the disk is full"):
        await first
    store.error = None
    store.gate.release()
    await store.write([Record.of("a/b", 1)])
    assert store.values() == {"a/b": 1}


async def test_a_caller_that_is_cancelled_does_not_take_its_write_back():
    store = Gated()
    state = ProbedStore(store)
    first = await one_on_its_way(store, state)
    first.cancel()
    await asyncio.wait((first,))
    store.gate.release()
    await asyncio.to_thread(state.close)
    assert first.cancelled()
    assert store.left == {"a/first": 0}


async def test_close_writes_what_is_left_and_then_refuses():
    store = Gated()
    state = ProbedStore(store)
    first = await one_on_its_way(store, state)
    second = asyncio.create_task(state.write([Record.of("a/second", 1)]))
    await asyncio.sleep(0)
    store.gate.release(2)
    await asyncio.to_thread(state.close)
    await asyncio.to_thread(state.close)
    await first
    await second
    assert store.left == {"a/first": 0, "a/second": 1}
    store.gate.release()
    with pytest.raises(StateError, match="another proxy took it over"):
        await state.write([])
