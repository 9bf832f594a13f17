"""A pause lets go at once whatever waits for a quota, and nothing else, on real sockets."""

from contextlib import asynccontextmanager

import pytest
from parts.sensor_views import sensors_in_use
from relaylab import frames
from relaylab.lab import open_lab, slow_client, turns, until

from metrics.clock import clock_ms
from proxy.quota.entities import CONNECTION_RATE, DEFAULT
from proxy.quota.rule_registry import RuleRegistry
from proxy.quota.rules import QuotaManagerSettings, QuotaPause, Rule
from proxy.relay.lifecycle import ReadPauseReason
from proxy.state import MemoryStore

RECORD_BYTES = 200_000
ROUNDS = 5
"""Of the event loop: one in which connections follow, one for a timer, and what they bring."""

ALL_PAUSED = QuotaPause({}, 2e9)
MODES = pytest.mark.parametrize("holds", [True, False])
MANY = 120


@asynccontextmanager
async def lab_with_rules(*rules: Rule, holds: bool = True):
    async with open_lab(rules=rules, holds=holds) as lab:
        settings = QuotaManagerSettings(rules=rules)
        yield lab, RuleRegistry(lab.services.quotas, MemoryStore(), settings)


async def test_held_responses_go_and_those_of_others_stay():
    async with lab_with_rules(slow_client(), slow_client("other")) as (lab, registry):
        answer = frames.fetch_response(0, RECORD_BYTES)
        pairs = [
            await lab.pair(frames.fetch_request(0, client_id=name)) for name in ("test", "other")
        ]
        for number, (_, broker) in enumerate(pairs, 1):
            await broker.send(answer)
            await until(lambda number=number: lab.held == number)
        await registry.pause(QuotaPause({"client-id": "test"}, 2e9))
        await turns(ROUNDS)
        assert lab.held == 1
        assert await pairs[0][0].frame() == answer
        await turns(ROUNDS)
        assert (lab.held, pairs[1][0].unread) == (1, b"")


@MODES
async def test_requests_at_a_gate_are_sent_on(holds):
    async with lab_with_rules(slow_client(), holds=holds) as (lab, registry):
        _, broker = await lab.pair(frames.fetch_request(0))
        await broker.send(frames.fetch_response(0, RECORD_BYTES))
        await until(lambda: any(row.owed_ms for row in rows(lab)))
        waiting = [await lab.client() for _ in range(MANY)]
        for client in waiting:
            await client.send(frames.fetch_request(1))
        await until(lambda: sum(row.waiting for row in rows(lab)) == MANY)
        await registry.pause(ALL_PAUSED)
        for _ in waiting:
            assert await (await lab.broker()).frame() == frames.fetch_request(1)
        assert not any(row.waiting for row in rows(lab))


def rows(lab):
    return list(sensors_in_use(lab.services.quotas, clock_ms))


async def test_a_muted_client_is_read_from():
    async with lab_with_rules(slow_client(), holds=False) as (lab, registry):
        client, broker = await lab.pair(frames.fetch_request(0))
        await broker.send(frames.fetch_response(0, RECORD_BYTES))
        await client.frame()
        (connection,) = lab.relay.connections
        await until(lambda: ReadPauseReason.MUTED in connection.life.pauses)
        await registry.pause(ALL_PAUSED)
        await turns(ROUNDS)
        assert ReadPauseReason.MUTED not in connection.life.pauses
        await client.send(frames.fetch_request(1))
        assert await broker.frame() == frames.fetch_request(1)


async def test_a_connection_that_came_too_soon_is_served():
    rule = Rule(client_id=DEFAULT, bounds={CONNECTION_RATE: 0.1})
    async with lab_with_rules(rule) as (lab, registry):
        await lab.pair(frames.fetch_request(0))
        second = await lab.client()
        await second.send(frames.fetch_request(1))
        await until(lambda: lab.held)
        lab.relay.follow_changes()
        await turns(ROUNDS)
        assert lab.held, "nothing has changed"
        await registry.pause(ALL_PAUSED)
        await turns(ROUNDS)
        assert lab.held == 0
        assert await (await lab.broker()).frame() == frames.fetch_request(1)
