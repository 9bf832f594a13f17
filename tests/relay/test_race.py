"""Who wins a staggered race, and what becomes of the others."""

import asyncio
from collections.abc import Callable

import pytest
from relaylab.lab import LIMIT_S, turns

from proxy.cluster.dial import first_success


class Track:
    """Attempts that note what happens to them."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self.discarded: list[str] = []

    def attempt(
        self, name: str, outcome: Exception | None = None, *, ends: bool = True
    ) -> Callable:
        async def run() -> str:
            self.started.append(name)
            try:
                await (asyncio.sleep(0) if ends else asyncio.get_running_loop().create_future())
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            if outcome is not None:
                raise outcome
            return name

        return run

    async def race(self, *attempts: Callable) -> str:
        async with asyncio.timeout(LIMIT_S):
            return await first_success(attempts, self.discarded.append, OSError)


async def test_the_first_one_wins_and_nothing_else_is_started():
    track = Track()
    assert await track.race(track.attempt("a"), track.attempt("b")) == "a"
    assert track.started == ["a"]


async def test_after_a_failure_the_next_one_starts_at_once(monkeypatch):
    monkeypatch.setattr("proxy.cluster.dial.ATTEMPT_DELAY_S", 600.0)
    track = Track()
    assert await track.race(track.attempt("a", OSError()), track.attempt("b")) == "b"


async def test_a_silent_one_is_cancelled():
    track = Track()
    assert await track.race(track.attempt("a", ends=False), track.attempt("b")) == "b"
    await turns()
    assert track.cancelled == ["a"]


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
async def test_all_fail(names):
    track, errors = Track(), [OSError(name) for name in names]
    with pytest.raises(ExceptionGroup) as failure:
        await track.race(*(track.attempt(str(error), error) for error in errors))
    assert list(failure.value.exceptions) == errors


async def test_an_unexpected_error_ends_the_race(monkeypatch):
    monkeypatch.setattr("proxy.cluster.dial.ATTEMPT_DELAY_S", 0.0)
    track = Track()
    with pytest.raises(RuntimeError, match="broken"):
        await track.race(track.attempt("a", ends=False), track.attempt("b", RuntimeError("broken")))
    assert track.cancelled == ["a"]


async def test_what_comes_too_late_is_discarded():
    track, gate = Track(), asyncio.Event()

    async def stubborn() -> str:
        try:
            await gate.wait()
        except asyncio.CancelledError:
            return "late"
        return "never"

    assert await track.race(stubborn, track.attempt("b")) == "b"
    await turns()
    assert track.discarded == ["late"]


async def test_who_waits_is_cancelled():
    track = Track()
    race = asyncio.create_task(track.race(track.attempt("a", ends=False), track.attempt("b")))
    await turns()
    race.cancel()
    with pytest.raises(asyncio.CancelledError):
        await race
    assert track.cancelled == track.started == ["a"]
