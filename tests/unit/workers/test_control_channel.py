"""Calls between two ends of a real socket pair."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from proxy.workers.control_channel import (
    CALL_LENGTH,
    CallFailedError,
    ChannelLostError,
    ControlChannel,
    Handler,
)

LIMIT_S = 30.0
LARGE = "x" * 3_000_000


@asynccontextmanager
async def two_ends(
    here: Mapping[str, Handler], there: Mapping[str, Handler]
) -> AsyncIterator[tuple[ControlChannel, ControlChannel]]:
    ends = [ControlChannel(*each) for each in zip(socket.socketpair(), (here, there), strict=True)]
    for end in ends:
        await end.open()
    tasks = [asyncio.create_task(end.run()) for end in ends]
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()
        await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)


async def test_both_ends_call_each_other():
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    async with two_ends({"double": double}, {"name": lambda: "there"}) as (here, there):
        assert await here.call("name", LIMIT_S) == "there"
        calls = (there.call("double", LIMIT_S, number=number) for number in range(50))
        assert await asyncio.gather(*calls) == [2 * number for number in range(50)]


async def test_large_parameters_and_answers():
    async with two_ends({}, {"echo": lambda text: text}) as (here, _):
        assert await here.call("echo", LIMIT_S, text=LARGE) == LARGE


async def test_notices_come_in_their_order():
    heard: list[int] = []

    def hear(number: int) -> None:
        heard.append(number)

    async with two_ends({}, {"hear": hear, "done": lambda: None}) as (here, _):
        for number in range(100):
            here.notify("hear", number=number)
        await here.call("done", LIMIT_S)
    assert heard == list(range(100))


async def test_a_failure_is_told_in_words():
    def fail() -> None:
        raise ValueError("there is none; write one")

    async with two_ends({}, {"fail": fail}) as (here, _):
        with pytest.raises(CallFailedError, match="there is none; write one"):
            await here.call("fail", LIMIT_S)
        with pytest.raises(CallFailedError, match="unknown"):
            await here.call("unknown", LIMIT_S)


async def test_an_answer_that_comes_too_late_is_dropped():
    release = asyncio.Event()

    async def wait() -> str:
        await release.wait()
        return "late"

    async with two_ends({}, {"wait": wait, "name": lambda: "there"}) as (here, _):
        with pytest.raises(TimeoutError):
            await here.call("wait", 0)
        release.set()
        assert await here.call("name", LIMIT_S) == "there"


async def test_who_waits_is_told_that_the_other_end_is_lost():
    async with two_ends({}, {"wait": asyncio.Event().wait}) as (here, there):
        waiting = asyncio.create_task(here.call("wait", LIMIT_S))
        await asyncio.sleep(0)
        there.close()
        with pytest.raises(ChannelLostError):
            await waiting
        here.notify("anything")  # nobody hears it
        with pytest.raises(ChannelLostError):
            await here.call("anything", LIMIT_S)


@pytest.mark.parametrize(
    "junk", [b"\xff\xff\xff\xff", CALL_LENGTH.pack(3) + b"{}}", CALL_LENGTH.pack(2) + b"{}"]
)
async def test_what_is_no_frame_ends_the_channel(junk: bytes):
    one, other = socket.socketpair()
    channel = ControlChannel(one, {})
    await channel.open()
    with other:
        other.sendall(junk)
        await asyncio.wait_for(channel.run(), LIMIT_S)
        assert other.recv(1) == b""
