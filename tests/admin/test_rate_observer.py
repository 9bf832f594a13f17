"""What becomes of observed rates when the proxy starts, stops, or cannot write."""

import asyncio
from contextlib import suppress

from admin_world import MIB, Disk
from structlog.testing import capture_logs

from proxy.admin.rates.observed_rates import RATES_FORMAT, ObservedRates
from proxy.slices import Slices
from proxy.state import Record, StateError

LIMIT_S = 20.0
KEY = ("default", "", "etl", "Fetch")


class Counted:
    value = 0.0


class ObserverWorld:
    """A proxy's observer and its store; time goes on by ten seconds with each sample."""

    def __init__(self, store: Disk | None = None) -> None:
        self.counters = {KEY: Counted()}
        self.store = store or Disk()
        self.now_ms = 0.0
        self.sampled = asyncio.Event()
        self.rates = ObservedRates(self.counters, 10, clock_ms=self.clock_ms, slices=Slices())
        self.rates.use(self.store)

    def clock_ms(self) -> float:
        self.sampled.set()
        self.now_ms += 10_000.0
        return self.now_ms

    async def run(self) -> None:
        """Run until the first sample is taken."""
        self._task = asyncio.create_task(self.rates.run())
        async with asyncio.timeout(LIMIT_S):
            await self.sampled.wait()

    async def stop(self) -> None:
        await self.rates.close()
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    def move(self, now_s: float) -> None:
        self.counters[KEY].value += MIB
        for _ in self.rates.sample(self.clock_ms(), now_s):
            pass


async def test_what_was_seen_is_written_at_the_end_and_read_at_the_start():
    world = ObserverWorld()
    await world.run()
    hours = 300
    for hour in range(hours):
        world.move(1e12 + hour * 3600)  # far ahead: none is too old when it is read
    await world.stop()
    kept = len(world.store.items(RATES_FORMAT.prefix))
    assert 0 < kept == sum(map(len, world.rates.hours.values())) < hours
    later = ObserverWorld(world.store)
    await later.run()
    assert later.rates.hours == world.rates.hours
    await later.stop()


async def test_what_is_read_by_one_that_begins_and_keeps_at_once_counts_once():
    world = ObserverWorld()
    await world.run()
    for _ in range(2):
        world.move(1e12)
    await world.stop()
    later = ObserverWorld(world.store)
    await asyncio.gather(later.rates.keep(keeps=True), later.run())
    assert later.rates.hours == world.rates.hours
    await later.rates.keep(keeps=False)
    assert not later.rates.hours
    await later.rates.keep(keeps=True)
    assert later.rates.hours == world.rates.hours
    await later.stop()


async def test_who_cannot_write_goes_on():
    world = ObserverWorld()
    await world.run()
    world.move(1e12)
    world.store.is_full = True
    with capture_logs() as logs:
        await world.stop()
    assert [line["event"] for line in logs] == ["observed rates not kept, trying again"]
    assert world.rates.journal


async def test_who_cannot_read_observes_all_the_same():
    class Broken(Disk):
        def items(self, prefix: str) -> list[Record]:  # noqa: ARG002
            raise StateError("the disk is gone", "find it")

    world = ObserverWorld(Broken())
    with capture_logs() as logs:
        await world.run()
        world.move(1e12)
        await world.stop()
    assert [line["event"] for line in logs] == ["observed rates are neither read nor kept"]
    assert len(list(world.rates.since(0))) == 1


async def test_a_damaged_record_is_said():
    world = ObserverWorld()
    world.store.put_many([Record("rates/x", "{}", 1)])
    with capture_logs() as logs:
        await world.run()
        await world.stop()
    assert [line["event"] for line in logs] == ["observed rates not taken up"]
