"""When an interval begins and ends, whatever the clock of the day does, and at the end."""

from itertools import pairwise

import pytest
from parts.usage_world import UsageWorld, open_writer
from parts.virtual_time import VirtualTime

from proxy.slices import TimeSlicer
from proxy.usage.usage_meter import UsageRecorder

START_S = 1_790_000_000.0 // 3600 * 3600 + 12.5


class MeteringWorld(VirtualTime):
    """A process that meters; nothing is sent to the cluster."""

    def __init__(self, interval_s=60.0):
        self.epoch_s = START_S - self.now_ms / 1000
        self.usage = UsageWorld()
        self.usage.connect()
        self.writer, _ = open_writer()
        self.metering = UsageRecorder(
            self.usage.meter,
            self.writer,
            TimeSlicer(),
            member="host/0",
            interval_s=interval_s,
            clock_s=lambda: self.now_s,
            clock_ms=lambda: self.now_ms,
        )

    async def run(self, seconds, rate=0):
        for _ in range(int(seconds * 2)):
            self.usage.move(rate // 2)
            self.pass_ms(500)
            await self.metering.tick()

    def spans(self):
        found = []
        for each in self.writer.take():
            found.append((each.start_ms - START_S * 1000, each.end_ms - START_S * 1000))
        self.writer.written()
        return found


async def test_intervals_end_with_the_minute_and_cover_all_time():
    world = MeteringWorld()
    await world.run(130, 1000)
    records = list(world.writer.take())
    assert world.spans() == [(0, 47_500), (47_500, 107_500)]
    assert [sum(each.rates.values()) for each in records] == [4, 6]
    assert {each.epoch for each in records} == {START_S * 1000}
    assert [each.bytes for each in records] == [47_500, 60_000]
    await world.metering.close()
    (last,) = world.writer.take()
    assert (last.bytes, last.end_ms - START_S * 1000) == (22_500, 130_000)


@pytest.mark.parametrize("jump_s", [-7200, 7200])
async def test_a_clock_that_is_set_ends_no_interval_late_or_before_its_start(jump_s):
    world = MeteringWorld()
    await world.run(40, 1000)
    world.epoch_s += jump_s
    await world.run(140, 1000)
    spans = world.spans()
    assert len(spans) == 3
    assert all(start < end for start, end in spans)
    assert all(end <= (world.now_s - START_S) * 1000 for _, end in spans)
    assert all(after[0] == before[1] for before, after in pairwise(spans))


async def test_where_the_clock_was_ahead_the_next_interval_is_of_the_time_that_is():
    world = MeteringWorld()
    world.epoch_s += 7200
    await world.run(60, 1000)
    world.epoch_s -= 7200
    await world.run(120, 1000)
    first, *spans = world.spans()
    assert first[1] > 7200_000
    assert all(start < end <= (world.now_s - START_S) * 1000 for start, end in spans)
    assert all(after[0] == before[1] for before, after in pairwise(spans))


async def test_a_clock_that_is_before_1970_loses_no_bytes():
    world = MeteringWorld()
    world.epoch_s -= 2 * START_S
    await world.run(130, 1000)
    world.epoch_s += 2 * START_S
    await world.run(120, 1000)
    await world.metering.close()
    records = world.writer.take()
    assert sum(each.bytes for each in records) == 250_000
    assert len(records) == 4
    assert all(each.start_ms < each.end_ms for each in records)
