"""Calls that hang are given up, and nothing else hangs with them."""

import asyncio
import threading
from contextlib import suppress

import pytest

from proxy.config.reload import TimeLimitedThread

LONG_S = 30.0
SHORT_S = 0.01


async def test_what_a_call_returns_or_raises():
    thread = TimeLimitedThread()
    assert await thread.call(lambda: 7, LONG_S) == 7
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 // 0, LONG_S)
    assert await thread.call(threading.current_thread, LONG_S) is not threading.main_thread()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_call_that_hangs_is_given_up_and_no_other_begun(fails):
    thread, goes_on, begun = TimeLimitedThread(), threading.Event(), []

    def hang() -> None:
        begun.append("hang")
        goes_on.wait(LONG_S)
        if fails:
            raise OSError("it was gone")

    for call in (hang, lambda: begun.append("late")):
        with pytest.raises(TimeoutError):
            await thread.call(call, SHORT_S)
    assert begun == ["hang"]
    goes_on.set()
    async with asyncio.timeout(LONG_S):
        while begun == ["hang"]:
            with suppress(TimeoutError):
                await thread.call(lambda: begun.append("next"), LONG_S)
            await asyncio.sleep(SHORT_S)
    assert begun == ["hang", "next"]


async def test_a_call_without_room_for_a_thread_is_given_up(monkeypatch: pytest.MonkeyPatch):
    thread = TimeLimitedThread()
    with monkeypatch.context() as full:
        full.setattr(threading, "_start_new_thread", refuse)
        with pytest.raises(TimeoutError):
            await thread.call(lambda: 7, LONG_S)
    assert await thread.call(lambda: 7, LONG_S) == 7


def refuse(*_):
    raise RuntimeError("can't start new thread")


async def test_its_thread_keeps_no_process_from_its_end():
    thread = TimeLimitedThread()
    assert await thread.call(lambda: threading.current_thread().daemon, LONG_S)
