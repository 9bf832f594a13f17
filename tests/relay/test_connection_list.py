"""What the relay says of its connections, and what becomes of one that an operator closes."""

import pytest
from relaylab.frames import fetch_request, fetch_response, produce_request
from relaylab.lab import LISTENER, LOCALHOST, fast_client, open_lab, slow_client, until

from metrics.clock import clock_ms
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.rules import Budget, Rule, Share
from proxy.relay.channel import TRAFFIC_INTERVAL_MS, ConnectionRates

CONSUMER, PRODUCER = QuotaKind.CONSUMER_BYTE_RATE, QuotaKind.PRODUCER_BYTE_RATE
RESPONSE_BYTES = 100_000


def rows(lab):
    return sorted(lab.relay.list.rows(), key=lambda row: row.number)


def measure(lab, after_ms=TRAFFIC_INTERVAL_MS):
    return len(list(lab.relay.list.measuring(clock_ms() + after_ms)))


async def test_a_row_says_whose_a_connection_is_and_what_it_waits_for():
    async with open_lab() as lab:
        silent = await lab.client()
        await until(lambda: lab.relay.connections)
        client, broker = await lab.pair(fetch_request(1, client_id="etl"))
        new, fetching = rows(lab)
        assert (new.state, new.client_id, new.broker, new.in_flight) == ("new", None, None, 0)
        assert new.port == silent.writer.get_extra_info("sockname")[1]
        assert (fetching.ip, fetching.listener, fetching.user) == (LOCALHOST, LISTENER, None)
        assert (fetching.client_id, fetching.node_id, fetching.state) == ("etl", None, "open")
        assert fetching.port == client.writer.get_extra_info("sockname")[1]
        assert fetching.broker == "{}:{}".format(*broker.writer.get_extra_info("sockname"))
        assert (fetching.in_flight, fetching.hold) == (1, None)
        assert new.number < fetching.number


async def test_rates_are_what_the_kernel_has_counted():
    async with open_lab() as lab:
        client, broker = await lab.pair(fetch_request(1, client_id="etl"))
        assert lab.relay.list.client_rates == {}
        (row,) = rows(lab)
        assert (row.received_rate, row.sent_rate, row.rate) == (None, None, 0.0)
        assert measure(lab, 0.0) == 0
        answer = fetch_response(1, RESPONSE_BYTES)
        await broker.send(answer)
        assert await client.frame() == answer

        def is_acknowledged():
            (connection,) = lab.relay.connections
            traffic = ConnectionRates(0.0)
            traffic.measure(connection.channel.sock, 1000.0)
            assert traffic.received_rate == len(fetch_request(1, client_id="etl"))
            assert traffic.exchange_rate <= 1
            return traffic.sent_rate == len(answer)

        await until(is_acknowledged)
        assert measure(lab) == 1
        (row,) = rows(lab)
        most = len(answer) / ((clock_ms() - row.began_ms) / 1000)
        assert row.sent_rate > most * 0.9
        assert measure(lab) == 0
        rates = lab.relay.list.client_rates
        assert set(rates) == {ClientIdentity(LISTENER, None, "etl")}
        assert lab.relay.list.client_exchanges[ClientIdentity(LISTENER, None, "etl")] > 0


@pytest.mark.parametrize("holds", [True, False])
async def test_a_held_client_is_shown_with_its_quota_and_the_end(holds):
    async with open_lab(rules=(slow_client(),), holds=holds) as lab:
        client, broker = await lab.pair(fetch_request(1))
        answer = fetch_response(1, RESPONSE_BYTES)
        await broker.send(answer)
        await until(lambda: lab.held)
        if not holds:
            await client.frame()
        (row,) = rows(lab)
        where = "delay_queue" if holds else "muted"
        assert (row.hold.where, row.hold.kind, row.hold.entity) == (
            where,
            CONSUMER,
            "client-id=test",
        )
        assert row.hold.rule is lab.services.quotas.table.rules[0]
        assert row.hold.until_ms > clock_ms()


async def test_one_that_waits_at_the_gate_is_shown_with_the_quota():
    async with open_lab(rules=(slow_client(kind=PRODUCER),)) as lab:
        client, _ = await lab.pair(produce_request(1, acks=0))
        for number in range(2, 5):
            await client.send(produce_request(number, acks=0))
        await until(lambda: rows(lab)[0].hold)
        (row,) = rows(lab)
        assert (row.hold.where, row.hold.kind) == ("gate", PRODUCER)
        assert row.hold.entity == "client-id=test"
        assert row.hold.until_ms > clock_ms()


async def test_one_that_waits_in_a_budget_is_shown_with_that():
    budget = Budget(name="all", bounds={PRODUCER: 1.0})
    rule = Rule(client_id="test", bounds={}, share=Share(budget))
    async with open_lab(rules=(rule,)) as lab:
        client, _ = await lab.pair(produce_request(1, acks=0))
        await client.send(produce_request(2, acks=0))
        await until(lambda: rows(lab)[0].hold)
        (row,) = rows(lab)
        assert (row.hold.where, row.hold.kind) == ("gate", PRODUCER)
        assert (row.hold.entity, row.hold.rule) == ("budget=all", budget)


async def test_one_that_an_operator_closes_ends_on_both_sides_and_owes_what_is_under_way():
    async with open_lab(rules=(fast_client(),)) as lab:
        client, broker = await lab.pair(fetch_request(1))
        (row,) = rows(lab)
        assert lab.relay.list.close(row.number + 1) is None
        assert lab.relay.list.close(row.number).client_id == "test"
        assert await client.ended() == b""
        assert await broker.ended() == b""
        assert rows(lab) == []
        assert lab.relay.list.close(row.number) is None
        ((_, measured),) = lab.services.quotas.measured_rates(clock_ms)
        assert measured > 0


async def test_one_that_closes_during_a_walk_is_left_out():
    async with open_lab() as lab:
        clients = [await lab.pair(fetch_request(1)) for _ in range(3)]
        steps = lab.relay.list.rows()
        first = next(steps)
        for connection in tuple(lab.relay.connections):
            if connection.number != first.number:
                connection.close("test")
        assert list(steps) == []
        assert len(clients) == 3
