"""What a connection reads and writes of topics is charged to the rules that name them."""

import asyncio

import pytest
from parts.sensor_views import sensors_in_use
from relaylab import frames
from relaylab.lab import LIMIT_S, open_lab, turns, until
from relaylab.topic_frames import (
    BY_ID,
    ORDERS_ID,
    fetch,
    fetched,
    produce,
)

from metrics.clock import clock_ms
from proxy.quota.entities import QuotaKind
from proxy.quota.gate import GRANT_MS
from proxy.quota.rules import QuotaManagerSettings, Rule
from proxy.relay import paced_steps, pump
from proxy.relay.pump import COPY_BYTES, SPLICE_MIN_BYTES
from proxy.relay.requests import MAX_ASKED_BYTES, MAX_SEEN_BYTES
from proxy.relay.topic_traffic import MAX_ASKED_TOPICS
from proxy.wire.apis import PRODUCE
from proxy.wire.layout import STEP_ELEMENTS

CONSUMER, PRODUCER = QuotaKind.CONSUMER_BYTE_RATE, QuotaKind.PRODUCER_BYTE_RATE
BOUND = 1_000_000
SLOW = Rule(topic="orders", bounds={CONSUMER: 1.0, PRODUCER: 1.0})
"""What is over it waits for longer than a test runs."""
PLENTY = Rule(topic="orders", bounds={CONSUMER: 1e12, PRODUCER: 1e12})
INVALID_FETCH_SESSION_EPOCH = 71


def charged(lab, entity="topic=orders"):
    """How many bytes were charged: a new sensor's rate is that of ten seconds."""
    rows = {row.entity: row for row in sensors_in_use(lab.services.quotas, clock_ms)}
    row = rows.get(entity)
    return 0 if row is None else round(row.rate * row.window_ms / 1000)


def waits(lab):
    return sum(row.waiting for row in sensors_in_use(lab.services.quotas, clock_ms))


async def exchange(client, broker, request, response):
    """Send a request, and its response once the broker has got it; return what the client gets."""
    await client.send(request)
    got = await broker.frame()
    sending = asyncio.create_task(broker.send(response))
    answer = await client.frame()
    await sending
    return got, answer


@pytest.mark.parametrize("path", ["splice", "copy"])
@pytest.mark.parametrize("size", [1, 20_000, 3 * SPLICE_MIN_BYTES])
async def test_a_response_is_charged_for_the_bytes_of_the_topic_and_not_changed(path, size):
    async with open_lab(rules=(PLENTY,), splice=path == "splice") as lab:
        client, broker = await lab.pair(fetch(1, "orders", "clicks"))
        for number in (1, 2):
            response = fetched(number, {"clicks": 70_000, "orders": size})
            sending = asyncio.create_task(broker.send(response))
            assert await client.frame() == response
            await sending
            await until(lambda number=number: charged(lab) == number * size)
            await client.send(fetch(number + 1, epoch=number))
            await broker.frame()
        assert lab.count("topic_walks_total") == 2


async def test_a_client_that_no_rule_with_a_topic_is_for_is_not_walked():
    rule = Rule(client_id="other", topic="orders", bounds={CONSUMER: 1.0, PRODUCER: 1.0})
    async with open_lab(rules=(rule,)) as lab:
        client, broker = await lab.pair(fetch(1, "orders"))
        await broker.send(fetched(1, {"orders": 5000}))
        await client.frame()
        await exchange(client, broker, produce(2, {"orders": 50}), frames.response(PRODUCE, 9, 2))
        assert lab.count("topic_walks_total") == 0
        assert charged(lab) == 0


