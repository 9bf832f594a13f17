"""Which time counts for request_percentage, and what happens when it is used up."""

import pytest
from relaylab import frames
from relaylab.lab import open_lab, turns, until

from metrics.clock import clock_ms
from proxy.quota.entities import QuotaKind
from proxy.quota.rules import Rule

LONG_WAIT_MS = 60_000
ASKED_BYTES = 10_000


def bounded(percent: float) -> tuple[Rule, ...]:
    return (Rule(client_id="test", bounds={QuotaKind.REQUEST_PERCENTAGE: percent}),)


def measured(lab) -> float:
    (row,) = filter(None, lab.services.quotas.rows(clock_ms))
    return row.rate


@pytest.mark.parametrize(
    ("answer_bytes", "counts"),
    [
        pytest.param(ASKED_BYTES, True, id="a full answer: the broker did not wait"),
        pytest.param(ASKED_BYTES // 2, True, id="half of what was asked for"),
        pytest.param(100, False, id="a small answer: it may have waited for data"),
    ],
)
async def test_a_fetch_counts_when_its_answer_shows_that_there_was_data(answer_bytes, counts):
    async with open_lab(rules=bounded(1e6)) as lab:
        asked = frames.fetch_request(1, max_bytes=ASKED_BYTES, max_wait_ms=LONG_WAIT_MS)
        client, broker = await lab.pair(asked)
        await broker.send(frames.fetch_response(1, answer_bytes))
        await client.frame()
        assert (measured(lab) > 0) is counts


async def test_a_heartbeat_and_a_login_cost_no_time():
    async with open_lab(rules=bounded(1e6)) as lab:
        client, broker = await lab.pair(frames.metadata_request(1))
        await broker.send(frames.metadata_response(1, {}))
        await client.frame()
        before = next(filter(None, lab.services.quotas.rows(lambda: 0.0))).rate
        heartbeat = frames.request(12, 3, 2, bytes(20))
        await client.send(heartbeat)
        assert await broker.frame() == heartbeat
        await broker.send(frames.response(12, 3, 2, bytes(6)))
        await client.frame()
        assert next(filter(None, lab.services.quotas.rows(lambda: 0.0))).rate == before


async def test_who_is_over_the_bound_has_one_request_under_way():
    async with open_lab(rules=bounded(1e-9)) as lab:
        client, broker = await lab.pair(frames.metadata_request(1))
        await broker.send(frames.metadata_response(1, {}))
        await until(lambda: lab.held)
        await client.send(frames.metadata_request(2) + frames.metadata_request(3))
        await turns(50)
        assert not broker.unread
        lab.services.reapers.release_all()
        assert await client.frame() == frames.metadata_response(1, {})
