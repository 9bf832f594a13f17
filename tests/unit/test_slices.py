"""Long walks are taken in slices, of which each round of the event loop has one."""

import asyncio
from itertools import pairwise

from proxy.slices import TimeSlicer


async def test_nothing_is_lost_and_the_order_is_kept():
    for slice_s in (0.0, 60.0):
        assert await TimeSlicer(slice_s).collect(iter(range(1000))) == list(range(1000))
    assert await TimeSlicer().collect(()) == []


async def test_others_have_a_round_between_two_slices():
    rounds = 0

    async def go_round():
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(go_round())
    seen = await TimeSlicer(0.0).collect(rounds for _ in range(100))
    task.cancel()
    assert all(after > before for before, after in pairwise(seen[1:]))


async def test_walks_take_turns_and_only_one_is_on_in_a_round():
    slices, taken = TimeSlicer(0.0), []

    def walk(name):
        for _ in range(20):
            taken.append(name)
            yield

    await asyncio.gather(*(slices.collect(walk(name)) for name in "abc"))
    assert taken == [*"abc"] * 20


async def test_a_walk_that_fails_or_is_cancelled_lets_the_others_go_on():
    slices = TimeSlicer(0.0)

    def broken():
        yield 1
        raise ValueError("broken")

    cancelled = asyncio.create_task(slices.collect(range(1000)))
    failed = asyncio.create_task(slices.collect(broken()))
    going_on = asyncio.create_task(slices.collect(range(100)))
    await asyncio.sleep(0)
    cancelled.cancel()
    outcomes = await asyncio.gather(cancelled, failed, going_on, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert isinstance(outcomes[1], ValueError)
    assert outcomes[2] == list(range(100))