@pytest.mark.parametrize("connections", ["the same", "another"])
async def test_a_fetch_for_a_topic_that_owes_waits_and_others_do_not(connections):
    async with open_lab(rules=(SLOW,)) as lab, asyncio.timeout(LIMIT_S):
        client, broker = await lab.pair(fetch(1, "orders"))
        await broker.send(fetched(1, {"orders": 5000}))
        await client.frame()
        await until(lambda: charged(lab) == 5000)
        if connections == "the same":
            await client.send(fetch(2, "clicks", epoch=1, forgotten=["orders"]))
        else:
            client = await lab.client()
            await client.send(fetch(2, "clicks"))
            broker = await lab.broker()
        await broker.frame()
        await broker.send(fetched(2, {"clicks": 5000}))
        await client.frame()
        assert waits(lab) == 0
        await client.send(fetch(3, "orders", epoch=2))
        await until(lambda: waits(lab) == 1)
        holds = [row.hold for row in lab.relay.list.rows() if row.hold]
        assert [(hold.where, hold.entity, hold.rule) for hold in holds] == [
            ("gate", "topic=orders", SLOW)
        ]
        await turns()
        assert not broker.unread
        lab.services.quotas.update(QuotaManagerSettings())
        await broker.frame()


async def test_a_response_is_held_for_what_its_topics_owe():
    async with open_lab(rules=(SLOW,)) as lab, asyncio.timeout(LIMIT_S):
        pairs = [await lab.pair(fetch(1, "orders")) for _ in range(2)]
        for client, broker in pairs:
            await broker.send(fetched(1, {"orders": 5000}))
            if client is pairs[0][0]:
                await client.frame()
                await until(lambda: charged(lab) == 5000)
        await until(lambda: lab.held == 1)
        assert not pairs[1][0].unread
        lab.services.quotas.update(QuotaManagerSettings())
        for connection in lab.relay.connections:
            connection.follow_changes()
        assert await pairs[1][0].frame() == fetched(1, {"orders": 5000})


async def test_a_fetch_that_is_too_long_to_be_read_waits_for_what_its_responses_have_shown():
    async with open_lab(rules=(SLOW,)) as lab, asyncio.timeout(LIMIT_S):
        topics = [f"clicks-{number}" for number in range(2000)]
        long = fetch(1, *topics, "orders")
        assert len(long) > MAX_ASKED_BYTES
        client, broker = await lab.pair(fetch(1, "clicks"))
        await broker.send(fetched(1, {}))
        await client.frame()
        sending = asyncio.create_task(client.send(long))
        assert await broker.receive(len(long)) == long
        await sending
        await broker.send(fetched(1, {"orders": 5000}))
        await client.frame()
        await until(lambda: charged(lab) == 5000)
        await client.send(fetch(2, epoch=1))
        await until(lambda: waits(lab) == 1)


@pytest.mark.parametrize("epoch", [-1, 0], ids=["no session", "a session"])
async def test_behind_many_topics_a_fetch_waits_for_what_its_responses_have_shown(epoch):
    """Else who asks for others first would read what is bounded as fast as it can."""
    many = [f"t{number}" for number in range(MAX_ASKED_TOPICS)]
    async with open_lab(rules=(SLOW,)) as lab, asyncio.timeout(LIMIT_S):
        client, broker = await lab.pair(fetch(1, *many, "orders", epoch=epoch))
        await broker.send(fetched(1, {"orders": 5000}))
        await client.frame()
        await until(lambda: charged(lab) == 5000)
        again = fetch(2, *many, "orders", epoch=-1) if epoch < 0 else fetch(2, epoch=1)
        await client.send(again)
        await until(lambda: waits(lab) == 1)
        await turns()
        assert not broker.unread


MANY = [f"t{number}" for number in range(MAX_ASKED_TOPICS)]
LONG = [f"clicks-{number}" for number in range(2000)]


@pytest.mark.parametrize("rule", ["of the topic", "of a prefix"])
@pytest.mark.parametrize("before", [MANY, LONG], ids=["many", "too many to be read"])
async def test_a_new_connection_waits_for_a_topic_that_owes_behind_many_others(before, rule):
    """Else who connects anew for each Fetch would read it as fast as it can."""
    bounds = {CONSUMER: 1.0}
    prefix = Rule(topic_prefix="ord", bounds=bounds)
    rules = (Rule(topic="orders", bounds=bounds) if rule == "of the topic" else prefix,)
    async with open_lab(rules=rules) as lab, asyncio.timeout(LIMIT_S):
        client, broker = await lab.pair(fetch(1, "orders"))
        await broker.send(fetched(1, {"orders": 5000}))
        await client.frame()
        await until(lambda: charged(lab) == 5000)
        client = await lab.client()
        sending = asyncio.create_task(client.send(fetch(2, *before, "orders")))
        await until(lambda: waits(lab) == 1)
        lab.services.quotas.update(QuotaManagerSettings())
        await (await lab.broker()).frame()
        await sending


