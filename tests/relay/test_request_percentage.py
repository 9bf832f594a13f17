"""Which time counts for request_percentage, and what happens when it is used up."""

from struct import pack

import pytest
from parts.sensor_views import sensors_in_use
from relaylab import frames
from relaylab.lab import Lab, open_lab, turns, until
from test_shown_fetch import ShowingInterceptor

from metrics.clock import MS_PER_SECOND, clock_ms
from proxy.quota.busy import FIRST_USUAL_MS
from proxy.quota.entities import BUSY_MS_PER_PERCENT, QuotaKind
from proxy.quota.rules import QuotaManagerSettings, Rule
from proxy.relay.abandoned import MAX_ABANDONED

LONG_WAIT_MS = 60_000
TOOK_MS = 400.0


def bounded(percent: float) -> tuple[Rule, ...]:
    return (Rule(client_id="test", bounds={QuotaKind.REQUEST_PERCENTAGE: percent}),)


LOG_END = 10
"""High watermark of `frames.fetch_partitions`."""


def batch(end_offset: int, size: int) -> bytes:
    """A record batch of so many bytes, whose last offset is the one before `end_offset`."""
    return pack(">qi4xb6xi", 0, size - 12, 2, end_offset - 1) + bytes(size - 27)


def batches(count: int, size: int) -> bytes:
    """So many of them, the last of which ends at this offset."""
    return b"".join(batch(number + 1, size) for number in range(count))


@pytest.mark.parametrize(
    ("records", "counts"),
    [
        pytest.param([b""], False, id="no data"),
        pytest.param([batch(LOG_END, 100)], False, id="one batch, to the log end"),
        pytest.param([batches(LOG_END, 16_000)], False, id="many batches, to the log end"),
        pytest.param([batch(LOG_END, 150_000)], False, id="a large batch, to the log end"),
        pytest.param([batch(1, 100)], True, id="one batch, and there are more"),
        pytest.param([batches(6, 16_000)], True, id="many batches, and there are more"),
        pytest.param([batch(1, 150_000)], True, id="a large batch, and there are more"),
        pytest.param([batches(LOG_END, 16_000)[:-1]], True, id="the last batch cut off"),
        pytest.param([batch(LOG_END, 16_000)[:5000]], True, id="the only batch cut off"),
        pytest.param([batch(LOG_END, 90_000), b"", batch(5, 200)], True, id="the last of three"),
    ],
)
@pytest.mark.parametrize("is_shown", [False, True], ids=["", "followed"])
async def test_all_time_of_a_fetch_counts_that_leaves_data_behind(records, counts, is_shown):
    log = []
    async with open_lab(rules=bounded(1e6)) as lab:
        if is_shown:
            lab.services.interceptor = lambda *_: ShowingInterceptor(log)
        asked = frames.fetch_request(1, version=15, max_bytes=1 << 20, max_wait_ms=LONG_WAIT_MS)
        client, broker = await lab.pair(asked)
        (connection,) = lab.relay.connections
        connection.in_flight[0].sent_ms -= TOOK_MS
        sent = frames.fetch_partitions(1, records)
        await broker.send(*frames.in_pieces(sent, (0.3, 0.31, 0.7), (40, 20)))
        assert await client.frame() == sent
        await until(lambda: not connection.responses.mid_frame)
        (row,) = sensors_in_use(lab.services.quotas, clock_ms)
        busy_ms = row.rate * row.window_ms / MS_PER_SECOND * BUSY_MS_PER_PERCENT
        assert busy_ms > 0.9 * TOOK_MS if counts else 0 < busy_ms <= 2 * FIRST_USUAL_MS
        shown = [what for _, what in log if isinstance(what, tuple)]
        assert shown == [(index, len(data)) for index, data in enumerate(records) if is_shown]


async def test_a_heartbeat_and_a_login_cost_no_time():
    async with open_lab(rules=bounded(1e6)) as lab:
        client, broker = await lab.pair(frames.metadata_request(1))
        await broker.send(frames.metadata_response(1, {}))
        await client.frame()
        before = next(sensors_in_use(lab.services.quotas, lambda: 0.0)).rate
        heartbeat = frames.request(12, 3, 2, bytes(20))
        await client.send(heartbeat)
        assert await broker.frame() == heartbeat
        await broker.send(frames.response(12, 3, 2, bytes(6)))
        await client.frame()
        assert next(sensors_in_use(lab.services.quotas, lambda: 0.0)).rate == before


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


async def test_requests_without_a_response_count_and_wait():
    async with open_lab(rules=bounded(1e-9)) as lab:
        first, second = (frames.produce_request(number, acks=0) for number in (1, 2))
        client, broker = await lab.pair(first)
        await client.send(second)
        await until(lambda: lab.held)
        await turns(50)
        assert not broker.unread
        (row,) = sensors_in_use(lab.services.quotas, clock_ms)
        assert row.rate * row.window_ms / MS_PER_SECOND * BUSY_MS_PER_PERCENT > 0.9 * FIRST_USUAL_MS
        lab.services.quotas.update(QuotaManagerSettings())
        assert await broker.frame() == second


def busy_ms_of(lab: Lab) -> float:
    rows = sensors_in_use(lab.services.quotas, clock_ms)
    return sum(row.rate * row.window_ms / MS_PER_SECOND * BUSY_MS_PER_PERCENT for row in rows)


@pytest.mark.parametrize("end", ["answer", "broker", "shutdown"])
@pytest.mark.parametrize("leaves", ["in order", "with a malformed request"])
async def test_who_leaves_before_the_answer_pays_for_what_the_broker_does(leaves, end):
    async with open_lab(rules=bounded(1e6)) as lab:
        client, broker = await lab.pair(frames.metadata_request(1))
        (connection,) = lab.relay.connections
        connection.in_flight[0].sent_ms -= TOOK_MS
        if leaves == "in order":
            await client.close()
        else:
            await client.send(pack(">i", -1))
        await until(lambda: not lab.relay.connected)
        assert not busy_ms_of(lab)
        if end == "answer":
            await broker.send(frames.metadata_response(1, {}))
        elif end == "broker":
            await broker.close()
        else:
            await lab.relay.close()
        await until(lambda: busy_ms_of(lab))
        assert busy_ms_of(lab) > 0.9 * TOOK_MS


async def test_of_many_that_leave_the_oldest_are_charged_as_they_stand():
    async with open_lab(rules=bounded(1e6)) as lab:
        for _ in range(MAX_ABANDONED + 1):
            assert not busy_ms_of(lab)
            client, _ = await lab.pair(frames.metadata_request(1))
            (connection,) = lab.relay.connections
            connection.in_flight[0].sent_ms -= TOOK_MS
            await client.close()
            await until(lambda: not lab.relay.connected)
        assert TOOK_MS * 0.9 < busy_ms_of(lab) < TOOK_MS * MAX_ABANDONED / 2


async def test_the_first_request_of_a_connection_waits_for_what_its_client_owes():
    """For one hold, as a response would: what is left may be owed."""
    async with open_lab(rules=bounded(1e-9)) as lab:
        client, broker = await lab.pair(frames.metadata_request(1))
        await client.close()
        await until(lambda: not lab.relay.connected)
        await broker.send(frames.metadata_response(1, {}))
        await until(lambda: busy_ms_of(lab))
        another = await lab.client()
        await another.send(frames.metadata_request(2))
        came = await lab.broker()
        await until(lambda: lab.held)
        await turns(50)
        assert not came.unread
        lab.services.reapers.release_all()
        assert await came.frame() == frames.metadata_request(2)
