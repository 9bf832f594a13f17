"""Where the time of a request goes is measured on all the ways that it can take."""

import asyncio
import math

import pytest
from prometheus_client import CollectorRegistry
from relaylab import frames
from relaylab.lab import fast_client, open_lab, slow_client, turns, until

from metrics import Instruments
from metrics.clock import clock_ms
from proxy.quota.rules import QuotaManagerSettings
from proxy.relay import timing
from proxy.relay.timing import SAMPLE_AFTER_MS, SAMPLE_EVERY, ApiTimes

BIG_BYTES = 300_000
PARTS = ("broker", "proxy", "hold")


def api_times(registry=None):
    return ApiTimes(Instruments(registry or CollectorRegistry(), max_label_sets=1), "Fetch")


def seconds(times):
    """The sums of the three parts."""
    return [round(getattr(times, part).total, 6) for part in PARTS]


def counted(lab, api):
    return {lab.count(f"{part}_seconds_count", api=api) for part in PARTS}


def test_the_parts_of_an_exchange():
    times = api_times()
    timed = times.begin(read_ms=1000.0, hold_ms=500.0, now_ms=1002.0)
    timed.on_response(1032.0, free_ms=0.0)
    timed.held(1033.0)
    timed.held(1500.0)  # for longer or shorter than thought
    timed.released(3033.0)
    timed.done(3037.0)
    timed.done(9999.0)
    assert seconds(times) == [0.03, 0.007, 2.5]


def test_a_response_behind_another_one_is_not_late():
    times = api_times()
    timed = times.begin(read_ms=0.0, hold_ms=0.0, now_ms=1.0)
    timed.on_response(5010.0, free_ms=5000.0)
    timed.done(5010.0)
    assert seconds(times) == [0.01, 0.001, 0.0]


def test_a_body_is_not_the_proxys_time():
    times = api_times()
    timed = times.begin(read_ms=0.0, hold_ms=0.0, now_ms=1.0)
    timed.sent_ms = 4001.0  # the request's body took so long
    timed.on_response(4011.0, free_ms=0.0)
    timed.came_whole(6011.0)  # a response that was collected
    timed.done(6013.0)
    assert seconds(times) == [2.01, 0.003, 0.0]


def test_who_is_told_to_wait_is_held():
    times = api_times()
    timed = times.begin(read_ms=0.0, hold_ms=0.0, now_ms=0.0)
    timed.on_response(1.0, free_ms=0.0)
    timed.hold_ms += 2000.0
    timed.done(1.0)
    assert seconds(times) == [0.001, 0.0, 2.0]


@pytest.fixture
def all_are_measured(monkeypatch):
    monkeypatch.setattr(timing, "SAMPLE_EVERY", 1)


@pytest.fixture
def time_does_not_matter(monkeypatch):
    monkeypatch.setattr(timing, "SAMPLE_AFTER_MS", math.inf)


async def test_one_in_so_many_is_measured(time_does_not_matter):
    async with open_lab() as lab:
        client, broker = await lab.pair(frames.fetch_request(0))
        for number in range(2 * SAMPLE_EVERY + 1):
            if number:
                await client.send(frames.fetch_request(number))
                await broker.frame()
            await broker.send(frames.fetch_response(number, 50))
            await client.frame()
        await turns()
        assert counted(lab, "Fetch") == {3.0}


def test_a_rare_one_is_measured_each_time():
    times = api_times()
    times.begin(read_ms=1000.0, hold_ms=0.0, now_ms=1000.0)
    assert times.due_ms == 1000.0 + SAMPLE_AFTER_MS
    assert times.left == SAMPLE_EVERY


@pytest.mark.parametrize("rules", [(), (fast_client(),)], ids=["unbounded", "bounded"])
async def test_each_way_is_measured_once(all_are_measured, rules):
    async with open_lab(rules=rules, lane=False) as lab:  # it measures one in SAMPLE_EVERY
        client, broker = await lab.pair(frames.fetch_request(0))
        asked = [
            frames.fetch_request(1),
            frames.fetch_request(2, version=15),
            frames.metadata_request(3),
            frames.produce_request(4, acks=1, record_bytes=BIG_BYTES),
            frames.request(frames.LIST_OFFSETS, 1, 5),
        ]
        answers = [
            frames.fetch_response(0, 10),
            frames.fetch_response(1, BIG_BYTES),
            frames.fetch_partitions(2, [bytes(100_000), b"x"]),
            frames.metadata_response(3, {7: ("real", 9092)}, 200_000),
            frames.response(0, 7, 4, b"stored"),
            frames.response(frames.LIST_OFFSETS, 1, 5, b"offsets"),
        ]
        sending = asyncio.create_task(client.send(b"".join(asked)))
        for _ in asked:
            await broker.frame()
        await sending
        sending = asyncio.create_task(broker.send(b"".join(answers)))
        for _ in answers:
            await client.frame()
        await sending
        await turns()
        names = ("Fetch", "Metadata", "Produce", "ListOffsets")
        assert [counted(lab, name) for name in names] == [{3.0}, {1.0}, {1.0}, {1.0}]


async def test_a_request_without_response_is_not_measured(all_are_measured):
    async with open_lab() as lab:
        await lab.pair(frames.produce_request(1, acks=0))
        await turns()
        assert counted(lab, "Produce") == {0.0}


async def test_a_hold_is_counted_as_one(all_are_measured, monkeypatch):
    async with open_lab(rules=(slow_client(),)) as lab:
        client, broker = await lab.pair(frames.fetch_request(1))
        await broker.send(frames.fetch_response(1, 10_000))
        await until(lambda: lab.held)
        assert counted(lab, "Fetch") == {0.0}
        monkeypatch.setattr("proxy.relay.responses.clock_ms", lambda: clock_ms() + 5000.0)
        lab.services.quotas.update(QuotaManagerSettings(rules=(fast_client(),)))
        await client.frame()
        await turns()
        assert lab.count("hold_seconds_sum", api="Fetch") >= 5.0
        assert lab.count("proxy_seconds_sum", api="Fetch") < 5.0


async def test_what_a_muted_client_is_told_is_counted_as_a_hold(all_are_measured):
    async with open_lab(rules=(slow_client(),), holds=False) as lab:
        client, broker = await lab.pair(frames.fetch_request(1))
        await broker.send(frames.fetch_response(1, 10_000))
        await client.frame()
        await turns()
        assert lab.count("hold_seconds_sum", api="Fetch") == 2.0
        lab.services.reapers.release_all()