async def test_who_asks_for_many_topics_without_the_one_that_owes_does_not_wait():
    async with open_lab(rules=(SLOW,)) as lab, asyncio.timeout(LIMIT_S):
        client, broker = await lab.pair(fetch(1, "orders"))
        await broker.send(fetched(1, {"orders": 5000}))
        await client.frame()
        await until(lambda: charged(lab) == 5000)
        await lab.pair(fetch(2, *MANY, "clicks"))
        assert waits(lab) == 0


async def test_a_session_that_another_connection_has_begun_waits_for_all_that_owes():
    async with open_lab(rules=(SLOW,)) as lab, asyncio.timeout(LIMIT_S):
        client, broker = await lab.pair(fetch(1, "orders", epoch=0))
        await broker.send(fetched(1, {"orders": 5000}))
        await client.frame()
        await until(lambda: charged(lab) == 5000)
        await (await lab.client()).send(fetch(2, epoch=1))
        await until(lambda: waits(lab) == 1)


async def begun_session(lab):
    """Have a client begin a session for the topic, which owes then."""
    client, broker = await lab.pair(fetch(1, "orders", epoch=0))
    await broker.send(fetched(1, {"orders": 5000}))
    await client.frame()
    await until(lambda: charged(lab) == 5000)
    return client, broker


@pytest.mark.parametrize("epoch", [-1, 0], ids=["none", "another"])
async def test_a_session_that_another_fetch_did_not_end_waits_for_all_that_owes(epoch):
    """Else who asks for another topic in between reads it again as fast as it can."""
    async with open_lab(rules=(SLOW,)) as lab, asyncio.timeout(LIMIT_S):
        client, broker = await begun_session(lab)
        other = fetch(2, "clicks", epoch=epoch)
        await client.send(other + fetch(3, epoch=1))
        assert await broker.frame() == other
        await until(lambda: waits(lab) == 1)
        await turns()
        assert not broker.unread


@pytest.mark.parametrize("is_answered", [True, False])
async def test_what_a_broker_does_not_forget_is_waited_for(is_answered):
    """Who names a wrong epoch is refused, and has the session that it had."""
    async with open_lab(rules=(SLOW,)) as lab, asyncio.timeout(LIMIT_S):
        client, broker = await begun_session(lab)
        await client.send(fetch(2, epoch=9, forgotten=["orders"]))
        await broker.frame()
        if is_answered:
            await broker.send(fetched(2, {}, error_code=INVALID_FETCH_SESSION_EPOCH))
            await client.frame()
        await client.send(fetch(3, epoch=1))
        await until(lambda: waits(lab) == 1)
        await turns()
        assert not broker.unread


async def test_what_another_connection_has_added_to_a_session_is_waited_for():
    async with open_lab(rules=(SLOW,)) as lab, asyncio.timeout(LIMIT_S):
        client, broker = await lab.pair(fetch(1, "clicks", epoch=0))
        await broker.send(fetched(1, {}))
        await client.frame()
        await exchange(client, broker, fetch(2, epoch=1), fetched(2, {"orders": 5000}))
        await until(lambda: charged(lab) == 5000)
        await client.send(fetch(3, epoch=2))
        await until(lambda: waits(lab) == 1)


async def test_of_topics_that_are_not_kept_those_are_waited_for_that_owe_most():
    rule = Rule(topic_prefix="o", bounds={CONSUMER: 1000.0})
    shown = {f"o{number}": 1 for number in range(2 * MAX_ASKED_TOPICS)}
    async with open_lab(rules=(rule,)) as lab, asyncio.timeout(LIMIT_S):
        client, broker = await lab.pair(fetch(1, *MANY, "orders", *shown, epoch=0))
        await broker.send(fetched(1, {"orders": 1_000_000} | shown))
        await client.frame()
        await until(lambda: lab.count("topic_walks_total") == 1)
        await client.send(fetch(2, epoch=1))
        await until(lambda: waits(lab) == 1)
        topics = next(each for each in lab.relay.connections).client.current.topics
        assert len(topics.fetched(clock_ms())) <= MAX_ASKED_TOPICS


