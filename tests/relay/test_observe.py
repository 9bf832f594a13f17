"""A client whose quota is not enforced: nothing of it waits, and its requests stay as they are."""

import pytest
from parts.sensor_views import sensors_in_use
from relaylab import frames
from relaylab.lab import open_lab, slow_client, turns, until

from metrics.clock import clock_ms
from proxy.quota.entities import QuotaKind
from proxy.quota.rules import QuotaManagerSettings, Rule

CONSUMER, PRODUCER, REQUEST, *_ = QuotaKind
RECORD_BYTES = 200_000
ASKED_BYTES = 50_000_000
MODES = pytest.mark.parametrize("holds", [True, False])

OBSERVED = Rule(
    client_id="test", bounds={CONSUMER: 1.0, PRODUCER: 1.0, REQUEST: 1e-9}, enforce=False
)


def above(lab) -> float:
    labels = {"quota_entity": "client-id=test", "quota": str(CONSUMER)}
    return lab.count("would_throttle_total", **labels)


@MODES
async def test_nothing_is_held_or_changed(holds):
    async with open_lab(rules=(OBSERVED,), holds=holds) as lab:
        client, broker = await lab.pair(frames.fetch_request(0, max_bytes=ASKED_BYTES))
        for number in range(1, 6):
            answer = frames.fetch_response(number - 1, RECORD_BYTES)
            await broker.send(answer)
            assert await client.frame() == answer
            request = frames.fetch_request(number, max_bytes=ASKED_BYTES)
            await client.send(request)
            assert await broker.frame() == request
        assert lab.held == 0
        assert above(lab) == 5
        assert lab.count("throttle_seconds_count", quota=str(CONSUMER)) == 0


@MODES
async def test_small_frames_are_measured_as_well(holds):
    rule = Rule(client_id="test", bounds={CONSUMER: 1.0}, enforce=False)
    async with open_lab(rules=(rule,), holds=holds) as lab:
        client, broker = await lab.pair(frames.fetch_request(0))
        for number in range(1, 6):
            answer = frames.fetch_response(number - 1, 50)
            await broker.send(answer)
            assert await client.frame() == answer
            await client.send(frames.fetch_request(number))
            await broker.frame()
        await turns()
        assert above(lab) == 5


@MODES
async def test_produce_without_acks_is_not_held(holds):
    async with open_lab(rules=(OBSERVED,), holds=holds) as lab:
        client, broker = await lab.pair(frames.produce_request(0, acks=0))
        for number in range(1, 20):
            request = frames.produce_request(number, acks=0)
            await client.send(request)
            assert await broker.frame() == request
        assert lab.held == 0


async def test_a_held_response_goes_out_once_its_quota_is_not_enforced():
    async with open_lab(rules=(slow_client(),)) as lab:
        client, broker = await lab.pair(frames.fetch_request(0))
        answer = frames.fetch_response(0, RECORD_BYTES)
        await broker.send(answer)
        await until(lambda: lab.held)
        lab.services.quotas.update(QuotaManagerSettings(rules=(slow_client(),), enforce=False))
        assert await client.frame() == answer
        assert lab.held == 0


@MODES
async def test_a_request_at_the_gate_is_sent_on_once_its_quota_is_not_enforced(holds):
    async with open_lab(rules=(slow_client(),), holds=holds) as lab:
        _, broker = await lab.pair(frames.fetch_request(0))
        await broker.send(frames.fetch_response(0, RECORD_BYTES))
        other = await lab.client()
        waiting = frames.fetch_request(1, max_bytes=ASKED_BYTES)
        await until(lambda: any(row.owed_ms for row in rows(lab)))
        await other.send(waiting)
        await until(lambda: any(row.waiting for row in rows(lab)))
        lab.services.quotas.update(QuotaManagerSettings(rules=(slow_client(),), enforce=False))
        second = await lab.broker()
        assert await second.frame() == waiting


async def test_it_is_held_once_its_quota_is_enforced():
    async with open_lab(rules=(OBSERVED,)) as lab:
        client, broker = await lab.pair(frames.fetch_request(0))
        answer = frames.fetch_response(0, RECORD_BYTES)
        await broker.send(answer)
        assert await client.frame() == answer
        await client.send(frames.fetch_request(1))
        await broker.frame()
        lab.services.quotas.update(QuotaManagerSettings(rules=(slow_client(),)))
        await broker.send(frames.fetch_response(1, RECORD_BYTES))
        await until(lambda: lab.held)
        assert client.unread == b""


def rows(lab):
    return list(sensors_in_use(lab.services.quotas, clock_ms))