async def test_what_is_named_by_an_id_is_charged_when_its_name_is_known():
    async with open_lab(rules=(PLENTY,)) as lab:
        client, broker = await lab.pair(fetch(1, ORDERS_ID, version=BY_ID))
        response = fetched(1, {ORDERS_ID: 5000}, BY_ID)
        await broker.send(response)
        assert await client.frame() == response
        names = lab.services.topic_names
        await until(lambda: names.wanted() == (ORDERS_ID.bytes,))
        assert charged(lab) == 0
        names.resolved({ORDERS_ID.bytes: "orders"})
        assert charged(lab) == 5000


async def test_a_fetch_is_limited_where_it_asks_for_a_bounded_topic():
    """Also for others beside it: all else that reads the topic would wait for what it brings."""
    rule = Rule(topic="orders", bounds={CONSUMER: float(BOUND)})
    async with open_lab(rules=(rule,)) as lab:
        most = int(BOUND * GRANT_MS / 1000)
        cases = ((("orders",), most), (("orders", "clicks"), most), (("clicks",), 1 << 20))
        for topics, limit in cases:
            client = await lab.client()
            await client.send(fetch(1, *topics, max_bytes=1 << 20))
            broker = await lab.broker()
            assert await broker.frame() == fetch(1, *topics, max_bytes=limit)


async def test_who_has_a_bound_alone_may_ask_for_other_topics_as_it_likes():
    rule = Rule(client_id="test", topic="orders", bounds={CONSUMER: float(BOUND)})
    async with open_lab(rules=(rule,)) as lab:
        for topics, is_limited in ((("orders",), True), (("orders", "clicks"), False)):
            sent = fetch(1, *topics, max_bytes=1 << 20)
            client = await lab.client()
            await client.send(sent)
            broker = await lab.broker()
            assert (await broker.frame() != sent) is is_limited


@pytest.mark.parametrize("acks", [0, 1])
@pytest.mark.parametrize("size", [10, 100_000])
async def test_a_request_is_charged_for_the_bytes_of_the_topic(acks, size):
    async with open_lab(rules=(PLENTY,)) as lab:
        client, broker = await lab.pair(fetch(1, "clicks"))
        await broker.send(fetched(1, {}))
        await client.frame()
        request = produce(2, {"clicks": 40_000, "orders": size}, acks)
        sending = asyncio.create_task(client.send(request))
        assert await broker.frame() == request
        await sending
        assert charged(lab) == size
        assert lab.count("topic_walks_total") == 2


@pytest.mark.parametrize("path", ["splice", "copy"])
async def test_a_response_of_many_topics_is_walked_in_turns(path, monkeypatch):
    """Each that a Fetch names has its place there, also those that there are not."""
    monkeypatch.setattr(pump, "MOST_WALK_S", 0.0)
    response = fetched(1, {f"no-{number}": 0 for number in range(20_000)})
    async with open_lab(rules=(PLENTY,), splice=path == "splice") as lab:
        turns_taken, queue = [], lab.services.paced_steps.queue

        def counted(step, address=""):
            turns_taken.append(address)
            queue(step, address)

        lab.services.paced_steps.queue = counted
        client, broker = await lab.pair(fetch(1, "no-0"))
        sending = asyncio.create_task(broker.send(response))
        assert await client.frame() == response
        await sending
        assert len(turns_taken) >= len(response) // COPY_BYTES - 1


@pytest.mark.parametrize("acks", [0, 1])
async def test_a_request_to_many_topics_is_charged_in_steps(acks, monkeypatch):
    """Thousands of names fit into few bytes, and each may need a sensor."""
    for name in ("MOST_S", "LEAST_S"):
        monkeypatch.setattr(paced_steps, name, 1e-9)  # one step in each round
    rule = Rule(topic_prefix="o", bounds={PRODUCER: 1e12})
    topics, loop, rounds = 40 * STEP_ELEMENTS, asyncio.get_running_loop(), 0

    def count_round():
        nonlocal rounds
        rounds += 1
        if not is_sent:
            loop.call_soon(count_round)

    request = produce(2, {f"o{number}": 1 for number in range(topics)}, acks)
    async with (
        open_lab(rules=(rule,), read_limit_bytes=2 * len(request)) as lab,
        asyncio.timeout(LIMIT_S),
    ):
        client, broker = await lab.pair(fetch(1, "clicks"))
        await broker.send(fetched(1, {}))
        await client.frame()
        is_sent = False
        count_round()
        await client.send(request)
        assert await broker.frame() == request
        is_sent = True
        assert rounds > topics // STEP_ELEMENTS
        rows = sensors_in_use(lab.services.quotas, clock_ms)
        assert sum(row.entity.startswith("topic=o") for row in rows) == topics


async def test_of_a_request_that_is_too_long_the_rest_is_the_topics_that_was_seen_last():
    async with open_lab(rules=(PLENTY,), read_limit_bytes=2 * MAX_SEEN_BYTES) as lab:
        client, broker = await lab.pair(fetch(1, "clicks"))
        await broker.send(fetched(1, {}))
        await client.frame()
        request = produce(2, {"orders": MAX_SEEN_BYTES, "clicks": 1000})
        sending = asyncio.create_task(client.send(request))
        assert await broker.receive(len(request)) == request
        await sending
        assert MAX_SEEN_BYTES < charged(lab) <= len(request)


@pytest.mark.parametrize("rule", [PLENTY, Rule(topic_prefix="ord", bounds=PLENTY.bounds)])
async def test_what_is_not_read_of_a_request_is_charged_to_all_that_rules_name(rule):
    """Else who writes a batch of another topic first writes as fast as it can."""
    async with open_lab(rules=(rule,), read_limit_bytes=2 * MAX_SEEN_BYTES) as lab:
        client, broker = await lab.pair(fetch(1, "clicks"))
        await broker.send(fetched(1, {}))
        await client.frame()
        request = produce(2, {"clicks": 70_000, "orders": MAX_SEEN_BYTES})
        sending = asyncio.create_task(client.send(request))
        assert await broker.receive(len(request)) == request
        await sending
        entity = "topic=orders" if rule.topic else "topic=ord"
        assert MAX_SEEN_BYTES < charged(lab, entity) <= len(request)


async def test_of_a_request_that_is_too_long_and_names_one_topic_others_have_nothing():
    async with open_lab(rules=(PLENTY,), read_limit_bytes=2 * MAX_SEEN_BYTES) as lab:
        client, broker = await lab.pair(fetch(1, "clicks"))
        await broker.send(fetched(1, {}))
        await client.frame()
        request = produce(2, {"clicks": MAX_SEEN_BYTES})
        sending = asyncio.create_task(client.send(request))
        assert await broker.receive(len(request)) == request
        await sending
        assert charged(lab) == 0


@pytest.mark.parametrize("acks", [0, 1])
async def test_a_request_for_a_topic_that_owes_waits(acks):
    async with open_lab(rules=(SLOW,)) as lab, asyncio.timeout(LIMIT_S):
        client, broker = await lab.pair(fetch(1, "clicks"))
        await broker.send(fetched(1, {}))
        await client.frame()
        await client.send(produce(2, {"orders": 5000}, acks))
        await broker.frame()
        other = await lab.client()
        await other.send(produce(1, {"clicks": 10}) + produce(2, {"orders": 10}, acks))
        behind = await lab.broker()
        await behind.frame()
        await until(lambda: waits(lab) == 1)
        await turns()
        assert not behind.unread
        lab.services.quotas.update(QuotaManagerSettings())
        await behind.frame()


async def test_a_rule_with_a_topic_that_comes_takes_a_client_out_of_the_lane():
    async with open_lab() as lab:
        client, broker = await lab.pair(fetch(1, "orders"))
        for number in range(2, 9):
            await broker.send(fetched(number - 1, {"orders": 100}))
            await client.frame()
            await client.send(fetch(number, "orders"))
            await broker.frame()
        lab.services.quotas.update(QuotaManagerSettings(rules=(PLENTY,)))
        for connection in lab.relay.connections:
            connection.follow_changes()
        for number in range(9, 12):
            await broker.send(fetched(number - 1, {"orders": 100}))
            await client.frame()
            await client.send(fetch(number, "orders"))
            await broker.frame()
        assert charged(lab) == 200, "all but the one that was under way"
